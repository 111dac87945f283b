"""The fixed-point product of the compiled kernels against its definition in exact integers."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.operations.base import Sizes
from engine.operations.linear import Linear
from tests.engine import exact
from tests.engine.bench import Array, Bench, normals, same_bits, within
from tests.engine.bounds import product_bound

LARGEST = 32639


def compiled_product(a: Array, b: Array) -> Array:
    """a @ b through the linear layer's kernels."""
    deep, wide = b.shape
    operation = Linear(
        name="linear",
        index=0,
        inputs={"x": "x"},
        outputs={"y": "y"},
        parameters={"weight": "weight"},
        role="head",
        wide=wide,
        deep=deep,
    )
    bench = Bench(
        operation,
        {"x": a.reshape(1, *a.shape)},
        {"weight": b.T},
        sizes=Sizes(batch=1, context=len(a), threads=1),
    )
    y = bench.forward()["y"][0]
    assert not bench.flags.any()
    return y


def to_fp32(value: Fraction) -> np.float32:
    """The nearest fp32, ties to even, by integer arithmetic alone."""
    if value == 0:
        return np.float32(0.0)
    magnitude = abs(value)
    exponent = -149
    while magnitude >= Fraction(2) ** (exponent + 24):
        exponent += 1
    units = round(magnitude / Fraction(2) ** exponent)  # round() of a Fraction takes ties to even
    if units * Fraction(2) ** exponent >= Fraction(2) ** 128:
        return np.float32(np.inf if value > 0 else -np.inf)
    result = np.float32(np.ldexp(float(units), exponent))
    return result if value > 0 else -result


def exponent_in_python(values: list[Fraction]) -> int:
    top = max(map(abs, values))
    if top == 0:
        return 0
    s = 200
    while round(top * Fraction(2) ** s) > LARGEST:
        s -= 1
    return s


def product_in_python(a: Array, b: Array) -> Array:
    """The definition, word for word, on unbounded integers and fractions."""
    rows = [[Fraction(float(x)) for x in row] for row in a]
    columns = [[Fraction(float(x)) for x in column] for column in b.T]
    scaled = []
    for vectors in (rows, columns):
        quantised = []
        for vector in vectors:
            s = exponent_in_python(vector)
            q = [round(x * Fraction(2) ** s) for x in vector]
            low = [(n + 128) % 256 - 128 for n in q]
            high = [(n - lo) // 256 for n, lo in zip(q, low, strict=True)]
            assert all(abs(h) <= 127 for h in high)
            quantised.append((s, high, low))
        scaled.append(quantised)
    c = np.empty((len(rows), len(columns)), np.float32)
    for i, (sa, ha, la) in enumerate(scaled[0]):
        for j, (sb, hb, lb) in enumerate(scaled[1]):
            p = sum(65536 * x * y + 256 * (x * v + u * y) for x, u, y, v in zip(ha, la, hb, lb, strict=True))
            c[i, j] = to_fp32(Fraction(p) / Fraction(2) ** (sa + sb))
    return c


# Magnitudes at which the exponent of a row is decided: the limit, half a unit around it, powers of 2.
EDGES = [
    value * 2.0**e
    for e in (-149, -133, -126, -14, 0, 1, 96, 112)
    for value in (32639.0, 32639.498, 32639.5, 32639.502, 32640.0, 32767.0, 32768.0, 16319.5, 16320.0, 1.0)
]
FLOATS = [x for x in map(np.float32, EDGES) if np.isfinite(x)]
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "random": st.floats(-4, 4, width=32),
    "any finite": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "subnormal": st.floats(-(2.0**-126), 2.0**-126, width=32),
    "huge": st.floats(2.0**126, float(np.finfo(np.float32).max), width=32),
    "edges": st.sampled_from(FLOATS).flatmap(lambda x: st.sampled_from([float(x), -float(x)])),
    "mostly zero": st.sampled_from([0.0, 0.0, 0.0, -0.0, 1.0, -3.5]),
    "smallest": st.sampled_from([2.0**-149, -(2.0**-149), 0.0]),
}


@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
@settings(max_examples=6)
@given(data=st.data())
def test_product_is_its_definition(left: str, right: str, data: Any) -> None:
    m, n, k = (data.draw(st.integers(1, limit)) for limit in (10, 3, 12))
    a, b = (
        np.array(data.draw(st.lists(KINDS[kind], min_size=size, max_size=size)), np.float32).reshape(shape)
        for kind, size, shape in ((left, m * k, (m, k)), (right, k * n, (k, n)))
    )
    expected = product_in_python(a, b)
    same_bits(exact.product(a, b), expected)
    same_bits(compiled_product(a, b), expected)


@settings(max_examples=40)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.one_of(st.integers(1, 2000), st.sampled_from([511, 512, 513, 1024, 1025])),
    spread=st.integers(0, 60),
    seed=st.integers(0, 2**32),
)
def test_product_at_any_shape_and_depth(m: int, n: int, k: int, spread: int, seed: int) -> None:
    """Rows of very different size, some all zero; depths across the 512 that int32 sums allow."""
    generator = np.random.default_rng(seed)
    a, b = normals(seed, m, k), normals(seed + 1, k, n)
    a *= np.ldexp(1.0, generator.integers(-spread, spread + 1, (m, 1))).astype(np.float32)
    b *= np.ldexp(1.0, generator.integers(-spread, spread + 1, (1, n))).astype(np.float32)
    a[generator.random(m) < 0.1] = 0
    b[:, generator.random(n) < 0.1] = 0
    c = compiled_product(a, b)
    same_bits(c, exact.product(a, b))
    within(c, a.astype(np.float64) @ b.astype(np.float64), product_bound(a, b))


@pytest.mark.parametrize("k", [1, 512, 513, 2000])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_integers_do_not_overflow(k: int, sign: int) -> None:
    """Every q is +-32639 or has the extreme lo = -128, at full depth: the sums at their limits."""
    a = np.full((9, k), 32639, np.float32)
    b = np.full((k, 33), sign * 32639, np.float32)
    a[1::2, :] = -32639
    a[2, 1:], b[1:, 2] = 32512 - 128, sign * (32512 - 128)
    same_bits(compiled_product(a, b), exact.product(a, b))


def test_results_past_fp32_are_infinite_and_below_it_subnormal_or_zero() -> None:
    big, small = np.float32(3e38), np.float32(2.0**-149)
    a = np.array([[big, big], [-big, -big], [small, 0], [2.0**-70, 0]], np.float32)
    b = np.array([[big, 2.0**-75], [big, 0]], np.float32)
    c = compiled_product(a, b)
    same_bits(c, exact.product(a, b))
    assert c[0, 0] == np.inf and c[1, 0] == -np.inf
    assert c[2, 1] == 0 and c[3, 1] == np.float32(2.0**-145)


def test_relative_error_on_normal_numbers() -> None:
    """What the definition is worth: 16-bit operands less the low*low part; below 2e-4 overall."""
    a, b = normals(1, 64, 1000), normals(2, 1000, 64)
    true = a.astype(np.float64) @ b.astype(np.float64)
    error = np.linalg.norm(compiled_product(a, b) - true) / np.linalg.norm(true)
    assert 1e-5 < error < 2e-4


def test_non_finite_operands_set_the_flag() -> None:
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        for into in ("x", "weight"):
            operation = Linear(
                name="linear",
                index=2,
                inputs={"x": "x"},
                outputs={"y": "y"},
                parameters={"weight": "weight"},
                role="head",
                wide=3,
                deep=5,
            )
            arrays = {"x": normals(1, 1, 9, 5), "weight": normals(2, 3, 5)}
            arrays[into].reshape(-1)[-1] = bad
            bench = Bench(
                operation,
                {"x": arrays["x"]},
                {"weight": arrays["weight"]},
                sizes=Sizes(batch=1, context=9, threads=1),
            )
            bench.forward()
            assert bench.flags.tolist() == [0, 0, 1]
