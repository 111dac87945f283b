"""Our own kernel for gradients of weights on a card of compute capability 9.0, against float64.

Elsewhere its place is taken by NumPy (fake_card.py); that it compiles is shown by test_compile.py.
"""

from dataclasses import replace

import numpy as np
import pytest

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed import weight_gradients
from engine.backends.cuda.mixed.products import Matrix
from engine.backends.cuda.mixed.squares import BLOCK, add_squares
from engine.backends.cuda.mixed.weight_gradients import (
    LARGE,
    MOST_CHAINS,
    SMALL,
    Form,
    Gradient,
    Taken,
    WeightGradients,
    chains_of,
)
from engine.backends.cuda.sources import Unit
from tests.cuda.fake_card import Array, narrow, wide
from tests.cuda.guarded import guarded


def gradient(rows: int, columns: int) -> Gradient:
    return Gradient(rows, columns, Matrix(0, "bfloat16", rows), Matrix(0, "bfloat16", columns), 0)


@pytest.mark.parametrize("rows", [8, 96, 768, 2304, 50257])
@pytest.mark.parametrize("columns", [8, 256, 768, 3072])
@pytest.mark.parametrize("shards", [1, 2, 8, 64])
def test_chains_are_cut_from_whole_shards(rows: int, columns: int, shards: int) -> None:
    for shapes in ([(rows, columns)], [(rows, columns), (columns, rows)]):
        chains = chains_of(shapes, shards)
        assert shards % chains == 0 and chains <= MOST_CHAINS
        chain = Taken(16, shards, shards, False).chain([gradient(*shape) for shape in shapes])
        assert chain * chains == shards


def test_fewer_shards_at_once_than_half_of_a_chain_are_refused() -> None:
    taken, gradients = Taken(1024, 8, 8, False), [gradient(3072, 768)]
    assert taken.chain(gradients) == 8
    assert replace(taken, shards=4).chain(gradients) == 8
    for shards in (2, 16):
        with pytest.raises(AssertionError, match=f"{shards} shards at once, where a chain has 8 of 8"):
            replace(taken, shards=shards).chain(gradients)


@pytest.mark.parametrize("form", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("chains", [1, MOST_CHAINS])
def test_a_tile_fits_into_shared_memory(form: Form, chains: int) -> None:
    assert form.blocks * (form.shared(chains) + 2048) <= 228 << 10


class Call:
    """Gradients on the card, of shapes (rows, columns), from matrices whose lines are whole in groups of 8; they stand
    in memory that held NaN."""

    def __init__(self, launcher: Launcher, shapes: list[tuple[int, int]], taken: Taken, dtype: str) -> None:
        self.launcher, self.shapes, self.taken, self.dtype = launcher, shapes, taken, dtype
        rng = np.random.default_rng(taken.tokens + len(shapes))
        self.given = [
            [narrow(rng.standard_normal((taken.shards, taken.tokens, stride(n))), dtype) for n in shape]
            for shape in shapes
        ]
        self.compute = WeightGradients(launcher)
        self.squares: list[Array] = []  # of the last results, added up on the way and by the kernel for it

    def expected(self) -> list[Array]:
        dtype = self.dtype
        pairs = ([wide(a.reshape(-1), dtype).reshape(a.shape) for a in pair] for pair in self.given)
        shapes = zip(pairs, self.shapes, strict=True)
        return [np.einsum("str,stc->rc", dy[..., :rows], x[..., :columns]) for (dy, x), (rows, columns) in shapes]

    def results(self, at_once: int, times: int = 1, squares: bool = False) -> list[Array]:
        """Taking `at_once` shards in a call, all of them `times` times, the second time added to the first. squares:
        whether the last call adds up squares."""
        taken, results = self.taken, [np.empty(shape, np.float32) for shape in self.shapes]
        calls = times * (taken.shards // at_once)
        given = {
            f"{name}{i}": array for i, pair in enumerate(self.given) for name, array in zip("yx", pair, strict=True)
        }
        made = {f"out{i}": result for i, result in enumerate(results)}
        if squares:
            self.squares = [np.empty((-(-r // BLOCK), -(-c // BLOCK))) for _ in range(2) for r, c in self.shapes]
            made |= {f"squares{i}": array for i, array in enumerate(self.squares)}
        with guarded(self.launcher, given, made) as at:
            for call in range(calls):
                first = call % (taken.shards // at_once) * at_once * taken.tokens
                gradients = [
                    Gradient(
                        *shape,
                        *(
                            Matrix(at[f"{name}{i}"] + 2 * first * stride(width), self.dtype, stride(width))
                            for name, width in zip("yx", shape, strict=True)
                        ),
                        at[f"out{i}"],
                        at[f"squares{i}"] if squares and call == calls - 1 else 0,
                    )
                    for i, shape in enumerate(self.shapes)
                ]
                self.compute(gradients, replace(taken, shards=at_once, adds=call > 0))
            if squares:
                unit = Unit("optimizer_mixed", {"HALF_BF16": int(self.dtype == "bfloat16")})
                for i, shape in enumerate(self.shapes):
                    place = at[f"squares{i + len(self.shapes)}"]
                    add_squares(self.launcher, unit, at[f"out{i}"], shape, place)
        return results


def stride(width: int) -> int:
    return -(-width // 8) * 8


def same(a: list[Array], b: list[Array]) -> bool:
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True))


CASES = [  # shapes, tokens, shards
    ([(200, 136)], 72, 4),
    ([(64, 8), (8, 64)], 16, 8),
    ([(1000, 776)], 200, 4),
    ([(65, 64)], 1, 2),
    ([(769, 3072), (1536, 200)], 64, 4),
    ([(385, 400), (128, 192)], 100, 4),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("chains", [1, 2, 4])
@pytest.mark.parametrize("form", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize(("shapes", "tokens", "shards"), CASES, ids=str)
def test_gradients_are_near_float64_and_the_same_however_shards_are_taken(
    shapes: list[tuple[int, int]],
    tokens: int,
    shards: int,
    form: Form,
    chains: int,
    dtype: str,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if chains > shards:
        pytest.skip("a chain has at least one shard")
    monkeypatch.setattr(weight_gradients, "form_of", lambda *_: form)
    monkeypatch.setattr(weight_gradients, "chains_of", lambda *_: chains)
    call = Call(launcher, shapes, Taken(tokens, shards, shards, False), dtype)
    found = call.results(shards)
    for result, expected in zip(found, call.expected(), strict=True):
        # fp32 sums of exact products, some of which the tensor cores cut off instead of rounding.
        assert np.abs(result - expected).max() < 1e-5 * np.abs(expected).max()
    assert same(call.results(shards), found)
    assert same(call.results(shards, times=2), [2 * result for result in found])
    if chains <= 2:
        # Halves of a chain; with two chains, one after the other.
        assert same(call.results(shards // 2), found)
    if chains > 1:
        with pytest.raises(AssertionError, match="one chain alone"):
            call.results(shards, squares=True)
        return
    for at_once, times in ((shards, 1), (shards, 2), (shards // 2, 1)):
        results = call.results(at_once, times, squares=True)
        assert same(results, [times * result for result in found])
        on_the_way, later = call.squares[: len(shapes)], call.squares[len(shapes) :]
        for ours, theirs, result in zip(on_the_way, later, results, strict=True):
            assert np.array_equal(ours, theirs)
            assert ours.sum() == pytest.approx((result.astype(np.float64) ** 2).sum(), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("spoiled", [None, np.inf, np.nan])
def test_squares_that_fp32_has_no_room_for(
    spoiled: float | None, form: Form, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_gradients, "form_of", lambda *_: form)
    monkeypatch.setattr(weight_gradients, "chains_of", lambda *_: 1)
    call = Call(launcher, [(200, 136)], Taken(72, 2, 2, False), "bfloat16")
    dy, x = (wide(array.reshape(-1), "bfloat16").reshape(array.shape) for array in call.given[0])
    dy[:, :, 70:75] *= 1e24
    if spoiled is not None:
        dy[0, 0, 72] = spoiled
    call.given[0] = [narrow(dy, "bfloat16"), narrow(x, "bfloat16")]
    (result,) = call.results(2, squares=True)
    on_the_way, later = call.squares
    assert np.array_equal(on_the_way, later, equal_nan=True)
    assert np.isfinite(on_the_way[[0, 2, 3]]).all()
    if spoiled is None:
        assert on_the_way[1].max() > 1e40
        assert on_the_way.sum() == pytest.approx((result.astype(np.float64) ** 2).sum(), rel=1e-6)
    else:
        assert not np.isfinite(on_the_way[1]).any()


@pytest.mark.gpu
def test_together_or_alone_gives_the_same_bits(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "chains_of", lambda *_: 2)
    shapes, taken = [(520, 136), (72, 1000)], Taken(80, 4, 4, False)
    both = Call(launcher, shapes, taken, "bfloat16")
    together = both.results(4)
    for number in range(2):
        alone = Call(launcher, shapes[number : number + 1], taken, "bfloat16")
        alone.given = both.given[number : number + 1]
        assert same(alone.results(4), together[number : number + 1])
