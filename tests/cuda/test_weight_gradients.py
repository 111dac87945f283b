"""Our own kernel for gradients of weights on a card of compute capability 9.0, against float64.

Elsewhere its place is taken by NumPy (fake_card.py); that it compiles is shown by test_compile.py.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed import weight_gradients
from engine.backends.cuda.mixed.hopper_attention import serves
from engine.backends.cuda.mixed.products import Matrix
from engine.backends.cuda.mixed.weight_gradients import (
    LARGE,
    MOST_CHAINS,
    SMALL,
    Form,
    Taken,
    WeightGradients,
    chains_of,
)
from tests.cuda.fake_card import Array, narrow, wide

GUARD = 4096  # bytes behind the result


@pytest.mark.parametrize("rows", [8, 96, 768, 2304, 50257])
@pytest.mark.parametrize("columns", [8, 256, 768, 3072])
@pytest.mark.parametrize("shards", [1, 2, 8, 64])
def test_chains_are_cut_from_whole_shards(rows: int, columns: int, shards: int) -> None:
    chains = chains_of(rows, columns, shards)
    assert shards % chains == 0 and chains <= MOST_CHAINS
    assert Taken(rows, columns, 16, shards, shards, False).chain * chains == shards


def test_fewer_shards_at_once_than_half_of_a_chain_are_refused() -> None:
    taken = Taken(3072, 768, 1024, 8, 8, False)
    assert taken.chain == 8
    assert replace(taken, shards=4).chain == 8
    for shards in (2, 16):
        with pytest.raises(AssertionError, match=f"{shards} shards at once, where a chain has 8 of 8"):
            _ = replace(taken, shards=shards).chain


@pytest.mark.parametrize("form", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("chains", [1, MOST_CHAINS])
def test_a_tile_fits_into_shared_memory(form: Form, chains: int) -> None:
    assert form.blocks * (form.shared(chains) + 2048) <= 228 << 10


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    card = Card()
    if not serves(card.capability):
        pytest.skip("the kernel is for compute capability 9.0")
    yield Launcher(card)


class Call:
    """One gradient on the card, from matrices with lines of `stride` elements; it stands in memory that held NaN."""

    def __init__(self, launcher: Launcher, taken: Taken, stride: int, dtype: str) -> None:
        self.launcher, self.taken, self.stride, self.dtype = launcher, taken, stride, dtype
        rng = np.random.default_rng(taken.rows + taken.tokens)
        self.dy = narrow(rng.standard_normal((taken.shards, taken.tokens, stride)), dtype)
        self.x = narrow(rng.standard_normal((taken.shards, taken.tokens, taken.columns)), dtype)
        self.compute = WeightGradients(launcher)

    def expected(self) -> Array:
        dy, x = (wide(a.reshape(-1), self.dtype).reshape(a.shape) for a in (self.dy, self.x))
        return np.einsum("str,stc->rc", dy[:, :, : self.taken.rows], x)

    def result(self, at_once: int, times: int = 1) -> Array:
        """Taking `at_once` shards in a call, all of them `times` times, the second time added to the first."""
        driver, taken = self.launcher.card.driver, self.taken
        out = np.empty((taken.rows, taken.columns), np.float32)
        memory = {"dy": driver.mem_alloc(self.dy.nbytes), "x": driver.mem_alloc(self.x.nbytes)}
        memory["out"] = driver.mem_alloc(out.nbytes + GUARD)
        driver.memcpy_htod(memory["dy"], self.dy)
        driver.memcpy_htod(memory["x"], self.x)
        driver.memset_d8(memory["out"], 0xFF, out.nbytes + GUARD)
        dy_line, x_line = 2 * taken.tokens * self.stride, 2 * taken.tokens * taken.columns
        for call in range(times * (taken.shards // at_once)):
            first = call % (taken.shards // at_once) * at_once
            dy = Matrix(int(memory["dy"]) + first * dy_line, self.dtype, self.stride)
            x = Matrix(int(memory["x"]) + first * x_line, self.dtype, taken.columns)
            self.compute(dy, x, replace(taken, shards=at_once, adds=call > 0), int(memory["out"]))
        self.launcher.synchronise()
        driver.memcpy_dtoh(out, memory["out"])
        guard = np.empty(GUARD, np.uint8)
        driver.memcpy_dtoh(guard, int(memory["out"]) + out.nbytes)
        for address in memory.values():
            address.free()
        assert guard.min() == 0xFF, "written behind the gradient"
        return out


SHAPES = [  # rows, columns, tokens, shards, stride
    (200, 136, 72, 4, 208),
    (64, 8, 16, 8, 64),
    (1000, 776, 200, 4, 1000),
    (65, 64, 1, 2, 72),
    (769, 3072, 64, 4, 832),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("chains", [1, 2, 4])
@pytest.mark.parametrize("form", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_near_float64_and_the_same_however_shards_are_taken(
    shape: tuple[int, ...], form: Form, chains: int, dtype: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns, tokens, shards, stride = shape
    if chains > shards:
        pytest.skip("a chain has at least one shard")
    monkeypatch.setattr(weight_gradients, "form_of", lambda *_: form)
    monkeypatch.setattr(weight_gradients, "chains_of", lambda *_: chains)
    call = Call(launcher, Taken(rows, columns, tokens, shards, shards, False), stride, dtype)
    found, expected = call.result(shards), call.expected()
    # fp32 sums of exact products, some of which the tensor cores cut off instead of rounding.
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.array_equal(call.result(shards).view(np.uint32), found.view(np.uint32))
    assert np.array_equal(call.result(shards, times=2), 2 * found)
    at_once = shards // 2
    if chains <= 2 and at_once:
        # Halves of a chain; with two chains, one after the other.
        assert np.array_equal(call.result(at_once).view(np.uint32), found.view(np.uint32))
