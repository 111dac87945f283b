"""Every kernel of the tier prod against float64, run on the CPU by the emulator beside this file: no GPU is needed.

The card itself adds what an emulator cannot show: its own approximations, memory and timing (test_mixed.py).
"""

import ctypes
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends.cuda.layout import OUTCOME, PIECE, VALUES
from engine.backends.cuda.mixed.parts import Parts, SumPlaces
from engine.backends.cuda.mixed.twins import norm_threads
from engine.digest import k_group_digest
from engine.numerics.random import dropout_threshold, split_seed
from engine.operations.dropout import k_dropout, keep_factor
from tests.cuda.emulation import COMPILER, Emulated, Mask
from tests.cuda.fake_card import of_e4m3

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")

Array = npt.NDArray[Any]
Launch = Callable[..., None]
BF16, FP16 = "bf16", "fp16"
STEP, SEED, SITE = 7, 1234567890123, 5
NOTHING = Mask(0, 0, 1.0)


ROUNDED_TWICE, CONTRACTED = False, True


@pytest.fixture(
    scope="module",
    params=[ROUNDED_TWICE, pytest.param(CONTRACTED, marks=pytest.mark.slow)],
    ids=["plain", "contracted"],
)
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Emulated]]:
    """Units by name, precision and macros, each compiled once."""
    made: dict[tuple[Any, ...], Emulated] = {}

    def unit(name: str, precision: str = BF16, **macros: int) -> Emulated:
        key = (name, precision, *sorted(macros.items()))
        if key not in made:
            whole = {"HALF_BF16": int(precision == BF16), **macros}
            made[key] = Emulated(f"{name}_mixed", whole, tmp_path_factory.mktemp(name), request.param)
        return made[key]

    yield unit


def narrow(x: Array, precision: str = BF16) -> Array:
    """To 16 bits, as their encodings."""
    x = np.asarray(x, np.float32)
    if precision == FP16:
        return x.astype(np.float16).view(np.uint16)
    words = x.view(np.uint32).astype(np.uint64)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def wide(words: Array, precision: str = BF16) -> Array:
    """From encodings to float64."""
    if precision == FP16:
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def values(**fields: Any) -> Array:
    """What a step tells its kernels."""
    found = np.zeros(1, VALUES)
    found["key"], found["step"], found["loss_scale"] = split_seed(SEED), STEP, 1.0
    for name, value in fields.items():
        found[name] = value
    return found


def mask_of(probability: float) -> Mask:
    return Mask(SITE, int(dropout_threshold(probability)), float(keep_factor(probability)))


def kept(shape: tuple[int, ...], base: int, probability: float) -> Array:
    """What each element is multiplied by."""
    ones = np.ones(int(np.prod(shape)), np.float32)
    low, high = split_seed(SEED)
    step, site = np.uint32(STEP), np.uint32(SITE)
    threshold, factor = dropout_threshold(probability), keep_factor(probability)
    k_dropout(ones, 0, ones.size, base, low, high, step, site, threshold, factor)
    return ones.reshape(shape).astype(np.float64)


def near(found: Array, expected: Array, tolerance: float) -> None:
    """Within a tolerance relative to the largest number."""
    assert np.abs(found - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-30)


def tree(parts: Array) -> Array:
    """The binary tree over the first axis, in fp32."""
    parts = parts.astype(np.float32)
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


UNIT = {BF16: 2.0**-8, FP16: 2.0**-11}
PRECISIONS = pytest.mark.parametrize("precision", [BF16, FP16])


# --- LayerNorm ------------------------------------------------------------------------------------------------------


def normalised(x: Array) -> tuple[Array, Array, Array]:
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (x - mean) * rstd, mean, rstd


@PRECISIONS
@pytest.mark.parametrize("width", [8, 72, 264, 768])
@pytest.mark.parametrize("parameters", [True, False])
def test_norm_forward(kernels, precision: str, width: int, parameters: bool) -> None:
    rng = np.random.default_rng(width)
    rows, base, probability = 13, 4 * width * 8, 0.3
    x, branch = narrow(normal(rng, rows, width), precision), narrow(normal(rng, rows, width), precision)
    gain, bias = 1 + normal(rng, width) / 8, normal(rng, width)
    y, mean, rstd = np.zeros_like(x), np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    added = wide(x, precision) + wide(branch, precision) * kept((rows, width), base, probability)
    places = (gain, bias) if parameters else (None, None)
    total = branch  # in its place
    kernels("layernorm", precision, WIDTH=width, SUMS=int(parameters), NORMALISED=int(not parameters))(
        "k_norm_fwd", (2,), (256,), x, branch, *places, rows, total, y, mean, rstd,
        ctypes.c_int64(base), mask_of(probability), values(),
    )  # fmt: skip
    near(wide(total, precision), added, UNIT[precision])
    n, m, r = normalised(wide(total, precision))
    near(mean, m[:, 0], 1e-5)
    near(rstd, r[:, 0], 1e-4)
    near(wide(y, precision), n * gain + bias if parameters else n, UNIT[precision])


def test_norm_forward_without_a_branch(kernels) -> None:
    rng = np.random.default_rng(1)
    x, y = narrow(normal(rng, 5, 72)), np.zeros((5, 72), np.uint16)
    mean, rstd = np.zeros(5, np.float32), np.zeros(5, np.float32)
    before = x.copy()
    kernels("layernorm", WIDTH=72, SUMS=0, NORMALISED=0)(
        "k_norm_fwd", (1,), (256,), x, None, None, None, 5, None, y, mean, rstd, ctypes.c_int64(0), NOTHING, values()
    )
    assert np.array_equal(x, before)
    near(wide(y), normalised(wide(x))[0], UNIT[BF16])


@PRECISIONS
@pytest.mark.parametrize("width", [8, 72, 128, 256, 264, 384, 512, 640, 768, 1288])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_norm_backward(kernels, precision: str, width: int, joined: bool, is_normalised: bool) -> None:
    rng = np.random.default_rng(width)
    shards, tokens, rows, base, probability = 2, 21, 8, 4 * width * 8, 0.3
    shape = (shards, tokens, width)
    x, dy = narrow(3 * normal(rng, *shape) + 1, precision), narrow(normal(rng, *shape), precision)
    dsum = narrow(normal(rng, *shape), precision)
    gain = 1 + normal(rng, width) / 8
    n, mean, rstd = normalised(wide(x, precision))
    mean = mean.astype(np.float32)
    if is_normalised:
        x, mean = narrow(n, precision), np.full_like(mean, np.nan)  # which nothing may ask for
        n = wide(x, precision)
    blocks = -(-tokens // rows)
    dx, dbranch = np.zeros_like(x), np.zeros_like(x)
    partial = np.full((shards, blocks, 3, width), np.nan, np.float32)

    def launch(dx: Array, dbranch: Array, partial: Array | None) -> None:
        macros = {"SUMS": int(partial is not None), "NORMALISED": int(is_normalised)}
        kernels("layernorm", precision, WIDTH=width, **macros)(
            "k_norm_bwd", (blocks, shards), (norm_threads(width),), x, mean,
            rstd.astype(np.float32), gain, dy, dsum if joined else None, dx, dbranch if joined else None, tokens, rows,
            ctypes.c_int64(base), mask_of(probability), values(), partial,
        )  # fmt: skip

    launch(dx, dbranch, partial)
    g, d = wide(dy, precision) * gain, wide(dy, precision)
    expected = rstd * (g - g.mean(-1, keepdims=True) - n * (g * n).mean(-1, keepdims=True))
    if joined:
        expected = expected + wide(dsum, precision)
    near(wide(dx, precision), expected, UNIT[precision])
    sums = partial.astype(np.float64).sum(1)
    near(sums[:, 0], (d * n).sum(1), 1e-5)
    near(sums[:, 1], d.sum(1), 1e-5)
    if joined:
        dropped = expected * kept(shape, base, probability)
        near(wide(dbranch, precision), dropped, UNIT[precision])
        near(sums[:, 2], dropped.sum(1), 1e-4)
    else:
        near(sums[:, 2], expected.sum(1), 1e-4)
    alone, branch = np.zeros_like(x), np.zeros_like(x)
    launch(alone, branch, None)
    assert np.array_equal(dx, alone) and np.array_equal(dbranch, branch)


# --- sums of columns ------------------------------------------------------------------------------------------------


@PRECISIONS
def test_column_sums(kernels, precision: str) -> None:
    rng = np.random.default_rng(2)
    shards, tokens, width = 4, 150, 264
    x = narrow(normal(rng, shards, tokens, width), precision)
    partial = np.full((shards, 2, width), np.nan, np.float32)
    unit = kernels("linear", precision)
    unit("k_column_sums", (2, 2, shards), (256,), x, tokens, width, partial)
    rows = wide(x, precision)
    near(partial, np.stack([rows[:, :128].sum(1), rows[:, 128:].sum(1)], 1), 1e-5)


@pytest.mark.parametrize("shards", [1, 2, 8, 64])
@pytest.mark.parametrize("add", [0, 1])
def test_parts_of_several_operations_are_combined_at_once(kernels, shards: int, add: int) -> None:
    rng = np.random.default_rng(3)
    parts = {"a": Parts(19, 40, ("g", None, "b")), "b": Parts(2, 264, ("c",)), "unused": Parts(3, 8, (None,))}
    places = SumPlaces(parts, shards)
    buffer = normal(rng, places.elements)
    parameters = {"g": 304, "b": 0, "c": 40}
    table = places.table(parameters)
    assert len(table) == places.rows == 1 + 1 + 3
    out = normal(rng, 352)
    before = out.copy()
    grid = (places.rows,)
    kernels("linear")("k_combine", grid, (32, 4, 4), buffer, table, shards, out, add)
    expected = before.astype(np.float64)
    for name, part in parts.items():
        start = places.places[name]
        size = shards * part.blocks * part.line
        shape = (shards, part.blocks, len(part.outputs), part.width)
        sums = buffer[start : start + size].reshape(shape).astype(np.float64).sum((0, 1))
        for kind, output in enumerate(part.outputs):
            if output is not None:
                span = slice(parameters[output], parameters[output] + part.width)
                expected[span] = (before[span] if add else 0) + sums[kind]
    near(out, expected, 1e-5)
    assert np.array_equal(out[344:], before[344:])


def test_shards_are_joined_by_the_tree(kernels) -> None:
    """However many are taken at once."""
    rng = np.random.default_rng(4)
    places = SumPlaces({"a": Parts(1, 8, ("g",))}, 8)
    buffer = normal(rng, 8, 8)
    out = np.zeros(8, np.float32)
    unit = kernels("linear")
    unit("k_combine", (1,), (32, 4, 4), buffer, places.table({"g": 0}), 8, out, 0)
    assert np.array_equal(out, tree(buffer))
    halves = np.zeros(8, np.float32)
    for half in (0, 1):
        unit("k_combine", (1,), (32, 4, 4), buffer[4 * half :], places.table({"g": 0}), 4, halves, half)
    assert np.array_equal(halves, out)


# --- activations ----------------------------------------------------------------------------------------------------


def gelu(x: Array) -> tuple[Array, Array]:
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * slope


@PRECISIONS
@pytest.mark.parametrize("relu", [0, 1])
def test_activation(kernels, precision: str, relu: int) -> None:
    rng = np.random.default_rng(4)
    shards, tokens, width = 2, 131, 264
    x, dy = (narrow(2 * normal(rng, shards, tokens, width), precision) for _ in range(2))
    y, before = np.zeros_like(x), wide(dy, precision)
    unit = kernels("activation", precision, RELU=relu)
    unit("k_activation_fwd", (-(-x.size // 2048),), (256,), x, ctypes.c_int64(x.size), y)
    value, slope = gelu(wide(x, precision))
    if relu:
        value, slope = np.maximum(wide(x, precision), 0), (wide(x, precision) > 0).astype(np.float64)
    near(wide(y, precision), value, UNIT[precision])
    partial = np.full((shards, 3, width), np.nan, np.float32)
    unit("k_activation_bwd", (2, 3, shards), (256,), x, tokens, width, dy, partial)
    near(wide(dy, precision), before * slope, UNIT[precision])
    near(partial.sum(1), (before * slope).sum(1), 1e-4)


# --- embedding ------------------------------------------------------------------------------------------------------


def order_and_spans(unit: Emulated, ids: Array, vocab: int) -> tuple[Array, Array]:
    shards, tokens = ids.shape
    order, spans = np.full((shards, tokens), -1, np.int32), np.zeros((shards, vocab, 2), np.int32)
    unit("k_embed_places", (-(-tokens // 64), shards), (64,), ids, tokens, vocab, order, spans)
    for found, row in zip(order, ids, strict=True):
        assert np.array_equal(found, np.argsort(row, kind="stable"))
    return order, spans


@pytest.mark.parametrize("width", [8, 264])
def test_embedding(kernels, width: int) -> None:
    rng = np.random.default_rng(5)
    shards, rows, context, vocab, probability = 2, 5, 30, 9, 0.2  # more rows than are read at once
    tokens, base = rows * context, 4 * context * width
    ids = rng.integers(0, vocab - 1, (shards, tokens), dtype=np.int32)  # the last one never occurs
    token, position = normal(rng, vocab, width), normal(rng, context, width)
    y = np.zeros((shards, tokens, width), np.uint16)
    factors = kept(y.shape, base, probability)
    unit, groups = kernels("embed"), -(-y.size // 2048)
    common = (ctypes.c_int64(base), mask_of(probability), values())
    unit("k_embed_fwd", (groups,), (256,), ids, context, token, position, ctypes.c_int64(y.size), width, y, *common)
    places = np.arange(tokens) % context
    near(wide(y), (token[ids].astype(np.float64) + position[places]) * factors, UNIT[BF16])
    dy = narrow(normal(rng, *y.shape))
    gradient = wide(dy) * factors
    places = order_and_spans(unit, ids, vocab)
    expected = np.zeros((shards, vocab, width))
    for shard in range(shards):
        np.add.at(expected[shard], ids[shard], gradient[shard])
    dtoken = np.full((vocab, width), np.nan, np.float32)
    sizes = (shards, tokens, vocab, width)
    grid, block = (vocab, -(-width // 256)), (32 * shards,)
    unit("k_embed_bwd_token", grid, block, *places, *sizes, dy, *common, None, dtoken, 0)
    near(dtoken, expected.sum(0), 1e-5)
    rare = np.full_like(dtoken, np.nan)
    few = (-(-vocab // 8), grid[1])
    unit("k_embed_bwd_token_rare", few, (256,), *places, *sizes, dy, *common, None, rare, 0)
    assert np.array_equal(dtoken, rare)
    assert not dtoken[vocab - 1].any()
    others = normal(rng, shards, vocab, width)  # what the head has written
    unit("k_embed_bwd_token", grid, block, *places, *sizes, dy, *common, others, dtoken, 1)
    near(dtoken, (2 * expected + others).sum(0), 1e-5)
    unit("k_embed_bwd_token_rare", few, (256,), *places, *sizes, dy, *common, others, rare, 1)
    assert np.array_equal(dtoken, rare)
    for name, blocks, threads in (("k_embed_bwd_token", grid, block), ("k_embed_bwd_token_rare", few, (256,))):
        stays = np.full_like(dtoken, -0.0)  # nothing is added where an id does not occur
        unit(name, blocks, threads, *places, *sizes, dy, *common, None, stays, 1)
        assert np.signbit(stays[vocab - 1]).all()
    dposition = np.zeros((context, width), np.float32)
    groups = -(-dposition.size // 2048)
    summed = gradient.reshape(shards * rows, context, width).sum(0)
    for add in (0, 1):
        unit("k_embed_bwd_position", (groups,), (256,), shards, tokens, context, width, dy, *common, dposition, add)
        near(dposition, (1 + add) * summed, 1e-5)


@pytest.mark.parametrize("shards", [1, 2, 4, 8, 64])
def test_token_gradients_are_joined_by_the_tree(kernels, shards: int) -> None:
    rng = np.random.default_rng(9)
    tokens, width, vocab = 3, 8, 2
    ids = np.zeros((shards, tokens), np.int32)
    scales = 10.0 ** rng.integers(-4, 5, (shards, tokens, 1))  # so that no two orders have the same sum
    dy, unit = narrow(normal(rng, shards, tokens, width) * scales), kernels("embed")
    by_shard = np.zeros((shards, width), np.float32)
    for t in range(tokens):
        by_shard += wide(dy[:, t]).astype(np.float32)
    dtoken = np.zeros((vocab, width), np.float32)
    common = (ctypes.c_int64(0), NOTHING, values())
    places, sizes = order_and_spans(unit, ids, vocab), (shards, tokens, vocab, width)
    block = (32 * min(shards, 8),)
    unit("k_embed_bwd_token", (vocab,), block, *places, *sizes, dy, *common, None, dtoken, 0)
    assert np.array_equal(dtoken, [tree(by_shard), np.zeros(width)])
    unit("k_embed_bwd_token_rare", (1,), (256,), *places, *sizes, dy, *common, None, dtoken, 0)
    assert np.array_equal(dtoken, [tree(by_shard), np.zeros(width)])


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="numbers below 2**-126 are flushed as on the card there alone"
)
@pytest.mark.parametrize("shards", [1, 2, 8, 64])
@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("others", [False, True])
def test_token_gradients_of_rare_ids_have_the_bits_of_all_others(kernels, shards: int, add: int, others: bool) -> None:
    """Ids that stand in no shard, in one, in two and in more; sums that depend on their order, that cancel, and that
    the card flushes to zeros of both signs."""
    rng = np.random.default_rng(11)
    tokens, width, vocab, unit = 4, 264, 3 + 3 * shards, kernels("embed", FLUSH=1)
    ids = rng.integers(2, vocab - 1, (shards, tokens), dtype=np.int32)
    ids[0, :2] = ids[-1, :2] = 0  # first and last shard alone
    ids[1:4, 2] = 1  # in three shards, where a chain is another sum than the tree
    x = normal(rng, shards, tokens, width) * 10.0 ** rng.integers(-4, 5, (shards, tokens, 1))
    least = np.array([1.5, -1.75, 0.0, -0.0], np.float32) * np.float32(2.0**-126)
    x[..., 1::3] = rng.choice(least, x[..., 1::3].shape)
    x[0, :2, 1::3] = x[-1, :2, 1::3] = least[:2, None]  # add up to -0
    x[..., 2::3] = rng.choice([-1.5, 1.5], x[..., 2::3].shape)
    dy = narrow(x)
    places, sizes = order_and_spans(unit, ids, vocab), (shards, tokens, vocab, width)
    common = (ctypes.c_int64(0), mask_of(0.2), values())
    heads = rng.choice(least, (shards, vocab, width)) if others else None
    usual = np.full((vocab, width), -0.0, np.float32)
    usual[:, ::2] = normal(rng, vocab, (width + 1) // 2)
    rare = usual.copy()
    block = (32 * min(shards, 8),)
    unit("k_embed_bwd_token", (vocab, 2), block, *places, *sizes, dy, *common, heads, usual, add)
    unit("k_embed_bwd_token_rare", (-(-vocab // 8), 2), (256,), *places, *sizes, dy, *common, heads, rare, add)
    assert np.array_equal(usual.view(np.uint32), rare.view(np.uint32))


def test_embedding_of_one_token_over_and_over(kernels) -> None:
    """More tokens than are looked through at once."""
    tokens, width, unit = 2500, 8, kernels("embed")
    dy = narrow(np.ones((1, tokens, width)))
    dtoken = np.zeros((3, width), np.float32)
    ids = np.full((1, tokens), 1, np.int32)
    ids[0, 7] = 2
    order, spans = order_and_spans(unit, ids, 3)
    assert order[0].tolist() == [t for t in range(tokens) if t != 7] + [7]
    assert spans[0].tolist() == [[0, 0], [0, tokens - 1], [tokens - 1, 1]]
    common = (ctypes.c_int64(0), NOTHING, values())
    unit("k_embed_bwd_token", (3,), (32,), order, spans, 1, tokens, 3, width, dy, *common, None, dtoken, 0)
    assert np.array_equal(dtoken[:, 0], [0, tokens - 1, 1])


# --- loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k_classifier", "k_classifier_long"])
def test_threads_without_logits_add_nothing_however_sums_are_rounded(name: str, tmp_path: Path) -> None:
    """Where a difference that should be zero is a rounding error of a number near the largest, its exponential is not
    one."""
    rows, vocab, padded = 3, 40, 64
    logits = narrow(4 * normal(np.random.default_rng(10), rows, padded))
    whole, targets, losses = wide(logits)[:, :vocab], np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    unit = Emulated("loss_mixed", {"HALF_BF16": 1}, tmp_path, CONTRACTED)
    unit(name, (rows,), (96,), logits, targets, vocab, padded, losses, 1.0, values())
    near(losses, np.log(np.exp(whole).sum(1)) - whole[:, 0], 1e-5)
    assert np.isfinite(wide(logits)).all()


@PRECISIONS
@pytest.mark.parametrize(("vocab", "threads"), [(1, 32), (8, 32), (101, 32), (128, 32), (2100, 96), (2100, 288)])
@pytest.mark.parametrize("name", ["k_classifier", "k_classifier_long"])
def test_classifier(kernels, name: str, precision: str, vocab: int, threads: int) -> None:
    rng = np.random.default_rng(vocab)
    rows, padded = 5, -(-vocab // 64) * 64
    logits = narrow(4 * normal(rng, rows, padded), precision)
    targets = rng.integers(0, vocab, rows, dtype=np.int32)
    targets[-1] = vocab - 1
    losses = np.zeros(rows, np.float32)
    whole = wide(logits, precision)[:, :vocab]
    top = whole.max(1, keepdims=True)
    p = np.exp(whole - top) / np.exp(whole - top).sum(1, keepdims=True)
    expected = -np.log(p[np.arange(rows), targets])
    unit, before = kernels("loss", precision), logits.copy()
    unit(name, (rows,), (threads,), logits, targets, vocab, padded, losses, 0.0, values())
    near(losses, expected, 1e-5)
    assert np.array_equal(logits, before)  # evaluation leaves them
    unit(name, (rows,), (threads,), logits, targets, vocab, padded, losses, 0.25, values(loss_scale=8.0))
    near(losses, expected, 1e-5)
    p[np.arange(rows), targets] -= 1
    near(wide(logits, precision)[:, :vocab], 2 * p, UNIT[precision])
    assert not logits[:, vocab:].any()


# --- optimizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 8, 64])
@pytest.mark.parametrize("add", [0, 1])
def test_join(kernels, count: int, add: int) -> None:
    rng = np.random.default_rng(count)
    sets, out = normal(rng, count, 24), normal(rng, 24)
    expected = out + tree(sets) if add else tree(sets)
    sizes = (count, ctypes.c_int64(24), ctypes.c_int64(24))
    kernels("optimizer")("k_join_gradients", (1,), (32,), sets, *sizes, out, add)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("spoiled", [None, np.inf, np.nan])
def test_norm_of_the_gradient(kernels, clip_norm: float, spoiled: float | None) -> None:
    rng = np.random.default_rng(6)
    sizes, starts = (8996, 37), (0, 9008)  # each parameter begins at a multiple of 16, and zeros are between them
    g, scale = np.zeros(9056, np.float32), 1024.0
    for start, size in zip(starts, sizes, strict=True):
        g[start : start + size] = normal(rng, size)
    if spoiled is not None:
        g[9044] = spoiled
    ends = [(starts[0], 0, 0, first, min(first + 4096, sizes[0])) for first in range(0, sizes[0], 4096)]
    pieces = np.array([*ends, (starts[1], 1, 0, 0, sizes[1])], PIECE)
    unit, partial = kernels("optimizer"), np.full(4, np.nan)
    unit("k_grad_norm_partial", (4,), (256,), pieces, g, partial)
    if spoiled is None:
        expected = [(g[s + a : s + b].astype(np.float64) ** 2).sum() for s, _, _, a, b in pieces.tolist()]
        np.testing.assert_allclose(partial, expected, rtol=1e-12)
    flags, outcome = np.zeros(4, np.int32), np.zeros(1, OUTCOME)
    arguments = (partial, 4, ctypes.c_double(clip_norm), flags, 4, values(loss_scale=scale), outcome)
    unit("k_grad_norm_final", (1,), (1024,), *arguments)
    if spoiled is not None:
        assert outcome["stop"][0]
        return
    norm = float(np.sqrt((g.astype(np.float64) ** 2).sum())) / scale
    assert outcome["norm"][0] == pytest.approx(norm, rel=1e-12)
    clip = 1.0 if clip_norm == 0 or norm <= clip_norm else clip_norm / norm
    assert outcome["clip"][0] == pytest.approx(clip / scale, rel=1e-6)
    assert not outcome["stop"][0]
    flags[3] = 1
    unit("k_grad_norm_final", (1,), (1024,), *arguments)
    assert outcome["stop"][0]


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (1, 2), (130, 72), (97, 264)])
def test_squares_of_a_gradient_by_blocks(kernels, rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    g = normal(rng, rows, columns) * np.exp2(rng.integers(-30, 30, (rows, columns))).astype(np.float32)
    across, down = -(-columns // 64), -(-rows // 64)
    unit, squares = kernels("optimizer"), np.full((down, across), np.nan)
    unit("k_gradient_squares", (across, down), (128,), g, rows, columns, squares)
    for block in np.ndindex(down, across):
        part = g[tuple(slice(64 * n, 64 * n + 64) for n in block)].astype(np.float64)
        assert squares[block] == pytest.approx((part**2).sum(), rel=1e-6), block


def test_squares_that_fp32_has_no_room_for(kernels) -> None:
    unit, squares = kernels("optimizer"), np.zeros(1)
    for numbers, expected in (
        ((1e30, 3e38), 1e60 + 9e76), ((0.0, -2e19), 4e38), ((np.inf, 1.0), np.inf), ((1.0, np.nan), np.nan),
    ):  # fmt: skip
        g = np.zeros((64, 64), np.float32)
        g[50, 40:42] = numbers
        unit("k_gradient_squares", (1, 1), (128,), g, 64, 64, squares)
        assert squares[0] == pytest.approx(expected, rel=1e-6, nan_ok=True)


@PRECISIONS
def test_adamw(kernels, precision: str) -> None:
    rng = np.random.default_rng(7)
    sizes, starts = (38, 997), (0, 48)  # of the last group few elements are there, or many
    w, g, m, v = (normal(rng, 1048) for _ in range(4))
    v = np.abs(v)
    before = [array.astype(np.float64) for array in (w, g, m, v)]
    pieces = np.zeros(3, PIECE)
    for piece, (parameter, first, last) in zip(pieces, [(0, 0, 38), (1, 0, 512), (1, 512, 997)], strict=True):
        piece["start"], piece["parameter"], piece["decayed"] = starts[parameter], parameter, parameter
        piece["first"], piece["last"] = first, last
    half, bad, sums = np.zeros(1048, np.uint16), np.zeros(2, np.int32), np.zeros((2, 3, 2), np.uint64)
    step = values(rate=0.01, decay=0.9, correction=(0.1, 0.05))
    outcome = np.zeros(1, OUTCOME)
    outcome["clip"] = 0.5

    class Constants(ctypes.Structure):
        _fields_ = [(name, ctypes.c_float) for name in ("beta1", "rest1", "beta2", "rest2", "epsilon")]

    constants = Constants(0.9, 0.1, 0.95, 0.05, 1e-8)
    unit = kernels("optimizer", precision)
    arguments = (pieces, w, g, m, v, half, constants, step, outcome, bad, sums)
    outcome["stop"] = 1
    unit("k_adamw", (3,), (64,), *arguments)
    assert np.array_equal(w, before[0].astype(np.float32)) and not half.any() and not sums.any()
    outcome["stop"] = 0
    unit("k_adamw", (3,), (64,), *arguments)
    x = 0.5 * before[1]
    mean, square = 0.9 * before[2] + 0.1 * x, 0.95 * before[3] + 0.05 * x * x
    decay = np.ones(1048)
    decay[48:] = 0.9
    weights = before[0] * decay - 0.01 * (mean / 0.1) / (np.sqrt(square / 0.05) + 1e-8)
    used = np.r_[0:38, 48:1045]
    for found, expected in ((w, weights), (m, mean), (v, square)):
        near(found[used], expected[used], 1e-6)
    assert np.array_equal(half[used], narrow(w, precision)[used])
    assert not half[38:48].any() and not half[1045:].any() and not bad.any()
    digests = np.zeros_like(sums)
    for parameter, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        for kind, array in enumerate((w, m, v)):
            k_group_digest(array[start : start + size], digests[parameter, kind])
    assert np.array_equal(sums, digests)
    g[100] = 1e38
    unit("k_adamw", (3,), (64,), *arguments)
    assert bad.tolist() == [0, 1]


@PRECISIONS
def test_narrow(kernels, precision: str) -> None:
    """Rounding to nearest even, by the emulator's own conversions: ties, subnormals, the largest, infinities."""
    rng = np.random.default_rng(8)
    largest = 65504.0 if precision == FP16 else 3.3895314e38
    special = [0.0, -0.0, 1.0, 1 + 2.0**-9, 1 + 3 * 2.0**-9, 2.0**-25, 3 * 2.0**-25, 2.0**-14, largest, np.inf, -np.inf]
    x = np.concatenate([np.array(special, np.float32), normal(rng, 69) * np.exp2(rng.integers(-20, 12, 69))])
    x = x.astype(np.float32)
    half = np.zeros(80, np.uint16)
    kernels("optimizer", precision)("k_narrow", (1,), (32,), x, ctypes.c_int64(80), half)
    assert np.array_equal(half, narrow(x, precision))


def test_seeds_differ_by_shard_and_site(kernels) -> None:
    unit, found = kernels("attention"), []
    for site in (0, 1):
        seeds = np.zeros(40, np.int64)
        unit("k_attention_seeds", (1,), (64,), ctypes.c_uint32(site), 40, values(), seeds)
        found += seeds.tolist()
    assert len(set(found)) == 80 and min(found) >= 0


@pytest.mark.parametrize("name", ["k_norm_bwd"])
def test_the_emulator_fails_where_a_kernel_is_wrong(kernels, name: str, tmp_path: Path, monkeypatch) -> None:
    """A test that cannot fail shows nothing: one sign turned in the source is found."""
    from tests.cuda import emulation

    right = emulation.source("layernorm_mixed")
    wrong = right.replace("* w.x[j] - a -", "* w.x[j] + a -")
    assert wrong != right
    monkeypatch.setattr(emulation, "source", lambda unit: wrong)
    spoiled = Emulated("layernorm_mixed", {"HALF_BF16": 1, "WIDTH": 72, "SUMS": 1, "NORMALISED": 0}, tmp_path)
    with pytest.raises(AssertionError):
        test_norm_backward(lambda *a, **k: spoiled, BF16, 72, True, False)


# --- fp8 ------------------------------------------------------------------------------------------------------------


@PRECISIONS
@pytest.mark.parametrize("width", [16, 48, 768])
@pytest.mark.parametrize("magnitude", [1.0, 1e4, 1e-4])
def test_rows_to_e4m3(kernels, precision: str, width: int, magnitude: float) -> None:
    rng, rows = np.random.default_rng(width), 11
    x = normal(rng, rows, width) * magnitude * np.exp2(rng.integers(-12, 1, (rows, width)))
    x[3], x[4, ::2] = 0.0, 0.0
    words = narrow(x, precision)
    out, scales = np.full((rows, width), 0xA5, np.uint8), np.zeros(rows, np.float32)
    kernels("linear_fp8", precision)(
        "k_rows_to_e4m3", (2,), (256,), words, ctypes.c_int(rows), ctypes.c_int(width), out, scales
    )
    x = wide(words, precision)
    assert (scales[3], out[3].any()) == (1.0, False)
    tops = np.abs(x).max(1)
    np.testing.assert_allclose(np.delete(scales, 3), np.delete(tops, 3) / 448, rtol=1e-6)
    found, wanted = of_e4m3(out), x / scales[:, None].astype(np.float64)
    # Half a unit in the last place: 2**-4 of a number, or 2**-10 below the smallest normal one.
    assert (np.abs(found - wanted) <= np.maximum(np.abs(wanted) * 2.0**-4, 2.0**-10) * (1 + 1e-5)).all()
    assert (np.abs(found).max(1) == np.where(tops > 0, 448, 0)).all()


def test_every_e4m3_number_is_kept(kernels) -> None:
    """Each of them in a row whose scale is 1."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    x = np.zeros((len(codes), 16))
    x[:, 0], x[:, 1] = 448, of_e4m3(codes)
    out, scales = np.zeros(x.shape, np.uint8), np.zeros(len(codes), np.float32)
    words = narrow(x)
    kernels("linear_fp8")(
        "k_rows_to_e4m3", (32,), (256,), words, ctypes.c_int(len(codes)), ctypes.c_int(16), out, scales
    )
    assert (scales == 1).all()
    assert (out[:, 1] == codes).all()


def test_a_row_that_is_not_finite_has_no_finite_products(kernels) -> None:
    x = np.ones((3, 16), np.float32)
    x[0, 5], x[1, 7] = np.inf, np.nan
    out, scales = np.zeros(x.shape, np.uint8), np.zeros(3, np.float32)
    words = x.view(np.uint32) >> 16
    kernels("linear_fp8")(
        "k_rows_to_e4m3", (1,), (256,), words.astype(np.uint16), ctypes.c_int(3), ctypes.c_int(16), out, scales
    )
    assert np.isnan(scales).tolist() == [True, True, False]
