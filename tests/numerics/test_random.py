"""Random numbers: published vectors, addresses, dropout, and the law of normal variates."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mpmath
import numba
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from engine.numerics import random
from engine.numerics.errors import NumericsDomainError
from engine.numerics.random import (
    INITIAL_STEP,
    dropout_threshold,
    normal_fill,
    split_seed,
    uniform_u32,
)

words = st.integers(0, 2**32 - 1)


@numba.njit
def philox(counter: Any, key: Any) -> Any:
    return random.philox(counter[0], counter[1], counter[2], counter[3], key[0], key[1])


def philox_in_python(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The cipher once more, on unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def philox_compiled(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    result = philox(np.array(counter, dtype=np.uint32), np.array(key, dtype=np.uint32))
    return tuple(int(word) for word in result)


# The known answers of the Random123 distribution for philox4x32-10.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
@pytest.mark.parametrize("function", [philox_compiled, philox_in_python])
def test_philox_known_answers(function: Callable[[Any, Any], Any], counter: Any, key: Any, expected: Any) -> None:
    assert function(counter, key) == expected


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_philox_equals_its_definition(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert philox_compiled(counter, key) == philox_in_python(counter, key)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 2), words, st.integers(0, 2**63 - 1))
def test_word_of_an_address(seed: int, step: int, site: int, element: int) -> None:
    block = element // 4
    counter = (block % 2**32, block >> 32, site, step)
    expected = philox_in_python(counter, (seed % 2**32, seed >> 32))[element % 4]
    assert uniform_u32(seed, step, site, element) == expected


LIMITS = {"seed": 2**64, "step": 2**32 - 1, "site": 2**32, "element": 2**63}


@pytest.mark.parametrize("name", list(LIMITS))
def test_addresses_beyond_the_limits_are_refused(name: str) -> None:
    address = {"seed": 1, "step": 2, "site": 3, "element": 4}
    uniform_u32(**{**address, name: LIMITS[name] - 1})
    for beyond in (-1, LIMITS[name]):
        with pytest.raises(NumericsDomainError, match=f"{name}: .*found {beyond}"):
            uniform_u32(**{**address, name: beyond})


@numba.njit
def keep_by_blocks(low: Any, high: Any, step: Any, site: Any, threshold: Any, out: Any) -> None:
    for block in range(out.size // 4):
        four = random.random_words4(low, high, step, site, np.int64(block))
        out[4 * block] = four[0] >= threshold
        out[4 * block + 1] = four[1] >= threshold
        out[4 * block + 2] = four[2] >= threshold
        out[4 * block + 3] = four[3] >= threshold


def keep(probability: float, size: int = 1 << 20) -> Any:
    out = np.zeros(size, dtype=np.uint8)
    low, high = split_seed(2**40 + 5)
    keep_by_blocks(low, high, np.uint32(7), np.uint32(3), dropout_threshold(probability), out)
    return out


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.999])
def test_dropout_keeps_its_share(probability: float) -> None:
    kept = keep(probability)
    spread = math.sqrt(probability * (1 - probability) / kept.size)
    assert abs(kept.mean() - (1 - probability)) <= 5 * spread


def test_dropout_compares_each_word_with_the_threshold() -> None:
    kept = keep(0.3, 1000)
    threshold = int(dropout_threshold(0.3))
    expected = [uniform_u32(2**40 + 5, 7, 3, i) >= threshold for i in range(kept.size)]
    assert [bool(value) for value in kept] == expected


@pytest.mark.parametrize(
    ("probability", "threshold"),
    [
        (0.0, 0),
        (5e-324, 0),
        (0.1, 429496729),
        (0.2, 858993459),
        (0.5, 2**31),
        (0.75, 3 * 2**30),
        (2.0**-32, 1),
        (1 - 2.0**-53, 2**32 - 1),
    ],
)
def test_dropout_threshold(probability: float, threshold: int) -> None:
    assert dropout_threshold(probability) == threshold
    assert isinstance(dropout_threshold(probability), np.uint32)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_dropout_threshold_refuses_what_is_no_probability(probability: float) -> None:
    with pytest.raises(NumericsDomainError, match="dropout probability"):
        dropout_threshold(probability)


def normal(size: int, seed: int = 1337, site: int = 5, std: float = 1.0, start: int = 0) -> Any:
    out = np.full(size, np.nan, dtype=np.float32)
    normal_fill(out, seed, site, std, start)
    return out


# BLAKE3 of the first 2^20 variates of (seed 1337, site 5), as little-endian fp32.
GOLDEN_NORMAL = {
    1.0: "41a4d8bf1ce2f44167a9ab18b32539a0fb5a551b88d64df8be19a42a06ebd230",
    0.02: "a066b151b2ba803fc0d81997408b0682b81a4a65e2485aa8a9a815bfcbefc83b",
}


@pytest.mark.parametrize("std", list(GOLDEN_NORMAL))
def test_normal_variates_keep_their_bits(std: float) -> None:
    found = blake3(normal(1 << 20, std=std).astype("<f4").tobytes()).hexdigest()
    assert found == GOLDEN_NORMAL[std]


def test_a_generic_processor_gives_the_same_normal_variates() -> None:
    program = (
        "import numpy as np\n"
        "from blake3 import blake3\n"
        "from engine.numerics.random import normal_fill\n"
        "out = np.zeros(1 << 20, dtype=np.float32)\n"
        "normal_fill(out, 1337, 5, 0.02)\n"
        "print(blake3(out.astype('<f4').tobytes()).hexdigest())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    assert result.stdout.split() == [GOLDEN_NORMAL[0.02]]


@given(
    st.integers(0, 2**63 - 1000),
    st.integers(0, 70),
    st.lists(st.integers(0, 70), max_size=4),
)
def test_normal_variates_do_not_depend_on_how_the_range_is_cut(start: int, size: int, cuts: list[int]) -> None:
    whole = normal(size, start=start)
    borders = [0, *sorted(min(cut, size) for cut in cuts), size]
    pieces = [normal(b - a, start=start + a) for a, b in pairwise(borders)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole, strict=True)
    assert np.isfinite(whole).all()


def test_normal_variates_follow_their_definition() -> None:
    """Box-Muller from the words of the address, in high precision, rounded to fp32."""
    seed, site, start, std = 2**63 + 11, 9, 2**34 - 101, 0.02
    found = normal(400, seed, site, std, start)
    key = (seed % 2**32, seed >> 32)
    with mpmath.workdps(50):
        for i, value in enumerate(found):
            block, odd = divmod(start + i, 2)
            four = philox_in_python((block % 2**32, block >> 32, site, INITIAL_STEP), key)
            first, second = four[1] << 32 | four[0], four[3] << 32 | four[2]
            u = mpmath.mpf((first >> 11) + 1) / 2**53
            angle = 2 * mpmath.pi * (mpmath.mpf(second >> 11) / 2**53 - mpmath.mpf(0.5))
            turned = mpmath.sin(angle) if odd else mpmath.cos(angle)
            exact = mpmath.mpf(std) * mpmath.sqrt(-2 * mpmath.log(u)) * turned
            # One rounding to fp32, and a float64 error that can move a near-tie.
            assert abs(mpmath.mpf(float(value)) - exact) <= abs(float(np.spacing(value))) * (0.5 + 1e-7)


def test_normal_variates_are_standard_normal() -> None:
    size = 1 << 20
    x = normal(size).astype(np.float64)
    assert abs(x.mean()) <= 5 / math.sqrt(size)
    assert abs((x**2).mean() - 1) <= 5 * math.sqrt(2 / size)
    assert abs((x**3).mean()) <= 5 * math.sqrt(15 / size)
    assert abs((x**4).mean() - 3) <= 5 * math.sqrt(96 / size)
    for lag in (1, 2, 3, 4):
        assert abs((x[lag:] * x[:-lag]).mean()) <= 5 / math.sqrt(size)
    # The two of a pair share a radius: their squares must not be correlated either.
    squares = x**2 - 1
    assert abs((squares[::2] * squares[1::2]).mean()) <= 5 * 2 / math.sqrt(size / 2)
    for bound in (3.0, 4.0, 4.5):
        expected = size * math.erfc(bound / math.sqrt(2)) / 2
        for count in ((x > bound).sum(), (x < -bound).sum()):
            assert abs(count - expected) <= 5 * math.sqrt(expected)


def test_normal_variates_pass_kolmogorov_smirnov() -> None:
    size = 1 << 18
    for seed, site in ((1, 0), (1, 1), (2, 0)):
        x = np.sort(normal(size, seed, site).astype(np.float64))
        exact = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
        steps = np.arange(size + 1) / size
        distance = max(np.abs(steps[1:] - exact).max(), np.abs(steps[:-1] - exact).max())
        # The statistic exceeds this once in 2 million samples of a true normal distribution.
        assert distance * math.sqrt(size) <= 2.76


def test_normal_variates_of_other_addresses_are_others() -> None:
    base = normal(1000)
    for other in (normal(1000, seed=1338), normal(1000, seed=1337 + 2**32), normal(1000, site=6)):
        assert not np.any(base == other)
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / math.sqrt(1000)


def test_initial_weights_share_no_address_with_a_training_step() -> None:
    with pytest.raises(NumericsDomainError, match="step"):
        uniform_u32(1, INITIAL_STEP, 0, 0)


def test_a_standard_deviation_of_zero_gives_zeros() -> None:
    assert np.all(normal(10, std=0.0) == 0.0)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(4, dtype=np.float64),
        np.zeros((2, 2), dtype=np.float32),
        np.zeros(8, dtype=np.float32)[::2],
    ],
)
def test_normal_fill_refuses_other_arrays(out: Any) -> None:
    with pytest.raises(NumericsDomainError, match="contiguous 1-D float32"):
        normal_fill(out, 1, 2, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 1.0), "seed"),
        ((0, 2**32, 1.0), "random site"),
        ((0, 0, -1.0), "std"),
        ((0, 0, math.nan), "std"),
        ((0, 0, math.inf), "std"),
        ((0, 0, 1.0, -1), "first element"),
        ((0, 0, 1.0, 2**63 - 3), "first element"),
    ],
)
def test_normal_fill_refuses_what_it_is_not_defined_for(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(NumericsDomainError, match=message):
        normal_fill(np.zeros(4, dtype=np.float32), *arguments)
