"""Canonical JSON: one value, one byte string; nothing but canonical bytes is read."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import canonical
from artifacts.errors import Corrupt, InvalidInput

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_round_trip(value):
    data = canonical.dumps(value)
    assert canonical.loads(data) == value
    assert canonical.dumps(canonical.loads(data)) == data


@given(st.dictionaries(TEXT, VALUES, min_size=2, max_size=6))
def test_insertion_order_does_not_matter(value):
    assert canonical.dumps(dict(reversed(value.items()))) == canonical.dumps(value)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"b": 1, "a": [True, None, "é\n"]}, '{"a":[true,null,"é\\n"],"b":1}'),
        ({"\U0001f600": 1, "\ufb33": 2}, '{"\U0001f600":1,"\ufb33":2}'),  # UTF-16 order
        ([1.0, -0.0, 1e21, 1e20, 1e-7, 1e-6], "[1,0,1e+21,100000000000000000000,1e-7,0.000001]"),
        ((), "[]"),
    ],
)
def test_literal_bytes(value, data):
    assert canonical.dumps(value) == data.encode("utf-8")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" 1",
        b"1\n",
        b"1.0",
        b"-0",
        b"1E5",
        b"9007199254740993",
        b"1" * 5000,
        b"1e400",
        b"NaN",
        b"Infinity",
        b'{"a":1,"a":1}',
        b'{"b":1,"a":1}',
        b'"\\u0061"',
        b'"\\ud800"',
        b'{"\\ud800":1}',
        b'"\xff"',
        b"\xef\xbb\xbf1",
        b'{"a":1}x',
        b"[" * 33 + b"]" * 33,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'"' + b"a" * canonical.MAX_BYTES + b'"',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_other_bytes_are_refused(data):
    with pytest.raises(Corrupt, match="thing"):
        canonical.loads(data, "thing")


@given(st.binary(max_size=40))
def test_any_bytes_are_read_exactly_or_refused(data):
    try:
        value = canonical.loads(data)
    except Corrupt:
        return
    assert canonical.dumps(value) == data


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        2**53,
        "\ud800",
        {"\ud800": 1},
        {1: 2},
        {1, 2},
        b"bytes",
        object(),
        "a" * (canonical.MAX_BYTES + 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(InvalidInput):
        canonical.dumps(value)


def test_nesting_is_bounded_both_ways():
    deepest = []
    for _ in range(canonical.MAX_DEPTH - 1):
        deepest = [deepest]
    assert canonical.loads(canonical.dumps(deepest)) == deepest
    with pytest.raises(InvalidInput, match="nested"):
        canonical.dumps([deepest])
    circle = []
    circle.append(circle)
    with pytest.raises(InvalidInput, match="nested"):
        canonical.dumps(circle)
