"""The sampling order: every window once an epoch, a function of its address, pinned."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import Tokens, TooShortError, TrainingOrder, ValidationWindows
from data_pipeline.order import epoch_key, permute


def counting(length: int) -> Tokens:
    """Tokens that are their own positions, in three parts."""
    return Tokens(np.array_split(np.arange(length, dtype=np.uint32), 3))


def batch_of(order: TrainingOrder, step: int, batch: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    inputs, targets = (np.full((batch, context), -1, np.int32) for _ in range(2))
    order.fill(step, inputs, targets)
    return inputs, targets


@given(st.integers(1, 300), st.binary(min_size=32, max_size=32))
def test_a_permutation(size: int, key: bytes) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_permutation_is_about_as_likely(size: int) -> None:
    orders = math.factorial(size)
    counts = Counter(
        tuple(permute(index, size, epoch_key(3, epoch)) for index in range(size)) for epoch in range(25 * orders)
    )
    assert len(counts) == orders
    assert max(counts.values()) < 60


def test_the_definition_by_other_means() -> None:
    """The documented definition, written out for one size."""
    size, key = 11, epoch_key(5, 6)
    a, b = 4, 3
    for index in range(size):
        value = index
        while True:
            for turn in range(8):
                left, right = value // b, value % b
                half = left if turn % 2 else right
                digest = blake3(bytes([turn, half, 0, 0, 0, 0, 0, 0, 0]), key=key).digest()
                number = sum(byte << 8 * place for place, byte in enumerate(digest[:8]))
                if turn % 2:  # noqa: SIM108 -- two lines read better
                    value = left * b + (right + number) % b
                else:
                    value = (left + number) % a * b + right
            if value < size:
                break
        assert permute(index, size, key) == value


def test_the_order_is_pinned() -> None:
    assert epoch_key(1337, 0).hex() == "fc5b04dc54532748a6f356f3812dd4fc8431180044705990faf8810b20726c15"
    assert [permute(index, 78_949, epoch_key(1337, 0)) for index in range(6)] == [
        66656,
        33529,
        12209,
        50348,
        12454,
        33593,
    ]
    assert [permute(index, 10, epoch_key(2**64 - 1, 2**40)) for index in range(10)] == [
        4,
        8,
        9,
        0,
        5,
        7,
        2,
        1,
        3,
        6,
    ]
    assert permute(10**15, 10**15 + 7, epoch_key(0, 0)) == 612480398358252


@given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_epochs_have_no_repetition_and_batches_may_straddle_them(
    length: int, context: int, batch: int, seed: int
) -> None:
    if length <= context:
        return
    order = TrainingOrder(counting(length), context, batch, seed)
    windows = (length - 1) // context
    assert order.windows == windows
    seen: list[int] = []
    for step in range(-(-3 * windows // batch)):
        inputs, targets = batch_of(order, step, batch, context)
        assert (targets == inputs + 1).all()
        assert (np.diff(inputs, axis=1) == 1).all()
        assert (inputs[:, 0] % context == 0).all()
        seen += (inputs[:, 0] // context).tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_a_position_is_a_number_not_a_stream() -> None:
    tokens = counting(1000)
    forward = TrainingOrder(tokens, 8, 4, 1)
    expected = {step: batch_of(forward, step, 4, 8)[0].tolist() for step in range(70)}
    for step in (69, 3, 31, 30, 0):
        fresh = TrainingOrder(tokens, 8, 4, 1)
        assert batch_of(fresh, step, 4, 8)[0].tolist() == expected[step]
    # The batch size cuts the same sequence elsewhere.
    wide = TrainingOrder(tokens, 8, 8, 1)
    assert batch_of(wide, 3, 8, 8)[0].tolist() == expected[6] + expected[7]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(TrainingOrder(counting(801), 8, 1, seed).window(100 * epoch + row) for row in range(100))
        for seed in (0, 1, 2, 2**64 - 1)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_neighbours_are_scattered() -> None:
    order = [permute(index, 10_000, epoch_key(1, 0)) for index in range(10_000)]
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 12
    assert abs(float(np.corrcoef(np.arange(10_000), order)[0, 1])) < 0.04


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64])
@pytest.mark.parametrize("split", ["training", "validation"])
def test_too_little_text_for_one_window(length: int, split: str) -> None:
    with pytest.raises(TooShortError) as caught:
        if split == "training":
            TrainingOrder(counting(length), 64, 32, 1)
        else:
            ValidationWindows(counting(length), 64)
    message = str(caught.value)
    assert f"the {split} split has {length} tokens" in message
    assert "needs 65" in message
    assert ("larger" if split == "validation" else "smaller") in message
    assert length < 2 or f"context of at most {length - 1}" in message


def test_one_window_fills_any_batch() -> None:
    inputs, targets = batch_of(TrainingOrder(counting(65), 64, 3, 1), 5, 3, 64)
    assert inputs.tolist() == [list(range(64))] * 3
    assert targets.tolist() == [list(range(1, 65))] * 3


@pytest.mark.parametrize(("length", "count"), [(65, 1), (128, 1), (129, 2), (1000, 15)])
def test_validation_windows_are_all_there_in_order(length: int, count: int) -> None:
    windows = ValidationWindows(counting(length), 64)
    assert windows.count == count
    inputs, targets = (np.zeros((count, 64), np.int32) for _ in range(2))
    windows.fill(0, inputs, targets)
    assert inputs.ravel().tolist() == list(range(count * 64))
    assert targets.ravel().tolist() == list(range(1, count * 64 + 1))
    windows.fill(count - 1, inputs[:1], targets[:1])
    assert inputs[0, 0] == (count - 1) * 64
    for first in (-1, 1):
        with pytest.raises(IndexError):
            windows.fill(first, inputs, targets)


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (1, 1, 2**64)])
def test_arguments_that_make_no_sense(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected context"):
        TrainingOrder(counting(10), *bad)


def test_buffers_of_another_shape_or_type_are_refused() -> None:
    order = TrainingOrder(counting(100), 8, 4, 1)
    good = np.zeros((4, 8), np.int32)
    for bad in (np.zeros((4, 9), np.int32), np.zeros((3, 8), np.int32), np.zeros((4, 8), np.int64)):
        with pytest.raises(ValueError, match=r"shape \(4, 8\)"):
            order.fill(0, good, bad)
        with pytest.raises(ValueError, match=r"shape \(4, 8\)"):
            order.fill(0, bad, good)
    with pytest.raises(ValueError, match="step"):
        order.fill(-1, good, good)
