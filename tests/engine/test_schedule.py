"""Learning rate and bias corrections against high precision."""

import itertools

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule import learning_rate, step_values
from tests.engine.training import train_spec


@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1), st.data())
def test_learning_rate(steps: int, peak: float, share: float, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    step = data.draw(st.integers(0, steps - 1))
    final = peak * share
    train = train_spec(steps=steps, warmup_steps=warmup, learning_rate=peak, final_learning_rate=final)
    rate = learning_rate(train, step)
    with mpmath.workprec(120):
        if step < warmup:
            expected = mpmath.mpf(peak) * (step + 1) / warmup
        elif steps - 1 - warmup <= 0:
            expected = mpmath.mpf(peak)
        else:
            t = mpmath.mpf(step - warmup) / (steps - 1 - warmup)
            expected = final + (1 + mpmath.cos(mpmath.pi * t)) / 2 * (mpmath.mpf(peak) - final)
        assert abs(rate - expected) <= 8 * 2.0**-53 * peak


def test_where_the_schedule_starts_and_ends() -> None:
    train = train_spec(steps=100, warmup_steps=10, learning_rate=0.5, final_learning_rate=0.125)
    rates = [learning_rate(train, step) for step in range(100)]
    assert rates[0] == 0.05 and rates[9] == rates[10] == 0.5 and rates[-1] == 0.125
    assert all(a <= b for a, b in itertools.pairwise(rates[:11]))
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize("step", [0, 1, 9, 999, 10**6])
def test_corrections_and_decay_are_rounded_once(step: int) -> None:
    train = train_spec(steps=2 * 10**6, beta1=0.9, beta2=0.999, weight_decay=0.3)
    values = step_values(train, step)
    with mpmath.workprec(200):
        for found, beta in ((values.correction1, 0.9), (values.correction2, 0.999)):
            expected = 1 - mpmath.mpf(beta) ** (step + 1)
            assert abs(found - expected) <= 2.0**-24 * (1 + 2.0**-20) * expected
        expected = 1 - mpmath.mpf(float(values.learning_rate)) * mpmath.mpf(0.3)
        assert values.decay == np.float32(float(expected))
