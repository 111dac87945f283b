"""The step digest's two numbers of a tensor: as their definition says, and other ones for other tensors."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.digest import APART, k_digest, k_group_digest
from engine.numerics.types import Floats
from tests.engine import exact

DEFINITIONS = {k_digest: exact.digest_words, k_group_digest: exact.grouped_digest_words}
KERNELS = pytest.mark.parametrize("add_up", DEFINITIONS)
SIZES = st.one_of(st.integers(1, 20), st.integers(1, 5 * APART))
encodings = st.tuples(SIZES, st.integers(0, 2**32 - 1)).map(
    lambda case: np.random.default_rng(case[1]).integers(0, 2**32, case[0]).tolist()
)


def tensor(encodings: list[int]) -> Floats:
    return np.array(encodings, np.uint32).view(np.float32)


def words(add_up: Callable[..., None], encodings: list[int]) -> tuple[int, ...]:
    sums = np.zeros(2, np.uint64)
    add_up(tensor(encodings), sums)
    return tuple(sums.tolist())


@KERNELS
@given(encodings)
def test_words_are_those_of_integers(add_up: Callable[..., None], encodings: list[int]) -> None:
    assert words(add_up, encodings) == DEFINITIONS[add_up](tensor(encodings))


@KERNELS
@given(encodings, st.data())
def test_one_changed_element_changes_both(
    add_up: Callable[..., None], encodings: list[int], data: st.DataObject
) -> None:
    """Whatever the difference is: factors are odd, and mixing is one-to-one."""
    other = list(encodings)
    other[data.draw(st.integers(0, len(other) - 1))] ^= data.draw(st.integers(1, 2**32 - 1))
    pairs = zip(words(add_up, encodings), words(add_up, other), strict=True)
    assert all(a != b for a, b in pairs)


@KERNELS
@given(st.integers(2, 3 * APART), st.data())
def test_an_exchange_of_two_elements_is_seen(add_up: Callable[..., None], size: int, data: st.DataObject) -> None:
    encodings = list(range(7, 7 + size))
    a, b = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    other = list(encodings)
    other[a], other[b] = other[b], other[a]
    assert words(add_up, encodings) != words(add_up, other)
