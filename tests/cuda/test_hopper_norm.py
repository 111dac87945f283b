"""The end of a branch and LayerNorm by our own kernel, on a card of compute capability 9.0, against float64.

Elsewhere the kernel's place is taken by NumPy (fake_card.py); that it compiles is shown by test_compile.py.
"""

import numpy as np
import pytest

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.layout import VALUES
from engine.backends.cuda.mixed.hopper_norm import ROWS, STAGES, HopperNorm, Norm, Product, shared
from engine.backends.cuda.run import NO_MASK
from engine.numerics.random import dropout_threshold
from engine.operations.dropout import keep_factor
from tests.cuda.attention_reference import dropped
from tests.cuda.fake_card import Array, narrow, wide
from tests.cuda.guarded import guarded

KEY, STEP, SITE = (12345, 678), 9, 3
FIRST_ROW = 1000  # of the batch, before which rows have random numbers too


@pytest.mark.parametrize("width", STAGES)
def test_what_a_block_holds_fits_into_shared_memory(width: int) -> None:
    barriers = 1 << 9
    assert shared(width) + barriers <= 227 << 10
    assert 2 * ROWS * width <= shared(width) - 1024  # the product stands where the operands were


class Case:
    """Inputs, and what the kernel makes of some of their tokens, in memory that held NaN before."""

    def __init__(
        self, launcher: Launcher, sizes: tuple[int, int, int], dtype: str, dropout: float = 0.0, bare: bool = False
    ) -> None:
        """bare: no bias, no parameters of LayerNorm."""
        self.tokens, self.width, self.depth = tokens, width, depth = sizes
        self.launcher, self.dtype, self.dropout, self.bare = launcher, dtype, dropout, bare
        rng = np.random.default_rng(sum(sizes))
        self.left = narrow(rng.standard_normal((tokens, depth)), dtype)
        self.weight = narrow(rng.standard_normal((width, depth)) / np.sqrt(depth), dtype)
        self.x = narrow(rng.standard_normal((tokens, width)) + 0.5, dtype)
        self.parameters = {
            name: rng.standard_normal(width).astype(np.float32) for name in ("branch_bias", "gain", "bias")
        }
        self.mask = (SITE, int(dropout_threshold(dropout)), float(keep_factor(dropout))) if dropout else NO_MASK
        self.values = np.zeros(1, VALUES)
        self.values["key"], self.values["step"] = KEY, STEP

    def results(self, first: int = 0, tokens: int | None = None) -> dict[str, Array]:
        tokens = self.tokens if tokens is None else tokens
        rows = slice(first, first + tokens)
        given = {"left": self.left[rows], "weight": self.weight, "x": self.x[rows], "values": self.values}
        made: dict[str, Array] = {name: np.empty((tokens, self.width), np.uint16) for name in ("sum", "y")}
        made |= {name: np.empty(tokens, np.float32) for name in ("mean", "rstd")}
        with guarded(self.launcher, given | self.parameters, made) as at:
            norm = Norm(
                **{name: 0 if self.bare else at[name] for name in self.parameters},
                **{name: at[name] for name in ("x", *made)},
                dropout=((FIRST_ROW + first) * self.width, *self.mask, at["values"]),
            )
            product = Product(at["left"], at["weight"], self.depth)
            HopperNorm(self.launcher, self.dtype)((tokens, self.width), product, norm)
        return made

    def expected_sum(self) -> Array:
        branch = wide(self.left, self.dtype) @ wide(self.weight, self.dtype).T
        branch = branch + (0 if self.bare else self.parameters["branch_bias"])
        if self.dropout:
            branch = dropped(branch, self.mask, KEY, STEP, FIRST_ROW * self.width)
        return wide(self.x, self.dtype) + branch

    def expected_y(self, total: Array) -> Array:
        """Of the sum that was found."""
        x = wide(total, self.dtype)
        normalised = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        return normalised if self.bare else normalised * self.parameters["gain"] + self.parameters["bias"]


def near(found: Array, expected: Array, dtype: str, units: float) -> None:
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert np.abs(wide(found, dtype) - expected).max() <= units * unit * np.abs(expected).max()


def same(found: dict[str, Array], again: dict[str, Array]) -> bool:
    return found.keys() == again.keys() and all(np.array_equal(found[name], again[name]) for name in found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dropout", "bare"), [("bfloat16", 0.0, False), ("float16", 0.2, False), ("bfloat16", 0.1, True)]
)
@pytest.mark.parametrize("width", STAGES)
@pytest.mark.parametrize("depth", [8, 72, 1024])
@pytest.mark.parametrize("tokens", [1, 64, 200, 20000])
def test_sums_and_norms_are_near_float64_and_repeat(
    launcher: Launcher, dtype: str, dropout: float, bare: bool, width: int, depth: int, tokens: int
) -> None:
    case = Case(launcher, (tokens, width, depth), dtype, dropout, bare)
    found = case.results()
    near(found["sum"], case.expected_sum(), dtype, 2)  # the product is rounded, and the sum
    near(found["y"], case.expected_y(found["sum"]), dtype, 1)
    total = wide(found["sum"], dtype)
    assert np.allclose(found["mean"], total.mean(1), rtol=1e-5, atol=1e-5)
    assert np.allclose(found["rstd"], 1 / np.sqrt(total.var(1) + 1e-5), rtol=1e-4)
    assert same(found, case.results())
    part = case.results(tokens // 3, tokens - tokens // 3)
    assert same({name: array[tokens // 3 :] for name, array in found.items()}, part)
