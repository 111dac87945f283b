"""Our own products beside the MLP's activation, on a card of compute capability 9.0, against float64.

Elsewhere their place is taken by NumPy (fake_card.py); that they compile is shown by test_compile.py.
"""

import numpy as np
import pytest

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed import hopper_activation
from engine.backends.cuda.mixed.hopper_activation import DEEP, FORWARD, SHALLOW, SUM_ROWS, Form, HopperActivation
from tests.cuda.fake_card import Array, narrow, wide
from tests.cuda.guarded import guarded


@pytest.mark.parametrize("form", [FORWARD, DEEP, SHALLOW], ids=["forward", "deep", "shallow"])
def test_what_a_block_holds_fits_into_shared_memory(form: Form) -> None:
    barriers, sums = 1 << 9, 0 if form.both else 1 << 13  # static: sums of a tile's columns for each warp
    assert form.shared + barriers + sums <= 227 << 10


class Case:
    """Inputs, and what the kernel makes of some of their tokens, in memory that held NaN before."""

    def __init__(self, launcher: Launcher, sizes: tuple[int, int, int], dtype: str, relu: bool, bias: bool) -> None:
        tokens, width, hidden = sizes
        self.launcher, self.sizes, self.dtype, self.relu, self.bias = launcher, sizes, dtype, relu, bias
        rng = np.random.default_rng(sum(sizes))
        self.dy = narrow(rng.standard_normal((tokens, width)), dtype)
        self.weight = narrow(rng.standard_normal((width, hidden)), dtype)
        self.before = narrow(2 * rng.standard_normal((tokens, hidden)), dtype)

    def results(self, first: int = 0, tokens: int | None = None) -> tuple[Array, Array]:
        """dbefore as encodings, and the sums."""
        all_tokens, width, hidden = self.sizes
        tokens = all_tokens if tokens is None else tokens
        rows = slice(first, first + tokens)
        given = {"dy": self.dy[rows], "weight": self.weight, "before": self.before[rows]}
        made: dict[str, Array] = {
            "dbefore": np.empty((tokens, hidden), np.uint16),
            "parts": np.empty((-(-tokens // SUM_ROWS) if self.bias else 0, hidden), np.float32),
        }
        with guarded(self.launcher, given, made) as at:
            if not self.bias:
                at["parts"] = 0
            HopperActivation(self.launcher, self.dtype).backward((tokens, width, hidden), **at, relu=self.relu)
        return made["dbefore"], made["parts"]

    def expected(self) -> tuple[Array, Array]:
        x = wide(self.before, self.dtype)
        t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        gelu = (1 + t) / 2 + x / 2 * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)
        dbefore = wide(self.dy, self.dtype) @ wide(self.weight, self.dtype) * (x > 0 if self.relu else gelu)
        return dbefore, np.add.reduceat(dbefore, np.arange(0, len(x), SUM_ROWS), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [8, 136, 1024])
@pytest.mark.parametrize("width", [8, 200, 768])
@pytest.mark.parametrize("tokens", [1, 192, 1000])
@pytest.mark.parametrize(
    ("dtype", "relu", "bias"),
    [("bfloat16", False, True), ("float16", False, True), ("bfloat16", True, False)],
)
def test_products_are_near_float64_and_repeat(
    launcher: Launcher, dtype: str, relu: bool, bias: bool, tokens: int, width: int, hidden: int
) -> None:
    case = Case(launcher, (tokens, width, hidden), dtype, relu, bias)
    found, again, expected = case.results(), case.results(), case.expected()
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert np.abs(wide(found[0], dtype) - expected[0]).max() <= unit * np.abs(expected[0]).max()
    if bias:
        assert np.abs(found[1] - expected[1]).max() <= 2.0**-10 * np.abs(expected[1]).max()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 72, 520])
def test_more_tiles_than_the_card_takes_at_once(launcher: Launcher, width: int) -> None:
    """A block takes several tiles, of which some lie beyond the matrix."""
    case = Case(launcher, (64 * 75, width, 1288), "bfloat16", False, True)
    found, expected = case.results(), case.expected()
    assert np.abs(wide(found[0], "bfloat16") - expected[0]).max() <= 2.0**-8 * np.abs(expected[0]).max()
    assert np.abs(found[1] - expected[1]).max() <= 2.0**-10 * np.abs(expected[1]).max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [8, 384, 768])
def test_deep_and_shallow_forms_give_the_same_bits(
    launcher: Launcher, width: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(launcher, (320, width, 1024), dtype, False, True)
    found = []
    for form in (DEEP, SHALLOW):
        monkeypatch.setattr(hopper_activation, "form_of", lambda _, form=form: form)
        found.append(case.results())
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
def test_tokens_get_the_same_bits_however_many_there_are(launcher: Launcher) -> None:
    case = Case(launcher, (640, 256, 1024), "bfloat16", False, True)
    (whole, sums), (some, their_sums) = case.results(), case.results(192, 320)
    assert np.array_equal(whole[192:512], some) and np.array_equal(sums[3:8], their_sums)


class Forward:
    """Inputs of the forward half, and what the kernel makes of some of their tokens, in memory that held NaN before."""

    def __init__(self, launcher: Launcher, sizes: tuple[int, int, int], dtype: str, relu: bool, bias: bool) -> None:
        tokens, width, hidden = sizes
        self.launcher, self.sizes, self.dtype, self.relu, self.bias = launcher, sizes, dtype, relu, bias
        rng = np.random.default_rng(sum(sizes))
        self.given = {
            "x": narrow(rng.standard_normal((tokens, width)), dtype),
            "weight": narrow(2 / np.sqrt(width) * rng.standard_normal((hidden, width)), dtype),
            "bias": narrow(rng.standard_normal(hidden), dtype),
        }

    def results(self, first: int = 0, tokens: int | None = None) -> tuple[Array, Array]:
        """before and after as encodings."""
        all_tokens, width, hidden = self.sizes
        tokens = all_tokens if tokens is None else tokens
        given = self.given | {"x": self.given["x"][first : first + tokens]}
        made = {name: np.empty((tokens, hidden), np.uint16) for name in ("before", "after")}
        with guarded(self.launcher, given, made) as at:
            if not self.bias:
                at["bias"] = 0
            HopperActivation(self.launcher, self.dtype).forward((tokens, width, hidden), **at, relu=self.relu)
        return made["before"], made["after"]

    def expected(self, before: Array) -> tuple[Array, Array]:
        """before in float64, and after of what was found to be before."""
        x, weight, bias = (wide(self.given[name], self.dtype) for name in ("x", "weight", "bias"))
        z = wide(before, self.dtype)
        gelu = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        return x @ weight.T + (bias if self.bias else 0), np.maximum(z, 0) if self.relu else gelu


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [8, 136, 1024])
@pytest.mark.parametrize("width", [8, 72, 768])
@pytest.mark.parametrize("tokens", [1, 64, 200, 4096])
@pytest.mark.parametrize(("dtype", "relu", "bias"), [("bfloat16", False, True), ("float16", True, False)])
def test_what_the_activation_is_taken_of_and_gives_is_near_float64(
    tokens: int, width: int, hidden: int, dtype: str, relu: bool, bias: bool, launcher: Launcher
) -> None:
    case = Forward(launcher, (tokens, width, hidden), dtype, relu, bias)
    before, after = case.results()
    expected_before, expected_after = case.expected(before)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert np.abs(wide(before, dtype) - expected_before).max() <= unit * np.abs(expected_before).max()
    # tanh is approximate: 2**-11 at most
    distance = np.abs(wide(after, dtype) - expected_after)
    assert (distance <= unit * np.abs(expected_after) + 2.0**-11 * np.abs(wide(before, dtype))).all()
    for _ in range(2):
        assert all(np.array_equal(a, b) for a, b in zip(case.results(), (before, after), strict=True))
    part = case.results(tokens // 3, tokens - tokens // 3)
    assert all(np.array_equal(a, b[tokens // 3 :]) for a, b in zip(part, (before, after), strict=True))
