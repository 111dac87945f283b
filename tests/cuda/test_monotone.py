"""exp32 never falls where its argument rises: so the card finds a row's largest gradient by its largest logit."""

import numba
import numpy as np
import pytest

from engine.numerics.elementary import EXP_SMALLEST, exp32

FIRST = int(np.float32(-0.0).view(np.uint32))
LAST = int(EXP_SMALLEST.view(np.uint32)) + 2  # exp32 is 0 from there on
WINDOW = 1 << 16


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def falls(first: int, last: int) -> int:
    """How often exp32 rises from one encoding to the next, first..last: there arguments fall."""
    word = np.empty(1, np.uint32)
    argument = word.view(np.float32)
    word[0] = first
    before = exp32(argument[0])
    count = 0
    for encoding in range(first + 1, last + 1):
        word[0] = encoding
        value = exp32(argument[0])
        if value > before:
            count += 1
        before = value
    return count


def test_exp32_never_falls_in_samples_of_its_arguments() -> None:
    starts = np.random.default_rng(3).integers(FIRST, LAST - WINDOW, 64)
    assert all(falls(int(start), int(start) + WINDOW) == 0 for start in (*starts, FIRST, LAST - WINDOW))


def test_the_check_finds_a_function_that_falls() -> None:
    assert exp32(EXP_SMALLEST) > exp32(np.nextafter(EXP_SMALLEST, np.float32(-np.inf))) == 0.0


@pytest.mark.slow
def test_exp32_never_falls() -> None:
    assert falls(FIRST, LAST) == 0
