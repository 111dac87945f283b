"""Our own attention kernels of the tier prod on a card of compute capability 9.0, against float64.

Elsewhere their place is taken by NumPy (fake_card.py); that they compile is shown by test_compile.py.
"""

import numpy as np
import pytest

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.layout import VALUES
from engine.backends.cuda.mixed.flash import Heads, Places
from engine.backends.cuda.mixed.hopper_attention import HopperAttention, decision_mask, numbers_bytes
from tests.cuda.attention_reference import attention, kept_pairs, philox
from tests.cuda.fake_card import Array, narrow, wide
from tests.cuda.guarded import guarded

KEY, STEP, SITE, FIRST_ROW = (0x89ABCDEF, 0x01234567), 11, 3, 5


class Call:
    """One forward and one backward pass on the card; results stand in memory that held NaN before."""

    def __init__(self, launcher: Launcher, heads: Heads, rows: int, dtype: str) -> None:
        self.launcher, self.heads, self.rows, self.dtype = launcher, heads, rows, dtype
        rng = np.random.default_rng(heads.context + heads.width)
        shape = (rows, heads.context, heads.heads, heads.width)
        self.qkv = narrow(1.5 * rng.standard_normal((*shape[:2], 3, *shape[2:])), dtype)
        self.dy = narrow(rng.standard_normal(shape), dtype)
        self.mask = decision_mask(heads.dropout, SITE)

    def results(self) -> tuple[Array, Array, Array]:
        """y and dqkv, widened, and stats."""
        heads, rows = self.heads, self.rows
        values = np.zeros(1, VALUES)
        values["key"], values["step"] = KEY, STEP
        stats = np.empty((rows, heads.heads, heads.context), np.float32)
        y, dqkv = np.empty_like(self.dy), np.empty_like(self.qkv)
        given: dict[str, Array] = {"qkv": self.qkv, "dy": self.dy, "values": values}
        made: dict[str, Array] = {"y": y, "stats": stats, "dqkv": dqkv}
        with guarded(self.launcher, given, made, {"workspace": numbers_bytes(heads, rows)}) as at:
            places = Places(**at, first_row=FIRST_ROW, mask=self.mask)
            own = HopperAttention(self.launcher, self.dtype)
            own.forward(heads, rows, places)
            own.backward(heads, rows, places)
        return wide(y, self.dtype), stats, wide(dqkv, self.dtype)

    def expected(self) -> tuple[Array, Array, Array]:
        heads = self.heads
        q, k, v = (np.moveaxis(x, 2, 1) for x in np.moveaxis(wide(self.qkv, self.dtype), 2, 0))
        kept: Array | float = 1.0
        if heads.dropout:
            first = FIRST_ROW * heads.heads
            site, threshold, factor = self.mask
            numbers = range(first, first + self.rows * heads.heads)
            kept = factor * np.stack([kept_pairs(KEY, STEP, site, threshold, n, heads.context) for n in numbers])
            kept = kept.reshape(self.rows, heads.heads, heads.context, heads.context)
        y, stats, dq, dk, dv = attention(q, k, v, np.moveaxis(wide(self.dy, self.dtype), 2, 1), kept)
        dqkv = np.stack([np.moveaxis(x, 1, 2) for x in (dq, dk, dv)], 2)
        return np.moveaxis(y, 1, 2), stats, dqkv


@pytest.mark.gpu
@pytest.mark.parametrize("context", [1, 63, 64, 65, 130, 200, 256, 1024])
@pytest.mark.parametrize("width", [8, 16, 32, 64, 96, 128])
@pytest.mark.parametrize(("dtype", "dropout"), [("bfloat16", 0.0), ("float16", 0.0), ("bfloat16", 0.2)])
def test_attention_is_near_float64_and_repeats(
    launcher: Launcher, dtype: str, dropout: float, width: int, context: int
) -> None:
    call = Call(launcher, Heads(3, width, context, dropout), 2, dtype)
    found, again, expected = call.results(), call.results(), call.expected()
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for name, a, b, e in zip(("y", "stats", "dqkv"), found, again, expected, strict=True):
        assert np.array_equal(a, b), name
        # Weights and gradients of scores are rounded to 16 bits before they are multiplied, results once more.
        distance = np.abs(a - e).max() / max(np.abs(e).max(), 1.0)
        assert distance < (1e-4 if name == "stats" else 4 * unit), (name, distance)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [1, 64, 65, 192, 300])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_more_items_than_the_card_takes_at_once(launcher: Launcher, width: int, context: int) -> None:
    """Rows do not depend on how many there are. A block that stays takes items with and without a tile for its second
    warpgroup, whose every arrival others wait for."""
    rows = 150
    call = Call(launcher, Heads(5, width, context, 0.0), rows, "bfloat16")
    found = call.results()
    assert all(np.array_equal(a, b) for a, b in zip(found, call.results(), strict=True))
    for row in (0, 77, rows - 1):
        alone = Call(launcher, call.heads, 1, "bfloat16")
        alone.qkv, alone.dy = call.qkv[row : row + 1], call.dy[row : row + 1]
        for whole, one, expected in zip(found, alone.results(), alone.expected(), strict=True):
            assert np.array_equal(whole[row : row + 1], one)
            assert np.abs(one - expected).max() <= 2.0**-6 * max(np.abs(expected).max(), 1.0)


@pytest.mark.gpu
def test_dropout_goes_by_the_place_in_the_batch(launcher: Launcher) -> None:
    """Rows of the batch give the same bits in whichever call they are."""
    call = Call(launcher, Heads(2, 32, 100, 0.3), 2, "bfloat16")
    call.qkv[1], call.dy[1] = call.qkv[0], call.dy[0]
    y, _, dqkv = call.results()
    assert not np.array_equal(y[0], y[1]) and not np.array_equal(dqkv[0], dqkv[1])


def test_philox_is_that_of_its_authors() -> None:
    """The known answers of the reference implementation for counters and keys of zeros and of ones."""
    found = philox(np.zeros((4, 1), np.uint64), (0, 0))[:, 0].tolist()
    assert found == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = np.full((4, 1), 0xFFFFFFFF, np.uint64)
    found = philox(ones, (0xFFFFFFFF, 0xFFFFFFFF))[:, 0].tolist()
    assert found == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_dropped_pairs_are_as_many_as_asked_for_and_differ_from_head_to_head() -> None:
    site, threshold, factor = decision_mask(0.3, SITE)
    first, second = (kept_pairs(KEY, STEP, site, threshold, head, 200) for head in (0, 1))
    for kept in (first, second):
        assert abs(kept.mean() * factor - 1) < 0.02
        assert len(np.unique(kept, axis=0)) == len(np.unique(kept, axis=1)[0]) == 200
    assert 0.5 < (first == second).mean() < 0.66  # 0.58 of independent ones
