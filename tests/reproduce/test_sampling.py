"""Drawing tokens: exact weights, ties by id, the sliding window, and one golden text."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.numerics.random import uniform_u32
from engine.sampling import SAMPLING_SITE, candidates, draw, k_sampling_weights, sample

LOGITS = arrays(np.float32, st.integers(1, 40), elements=st.floats(-50, 50, width=32))


@given(LOGITS, st.integers(0, 45))
def test_candidates_are_the_largest_and_of_equals_the_first(logits, top_k):
    expected = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    expected = sorted(expected[:top_k] if top_k else expected)
    assert candidates(logits, top_k).tolist() == expected


@given(LOGITS, st.floats(0.05, 20))
def test_weights_are_the_exponentials(logits, temperature):
    weights = np.zeros(len(logits), np.int64)
    chosen = np.arange(len(logits))
    k_sampling_weights(logits, chosen, np.float32(temperature), weights)
    largest = float(logits.max())
    for logit, weight in zip(logits.tolist(), weights.tolist(), strict=True):
        scaled = (Fraction(logit) - Fraction(largest)) / Fraction(float(np.float32(temperature)))
        exact = float(mpmath.exp(mpmath.mpf(scaled.numerator) / scaled.denominator)) * 2**30
        # A fp32 argument x has a relative error of 2^-23, so exp(x) one of |x| 2^-23.
        assert abs(weight - exact) <= 1 + exact * 2.0**-22 * (2 + abs(float(scaled)))


@given(LOGITS, st.integers(0, 2**53), st.integers(0, 1000))
def test_a_draw_is_where_the_random_word_points(logits, seed, position):
    weights = np.zeros(len(logits), np.int64)
    k_sampling_weights(logits, np.arange(len(logits)), np.float32(1.0), weights)
    word = uniform_u32(seed, position, SAMPLING_SITE, 1) << 32 | uniform_u32(seed, position, SAMPLING_SITE, 0)
    point = word * sum(weights.tolist()) >> 64
    expected = next(i for i in range(len(logits)) if point < sum(weights[: i + 1].tolist()))
    assert draw(logits, 1.0, 0, seed, position) == expected


def test_draws_have_the_frequencies_of_their_weights():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    drawn = [draw(logits, 1.0, 0, 3, position) for position in range(4000)]
    counts = np.bincount(drawn, minlength=4) / 4000
    # Four standard deviations of the most uncertain frequency.
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 4 * (0.25 / 4000) ** 0.5


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first():
    assert draw(np.array([1, 7, 7, 2], np.float32), 0.0, 0, 1, 1) == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 100.0])
def test_extreme_temperatures_draw_something(temperature):
    assert draw(np.array([0, 3, 1], np.float32), temperature, 0, 1, 1) in (0, 1, 2)


def test_a_tiny_temperature_is_greedy():
    logits = np.array([0, 3, 1], np.float32)
    assert {draw(logits, 1e-40, 0, seed, 0) for seed in range(50)} == {1}


def test_the_window_slides_and_unknown_ids_are_never_drawn():
    seen = []

    def next_logits(tokens):
        seen.append(tokens.tolist())
        return np.array([0, 0, 5, 99], np.float32)

    drawn = list(sample(next_logits, 3, [0, 1, 0, 1], tokens=3, vocabulary=3, temperature=0.0, top_k=0, seed=1))
    assert drawn == [2, 2, 2]
    assert seen == [[1, 0, 1], [0, 1, 2], [1, 2, 2]]


def test_a_context_of_one():
    seen = []

    def next_logits(tokens):
        seen.append(tokens.tolist())
        return np.array([0, 1], np.float32)

    assert list(sample(next_logits, 1, [0, 0], tokens=2, vocabulary=2, temperature=0.0, top_k=0, seed=1)) == [1, 1]
    assert seen == [[0], [1]]


def test_golden_draws():
    logits = (np.arange(50, dtype=np.float32) * np.float32(0.37)) % np.float32(3.0)
    drawn = [draw(logits, 0.8, 20, 1, position) for position in range(12)]
    assert drawn == [23, 16, 31, 13, 24, 39, 38, 40, 47, 23, 46, 24]
