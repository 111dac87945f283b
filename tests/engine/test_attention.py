"""Attention: exactly its definition, and within a bound that follows from its scales.

Notation as in engine/operations/attention.py. `unit(x)` = 2 max|x|/32639 bounds 2**-s of a row; A
token's unit is written uq, uk, uv, ud (for do). With E = product_bound over D (tests/engine/bounds.py):

  scores  ds_ij = E(q_i, k_j)*scale + 2U|s_ij|                 (scale itself and its product)
  p_ij    relatively pe_ij = ds_ij + max ds_i. + U|s_ij - m_i| + EXP_ERROR      (against exp(s - m)
          with the true s and m: their softmax is the same), absolutely EXP_FLUSHED
  l_i     relatively le_i = (sum_j p*pe + (i+1)*2^-31)/l + U
  w_ij    one unit of w is 2^-14 * 2^(sv_j - s0_i) of p; half of it is lost
  o_i     numerator: sum over kept j of  p*pe*|v_j|             p's error
                   + |v_j| * 2^-15 * 2^(sv_j - s0_i)            w's half unit; 2^sv_j <= 32639.5/max|v_j|,
                     so for any |v_jd| it is at most 2^-15 * 32639.5 * 2^-s0_i < 2^-s0_i = uv0_i
                   + p*uv_j/2 + uv0_i * 2^-16                   v's half unit, and both halves
                   + uv0_i                                      dropped lo*lo': 2^14 * 2^-14 * 2^-s0_i
          uv0_i the greatest uv_j up to i; then U for rounding, le_i and U for the division, and 2U
          for the dropout factor

  a_ij    relatively ae_ij = pe_ij + le_i + 2U
  g_ij    dg_ij = (E(do_i, v_j) + U|g|) * keep
  delta_i dd_i = sum_d |do|*do_error + additions(D) * U * sum_d |do*o|
  e_ij    de_ij = scale*(a*(dg + dd + U|g - delta|)) + |e|*(ae + 3U)

A tile's product of a folded left operand x (error dx) with tokens r of exponents s_r: the fold is an
exact power of two, so the row's unit is ux <= 2*max_r(|x_r| 2^(s0-s_r))/32639; with y_r the right rows:
    sum_r (dx_r*|y_r| + |x_r| u_r/2)                            errors of x, half units of y
  + sum_r |y_r| 2^s_r * ux*2^-s0/2  <= rows * 16320 * ux*2^-s0  half units of x; |y_r| 2^s_r <= 32639.5
  + rows * (2^14 + 1/4) * ux*2^-s0                              dropped lo*lo', both halves
and each tile's result and each sum is rounded once. Folds below 2^-126 cannot occur here: exponents
of finite inputs of the test are close; a separate test covers that end by exact comparison.
"""

from typing import Any

import numpy as np
import pytest

from engine.operations.attention import Attention
from engine.operations.base import Sizes
from engine.reference import attention
from tests.engine import exact
from tests.engine.bench import Array, Bench, normals, same_bits, within
from tests.engine.bounds import (
    EXP_ERROR,
    EXP_FLUSHED,
    SLACK,
    TINY,
    Doubles,
    U,
    additions,
    product_bound,
    unit,
)

# (batch, tokens, heads, head width): one head and many, widths within, at and across the 32 columns
# of a panel, tokens across tiles of 2, 8, 32 and 64 and past the 512 that one int32 sum may hold.
SHAPES = [
    (1, 1, 1, 1),
    (2, 7, 3, 4),
    (1, 8, 1, 5),
    (1, 33, 2, 32),
    (2, 65, 1, 64),
    (1, 70, 2, 96),
    (1, 129, 1, 5),
    (1, 530, 1, 4),
]


def bench_of(
    shape: tuple[int, ...],
    probability: float,
    *,
    stored: bool = False,
    threads: int = 1,
    first_row: int = 0,
) -> Bench:
    batch, tokens, heads, width = shape
    outputs = ["y", "maxima", "normalisers"] + (["weights"] if stored else [])
    operation = Attention(
        name="attn",
        index=0,
        inputs={"qkv": "qkv"},
        outputs={role: role for role in outputs},
        heads=heads,
        width=width,
        context=tokens,
        probability=probability,
        site=1,
        stored=stored,
    )
    return Bench(
        operation,
        {"qkv": normals(1, batch, tokens, 3 * heads * width)},
        sizes=Sizes(batch=batch, context=tokens, threads=threads),
        training=True,
        first_row=first_row,
    )


def mask_of(bench: Bench) -> Any:
    operation = bench.operation
    assert isinstance(operation, Attention)
    shape = (bench.sizes.batch, operation.heads, bench.sizes.context, bench.sizes.context)
    first = bench.first_row * int(np.prod(shape[1:]))
    return exact.mask32(bench.seed, bench.step, 1, shape, operation.probability, first=first)


def check_exactly(bench: Bench, dy: Array) -> None:
    """Forward and backward of the bench against the second implementation."""
    operation = bench.operation
    assert isinstance(operation, Attention)
    qkv, keep = bench.tensors["qkv"], mask_of(bench)
    out = bench.forward()
    expected = exact.attention_forward(qkv, operation.heads, keep)
    for found, wanted in zip((out[r] for r in ("y", "maxima", "normalisers")), expected, strict=False):
        same_bits(found, wanted)
    if operation.stored:
        visible = np.tri(bench.sizes.context, dtype=bool)
        same_bits(out["weights"][..., visible], expected[3][..., visible])
    dqkv = bench.backward({"y": dy})["qkv"]
    same_bits(dqkv, exact.attention_backward(qkv, operation.heads, keep, expected, dy))
    assert not bench.flags.any()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("probability", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_its_definition(shape: tuple[int, ...], probability: float, stored: bool) -> None:
    bench = bench_of(shape, probability, stored=stored, first_row=3)
    check_exactly(bench, normals(2, *bench.tensors["qkv"].shape[:2], shape[2] * shape[3]))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("case", ["spread", "zero tokens", "all zero v", "zero gradient", "large scores"])
def test_unusual_inputs_follow_the_definition(case: str, stored: bool) -> None:
    shape = (2, 70, 2, 5)
    bench = bench_of(shape, 0.1, stored=stored)
    qkv = bench.tensors["qkv"]
    dy = normals(2, 2, 70, 10)
    generator = np.random.default_rng(5)
    if case == "spread":  # tokens up to 2^70 apart: folds that vanish
        qkv *= np.ldexp(1.0, generator.integers(-70, 1, (2, 70, 1))).astype(np.float32)
        dy *= np.ldexp(1.0, generator.integers(-140, 1, (2, 70, 1))).astype(np.float32)
    elif case == "zero tokens":
        qkv[generator.random((2, 70)) < 0.3] = 0
        qkv[:, 0] = 0
        dy[generator.random((2, 70)) < 0.3] = 0
        dy[0, 64:] = 0
    elif case == "all zero v":
        qkv[..., 20:] = 0
    elif case == "zero gradient":
        dy[:] = 0
    else:
        qkv *= 30
    check_exactly(bench, dy)


# --- bounds -----------------------------------------------------------------------------------------------


def forward_errors(q: Doubles, k: Doubles, v: Doubles, keep: Doubles) -> dict[str, Doubles]:
    """Bounds for one head, q, k, v [T, D]; keep [T, T], and the exact values they belong to."""
    tokens, width = q.shape
    scale = 1 / np.sqrt(width)
    visible = np.tri(tokens, dtype=bool)
    scores = q @ k.T * scale
    largest = np.max(np.where(visible, scores, -np.inf), axis=1, keepdims=True)
    p = np.where(visible, np.exp(np.minimum(scores - largest, 0)), 0.0)
    ds = np.where(visible, product_bound(q, k.T) * scale + 2 * U * np.abs(scores), 0.0)
    shift = np.max(ds, axis=1, keepdims=True)  # of the maximum; it cancels in o, but not in p and l
    pe = np.where(visible, np.expm1(ds + shift + U * np.abs(scores - largest)) + EXP_ERROR, 0.0)
    norm = np.sum(p, axis=1, keepdims=True)
    seen = np.arange(1, tokens + 1)[:, None]
    le = (np.sum(p * pe + EXP_FLUSHED, axis=1, keepdims=True) + seen * 2.0**-31) / norm + U
    uv = unit(v, 1)
    uv0 = np.maximum.accumulate(uv)
    kept = keep > 0
    numerator = (
        (kept * (p * pe + EXP_FLUSHED)) @ np.abs(v)
        + (kept * p) @ np.broadcast_to(uv / 2, v.shape)
        + np.sum(kept & visible, axis=1, keepdims=True) * uv0 * (2 + 2.0**-16)
    )
    factor = np.max(keep)
    o = (p / norm * keep) @ v
    do = factor * numerator / norm + np.abs(o) * (le + 4 * U)
    return {"p": p, "norm": norm, "pe": pe, "le": le, "o": o, "o_error": do * SLACK + TINY}


def tile_bound(x: Doubles, dx: Doubles, y: Doubles, true: Doubles) -> Doubles:
    """Of one tile's product x @ y, x [rows, tokens] of error dx, y [tokens, D] with a unit per token."""
    u = unit(y, 1)
    # A unit of x's row times 2**-s0; 2**-s_r <= u_r.
    ux = 2 * np.max((np.abs(x) + dx) * u[:, 0], axis=1, keepdims=True) / exact.LARGEST
    lost = len(y) * (16320 + 2.0**14 + 0.25) * ux
    bound: Doubles = dx @ np.abs(y) + (np.abs(x) + dx) @ np.broadcast_to(u / 2, y.shape) + lost
    return bound * SLACK + 2 * U * np.abs(true) + TINY


def backward_errors(q: Doubles, k: Doubles, v: Doubles, keep: Doubles, do: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """Bounds of dq, dk, dv of one head."""
    f = forward_errors(q, k, v, keep)
    tokens, width = q.shape
    scale = 1 / np.sqrt(width)
    visible = np.tri(tokens, dtype=bool)
    a = f["p"] / f["norm"]
    ae = f["pe"] + f["le"] + 2 * U
    da = a * ae + EXP_FLUSHED * visible
    g = (do @ v.T) * keep
    dg = product_bound(do, v.T) * keep + 2 * U * np.abs(g)
    delta = np.sum(do * f["o"], axis=1, keepdims=True)
    dd = np.sum(np.abs(do) * f["o_error"], axis=1, keepdims=True)
    dd += (additions(width) + 1) * U * np.sum(np.abs(do * f["o"]), axis=1, keepdims=True)
    e = np.where(visible, a * (g - delta) * scale, 0.0)
    de = scale * ((a + da) * (dg + dd) + da * np.abs(g - delta)) + 4 * U * np.abs(e)
    de = np.where(visible, de, 0.0) * SLACK
    b, db = a * keep, (da * keep + 2 * U * a * keep) * SLACK
    bounds = [np.zeros((tokens, width)) for _ in range(3)]
    for i in range(0, tokens, 64):
        rows = slice(i, i + 64)
        for j in range(0, i + 1, 64):
            cols = slice(j, j + 64)
            tiles = (
                (0, rows, e[rows, cols], de[rows, cols], k[cols]),
                (1, cols, e[rows, cols].T, de[rows, cols].T, q[rows]),
                (2, cols, b[rows, cols].T, db[rows, cols].T, do[rows]),
            )
            for which, place, x, dx, y in tiles:
                true = np.abs(x) @ np.abs(y) * -(-tokens // 64)  # every later sum is rounded too
                bounds[which][place] += tile_bound(x, dx, y, true)
    return bounds[0], bounds[1], bounds[2]


@pytest.mark.parametrize("probability", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_near_the_mathematics(shape: tuple[int, ...], probability: float) -> None:
    bench = bench_of(shape, probability)
    qkv, mask = bench.tensors["qkv"].astype(np.float64), mask_of(bench)
    batch, tokens, heads, width = shape
    full = (batch, heads, tokens, tokens)
    keep = np.ones(full) if mask is None else np.where(mask > 0, 1 / (1 - probability), 0.0)
    y = bench.forward()["y"]
    dy = normals(2, *y.shape)
    dqkv = bench.backward({"y": dy})["qkv"]
    true = attention.reference_forward(qkv, heads, keep)
    dtrue = attention.reference_backward(qkv, heads, keep, dy.astype(np.float64))
    bound, dbound = np.empty((batch, heads, tokens, width)), np.empty((3, batch, heads, tokens, width))
    q, k, v = attention.split_heads(qkv, heads, 3)
    (do,) = attention.split_heads(dy.astype(np.float64), heads, 1)
    for at in np.ndindex(batch, heads):
        arguments = (q[at], k[at], v[at], keep[at])
        bound[at] = forward_errors(*arguments)["o_error"]
        dbound[(slice(None), *at)] = backward_errors(*arguments, do[at])
    within(y, true, attention.join_heads([bound]), used=0.01 if tokens > 1 else 0.0)
    within(dqkv, dtrue, attention.join_heads(list(dbound)), used=0.01 if tokens > 1 else 0.0)
    if tokens > 1:  # what the definition is worth on normal numbers
        assert np.linalg.norm(y - true) < 3e-4 * np.linalg.norm(true)
        assert np.linalg.norm(dqkv - dtrue) < 1e-3 * np.linalg.norm(dtrue)


# --- properties -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 33, 2, 4), (1, 70, 1, 32), (1, 530, 1, 4)])
def test_a_later_token_moves_no_earlier_output(shape: tuple[int, ...]) -> None:
    """Its scale included: the edited tokens become 2^40 times as large, and the last ones zero."""
    bench = bench_of(shape, 0.1)
    tokens = shape[1]
    before = {role: x.copy() for role, x in bench.forward().items()}
    for cut in (tokens - 1, tokens // 2):
        edited = bench.tensors["qkv"].copy()
        edited[:, cut:] *= np.float32(2.0**40)
        edited[:, cut + 1 :] = 0
        bench.tensors = {"qkv": edited}
        after = bench.forward()
        same_bits(after["y"][:, :cut], before["y"][:, :cut])
        for role in ("maxima", "normalisers"):
            same_bits(after[role][..., :cut], before[role][..., :cut])
        assert not np.array_equal(after["y"][:, cut], before["y"][:, cut])
        bench.tensors = {"qkv": bench_of(shape, 0.1).tensors["qkv"]}


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("stored", [False, True])
def test_threads_and_storing_do_not_move_bits(threads: int, stored: bool) -> None:
    results = []
    for count, keep_weights in ((1, False), (threads, stored)):
        bench = bench_of((2, 70, 3, 5), 0.1, stored=keep_weights, threads=count)
        y = bench.forward()["y"]
        results.append([y, bench.backward({"y": normals(2, *y.shape)})["qkv"]])
        bench.team.close()
    for one, many in zip(*results, strict=True):
        same_bits(many, one)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("part", [0, 1, 2, "dy"])
def test_what_is_not_finite_sets_the_flag(value: float, part: Any) -> None:
    shape = (1, 9, 2, 5)
    bench = bench_of(shape, 0.1)
    dy = normals(2, 1, 9, 10)
    if part == "dy":
        dy[0, 8, 7] = value
    else:
        bench.tensors["qkv"][0, 8, part * 10 + 7] = value
    bench.forward()
    assert bool(bench.flags[0]) == (part != "dy")
    bench.flags[:] = 0
    bench.backward({"y": dy})
    assert bench.flags[0]


def test_overflowing_scores_set_the_flag() -> None:
    bench = bench_of((1, 9, 1, 5), 0.0)
    bench.tensors["qkv"][:] = 3e38
    bench.forward()
    assert bench.flags[0]
