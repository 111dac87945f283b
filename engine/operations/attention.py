"""Causal multi-head self-attention over packed q, k, v, with dropout on the attention weights.

Per sequence and head (D = head width, i a query, j <= i a key; product and exponents as in numerics/fixed_point.py):

Forward
  q_i, k_j, v_j are quantised per token over D, with exponents sq_i, sk_j, sv_j.
  s_ij = fp32(P * 2**-(sq_i + sk_j)) * fp32(1/sqrt(D))
  m_i  = max over j of s_ij,  p_ij = exp(s_ij - m_i)
  l_i  = fp32(sum over j of rint(p_ij * 2**30), times 2**-30)                      an integer sum
  w_ij = rint(p_ij * 2**(14 + s0_i - sv_j)), s0_i the least sv_j over j <= i with v_j not all zero; 0 where dropped
         or v_j is all zero
  o_i  = fp32(P(w_i, v) * 2**-(14 + s0_i)) / l_i, then * fp32(1/(1-p)) under dropout
Nothing above looks at a key after i, so no later token moves an earlier output.

Backward, in tiles of 64 queries by 64 keys (the size is part of the definition)
  do_i is quantised per token; delta_i = ordered sum over D of do*o;  a_ij = p_ij * fp32(1/l_i)
  g_ij = fp32(P(do_i, v_j) * 2**-(sdo_i + sv_j)) * keep_ij,  keep_ij = fp32(1/(1-p)) or 0 (1 without dropout)
  e_ij = a_ij * (g_ij - delta_i) * fp32(1/sqrt(D))
  dv_j += over query tiles, ascending:  product(a*keep, do);  dk_j the same with (e, q);
  dq_i += over key tiles, ascending:    product(e, k)
  In each of the three products the left operand x is first folded with the right operand's per-token exponents s:
  x * 2**(s0 - s) in fp32 (factor 0 where s0 - s < -126 or the token is all zero), s0 the least s in the tile; then it
  gets one exponent per row of the left operand within the tile. Each tile's product is rounded to fp32 and added.

Kept for the backward pass: q, k, v, o, m, l; with `stored` also p (a matter of memory, not of bits). dqkv is
overwritten.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from engine.errors import SpecError
from engine.numerics.bits import float32_of_bits
from engine.numerics.elementary import exp32
from engine.numerics.fixed_point import (
    INFINITY_BITS,
    WORD,
    ZERO_ROW,
    exponent_for,
    integer_of,
    left_word,
    magnitude_bits,
    multiply_block,
    power_of_two,
    right_word,
)
from engine.numerics.jit import device_function, kernel, subroutine
from engine.numerics.microkernel import MOST_TILE_ROWS, TILE_COLUMNS, TILE_ROWS, multiply_tile
from engine.numerics.random import random_words4
from engine.numerics.sums import SUM_LANES, lanes_total, sum_integer
from engine.numerics.types import Array, Doubles, Floats, Longs, Scalar, Words
from engine.operations.base import BufferType, Execution, Operation, Sizes, TensorType
from engine.operations.dropout import Mask
from engine.threads import Task

QUERIES = 64  # rows of a backward tile
KEYS = 64  # columns of a backward tile
WEIGHT_EXPONENT = 14  # of the forward weights, which lie in [0, 1]
NOTHING: Floats = np.empty((0, 0, 0, 0), np.float32)  # stands for attention weights that are not stored
PADDING = 16  # words between rows of left operands, so that they do not fall on the same cache set


# --- quantising one head --------------------------------------------------------------------------------------------


@device_function
def _token_exponent(x: Floats, t: Scalar, at: Scalar, width: Scalar, flag: Longs, slot: Scalar) -> Scalar:
    """Exponent of x[t, at:at+width], ZERO_ROW if that is all zero; sets flag[slot] if it is not finite."""
    top = np.int32(0)
    row = x[t, at : at + width]
    for d in range(width):
        top = max(top, magnitude_bits(row[d]))
    if top >= INFINITY_BITS:
        flag[slot] = 1
        return np.int64(ZERO_ROW)
    if top == np.int32(0):
        return np.int64(ZERO_ROW)
    return exponent_for(float32_of_bits(top))


@device_function
def _factor_of(exponent: Scalar) -> Scalar:
    """2**exponent, or 0 for ZERO_ROW."""
    return np.float64(0.0) if exponent == ZERO_ROW else power_of_two(exponent)


@device_function
def _inverse_of(exponent: Scalar) -> Scalar:
    """2**-exponent, or 0 for ZERO_ROW."""
    return np.float64(0.0) if exponent == ZERO_ROW else power_of_two(-exponent)


@subroutine
def _quantise_left(
    x: Floats, at: Scalar, width: Scalar, left: Words, exponents: Longs, flag: Longs, slot: Scalar
) -> None:
    """Tokens as rows of a left operand: left [>= T, >= width]; exponents [T]."""
    for t in range(x.shape[0]):
        s = _token_exponent(x, t, at, width, flag, slot)
        exponents[t] = s
        factor = _factor_of(s)
        row, words = x[t, at : at + width], left[t]
        for d in range(width):
            words[d] = left_word(integer_of(row[d], factor))


@subroutine
def _quantise_columns(
    x: Floats, at: Scalar, width: Scalar, panels: Words, exponents: Longs, flag: Longs, slot: Scalar
) -> None:
    """Tokens as columns of a right operand of depth `width`: panels [>= T/32, width, 32]; exponents [T]."""
    tokens = x.shape[0]
    for t in range(tokens):
        s = _token_exponent(x, t, at, width, flag, slot)
        exponents[t] = s
        factor = _factor_of(s)
        for d in range(width):
            panels[t // TILE_COLUMNS, d, t % TILE_COLUMNS] = right_word(integer_of(x[t, at + d], factor))
    for t in range(tokens, -(-tokens // TILE_COLUMNS) * TILE_COLUMNS):
        for d in range(width):
            panels[t // TILE_COLUMNS, d, t % TILE_COLUMNS] = 0


@subroutine
def _quantise_depth(x: Floats, at: Scalar, width: Scalar, panels: Words, exponents: Longs) -> None:
    """Tokens along the depth of a right operand with `width` columns: panels [width/32, T, 32]; exponents given."""
    for t in range(x.shape[0]):
        factor = _factor_of(exponents[t])
        for p in range(panels.shape[0]):
            columns = min(TILE_COLUMNS, width - p * TILE_COLUMNS)
            start = at + p * TILE_COLUMNS
            row, words = x[t, start : start + columns], panels[p, t]
            for j in range(columns):
                words[j] = right_word(integer_of(row[j], factor))
            for j in range(columns, TILE_COLUMNS):
                words[j] = 0


@device_function
def _products(
    left: Words,
    first: Scalar,
    rows: Scalar,
    exponents: Longs,
    panel: Words,
    inverses: Doubles,
    scale: Scalar,
    tile: Words,
    out: Floats,
    row: Scalar,
    column: Scalar,
    columns: Scalar,
) -> None:
    """out[row + i, column + j] = fp32(P * 2**-(s_i + s_j)) * scale for `rows` tokens from `first` of a left operand and
    `columns` tokens of a panel; inverses[j] = 2**(8 - s_j)."""
    multiply_tile(left[first:].ctypes.data, left.shape[1], 1, panel.ctypes.data, panel.shape[0], tile.ctypes.data)
    for i in range(rows):
        inverse = _inverse_of(exponents[first + i])
        target, source = out[row + i, column : column + columns], tile[i]
        for j in range(columns):
            target[j] = np.float32(np.float64(source[j]) * inverse * inverses[j]) * scale


@subroutine
def _keep_row(
    keep: Floats,
    count: Scalar,
    base: Scalar,
    key_low: Scalar,
    key_high: Scalar,
    step: Scalar,
    site: Scalar,
    threshold: Scalar,
    factor: Scalar,
) -> None:
    """keep[j] = factor where element base + j is kept, else 0, for j < count."""
    zero = np.float32(0.0)
    for group in range(base // 4, (base + count + 3) // 4):
        words = random_words4(key_low, key_high, step, site, group)
        start = 4 * group - base
        for j in range(4):
            if 0 <= start + j < count:
                keep[start + j] = factor if words[j] >= threshold else zero


# --- forward --------------------------------------------------------------------------------------------------------


@kernel
def k_attn_fwd(
    qkv: Floats,
    heads: Scalar,
    context: Scalar,
    first_row: Scalar,
    first: Scalar,
    last: Scalar,
    scale: Scalar,
    key_low: Scalar,
    key_high: Scalar,
    step: Scalar,
    site: Scalar,
    threshold: Scalar,
    factor: Scalar,
    out: Floats,
    maxima: Floats,
    normalisers: Floats,
    stored: Floats,
    left: Words,
    k_panels: Words,
    v_panels: Words,
    exponents: Longs,
    scores: Floats,
    weights: Words,
    keep: Floats,
    inverses: Doubles,
    tile: Words,
    wide: Doubles,
    flag: Longs,
    slot: Scalar,
) -> None:
    """Heads first..last of all (sequence, head) pairs; qkv [B, T, 3*H*D], out [B, T, H*D], maxima and normalisers
    [B, H, T], stored [B, H, T, T] or of size 0. `context` and `first_row` address the dropout mask. The rest is
    scratch of one thread, see Attention.forward_work.
    """
    tokens = qkv.shape[1]
    width = qkv.shape[2] // (3 * heads)
    inner = heads * width
    weight_stride = weights.shape[1]
    sq, sk, sv, s0 = exponents[0], exponents[1], exponents[2], exponents[3]
    k_inverse, v_inverse = inverses[0], inverses[1]
    for head in range(first, last):
        b = head // heads
        h = head % heads
        x = qkv[b]
        _quantise_left(x, h * width, width, left, sq, flag, slot)
        _quantise_columns(x, inner + h * width, width, k_panels, sk, flag, slot)
        for t in range(tokens):
            sv[t] = _token_exponent(x, t, 2 * inner + h * width, width, flag, slot)
            s0[t] = min(sv[t], s0[t - 1]) if t else sv[t]
            k_inverse[t] = _inverse_of(sk[t]) * np.float64(256.0)
            v_inverse[t] = _inverse_of(sv[t])
        _quantise_depth(x, 2 * inner + h * width, width, v_panels, sv)
        for i0 in range(0, tokens, TILE_ROWS):
            rows = min(TILE_ROWS, tokens - i0)
            visible = i0 + rows
            for p in range(-(-visible // TILE_COLUMNS)):
                j = p * TILE_COLUMNS
                of_k = k_inverse[j : j + TILE_COLUMNS]
                _products(left, i0, rows, sq, k_panels[p], of_k, scale, tile, scores, 0, j, TILE_COLUMNS)
            for i in range(rows):
                query = i0 + i
                row, words = scores[i, : query + 1], weights[i]
                m = row[0]
                for j in range(row.size):
                    m = max(m, row[j])
                if magnitude_bits(m) >= INFINITY_BITS:
                    flag[slot] = 1
                    m = np.float32(0.0)
                total = np.int64(0)
                for j in range(row.size):
                    row[j] = exp32(min(row[j] - m, np.float32(0.0)))
                for j in range(row.size):
                    total += sum_integer(row[j], np.float64(1073741824.0))
                least = s0[query] if s0[query] != ZERO_ROW else np.int64(0)
                up = power_of_two(least + WEIGHT_EXPONENT)
                for j in range(row.size):
                    words[j] = left_word(integer_of(row[j], up * v_inverse[j]))
                words[query + 1 : visible] = 0
                if threshold:
                    base = ((np.int64(first_row + b) * heads + h) * context + query) * context
                    _keep_row(keep, query + 1, base, key_low, key_high, step, site, threshold, factor)
                    for j in range(row.size):
                        words[j] = words[j] if keep[j] > np.float32(0.0) else np.int32(0)
                if stored.size:
                    stored[b, h, query, : query + 1] = row
                maxima[b, h, query] = m
                normalisers[b, h, query] = np.float32(np.float64(total) * power_of_two(-30))
            for p in range(v_panels.shape[0]):
                multiply_block(weights.ctypes.data, weight_stride, 1, v_panels[p].ctypes.data, visible, tile, wide)
                columns = min(TILE_COLUMNS, width - p * TILE_COLUMNS)
                for i in range(rows):
                    query = i0 + i
                    least = s0[query] if s0[query] != ZERO_ROW else np.int64(0)
                    down = power_of_two(8 - WEIGHT_EXPONENT - least)
                    normaliser = normalisers[b, h, query]
                    at = h * width + p * TILE_COLUMNS
                    target, source = out[b, query, at : at + columns], wide[i]
                    for j in range(columns):
                        target[j] = np.float32(source[j] * down) / normaliser
                    if threshold:
                        for j in range(columns):
                            target[j] *= factor


# --- backward -------------------------------------------------------------------------------------------------------


@device_function
def _least(exponents: Longs, start: Scalar, count: Scalar) -> Scalar:
    """The least exponent of the tokens that are not all zero; 0 if all are."""
    least = np.int64(ZERO_ROW)
    for t in range(start, start + count):
        least = min(least, exponents[t])
    return least if least != ZERO_ROW else np.int64(0)


@device_function
def _fold_factor(least: Scalar, exponent: Scalar) -> Scalar:
    """2**(least - exponent) as fp32; 0 where that is below 2**-126 or the token is all zero."""
    if exponent == ZERO_ROW or least - exponent < -126:
        return np.float32(0.0)
    return np.float32(power_of_two(least - exponent))


@subroutine
def _left_columns(
    x: Floats, rows: Scalar, columns: Scalar, words: Words, tops: Words, factors: Doubles, scales: Doubles
) -> None:
    """Quantise x [rows, columns] with one exponent per column; scales[j] = 2**(8 - s_j). Columns up to a multiple of
    TILE_ROWS are set to zero words."""
    tops[:] = 0
    for i in range(rows):
        row = x[i]
        for j in range(columns):
            tops[j] = max(tops[j], magnitude_bits(row[j]))
    for j in range(columns):
        s = exponent_for(float32_of_bits(tops[j]))
        factors[j] = power_of_two(s)
        scales[j] = power_of_two(8 - s)
    for i in range(rows):
        row, out = x[i], words[i]
        for j in range(columns):
            out[j] = left_word(integer_of(row[j], factors[j]))
        for j in range(columns, KEYS):
            out[j] = 0


@subroutine
def _left_rows(x: Floats, rows: Scalar, columns: Scalar, words: Words, scales: Doubles) -> None:
    """Quantise x [rows, columns] with one exponent per row; scales[i] = 2**(8 - s_i)."""
    for i in range(rows):
        top = np.int32(0)
        row, out = x[i], words[i]
        for j in range(columns):
            top = max(top, magnitude_bits(row[j]))
        s = exponent_for(float32_of_bits(top))
        factor = power_of_two(s)
        scales[i] = power_of_two(8 - s)
        for j in range(columns):
            out[j] = left_word(integer_of(row[j], factor))


@subroutine
def _add_product(
    words: Words,
    row_stride: Scalar,
    depth_stride: Scalar,
    rows: Scalar,
    panels: Words,
    start: Scalar,
    depth: Scalar,
    scales: Doubles,
    least: Scalar,
    gradient: Floats,
    first: Scalar,
    at: Scalar,
    width: Scalar,
    tile: Words,
) -> None:
    """gradient[first + r, at + d] += fp32(P/256 * scales[r] * 2**-least), over `depth` tokens from `start`."""
    down = power_of_two(-least)
    for p in range(panels.shape[0]):
        columns = min(TILE_COLUMNS, width - p * TILE_COLUMNS)
        for r0 in range(0, rows, TILE_ROWS):
            multiply_tile(
                words.ctypes.data + WORD * r0 * row_stride,
                row_stride,
                depth_stride,
                panels[p, start:].ctypes.data,
                depth,
                tile.ctypes.data,
            )
            for r in range(min(TILE_ROWS, rows - r0)):
                scale = scales[r0 + r] * down
                column = at + p * TILE_COLUMNS
                target, source = gradient[first + r0 + r, column : column + columns], tile[r]
                for j in range(columns):
                    target[j] += np.float32(np.float64(source[j]) * scale)


@kernel
def k_attn_bwd(
    qkv: Floats,
    heads: Scalar,
    context: Scalar,
    first_row: Scalar,
    first: Scalar,
    last: Scalar,
    scale: Scalar,
    key_low: Scalar,
    key_high: Scalar,
    step: Scalar,
    site: Scalar,
    threshold: Scalar,
    factor: Scalar,
    out: Floats,
    maxima: Floats,
    normalisers: Floats,
    stored: Floats,
    dout: Floats,
    dqkv: Floats,
    lefts: Words,
    columns: Words,
    depths: Words,
    exponents: Longs,
    delta: Floats,
    lanes: Floats,
    tiles: Floats,
    words: Words,
    tops: Words,
    doubles: Doubles,
    inverses: Doubles,
    keep: Floats,
    tile: Words,
    flag: Longs,
    slot: Scalar,
) -> None:
    """Heads first..last; arrays as in k_attn_fwd, dout like out, dqkv like qkv. The rest is scratch of one thread, see
    Attention.backward_work.
    """
    tokens = qkv.shape[1]
    width = qkv.shape[2] // (3 * heads)
    inner = heads * width
    one = np.float32(1.0)
    q_left, do_left = lefts[0], lefts[1]
    k_columns, v_columns = columns[0], columns[1]
    q_depth, k_depth, do_depth = depths[0], depths[1], depths[2]
    sq, sk, sv, sdo = exponents[0], exponents[1], exponents[2], exponents[3]
    x_v, x_k, x_q = tiles[0], tiles[1], tiles[2]
    factors, scales = doubles[0], doubles[1]
    k_inverse, v_inverse = inverses[0], inverses[1]
    for head in range(first, last):
        b = head // heads
        h = head % heads
        x = qkv[b]
        dx = dqkv[b]
        dy = dout[b]
        at_q, at_k, at_v = h * width, inner + h * width, 2 * inner + h * width
        _quantise_left(x, at_q, width, q_left, sq, flag, slot)
        _quantise_depth(x, at_q, width, q_depth, sq)
        _quantise_columns(x, at_k, width, k_columns, sk, flag, slot)
        _quantise_depth(x, at_k, width, k_depth, sk)
        _quantise_columns(x, at_v, width, v_columns, sv, flag, slot)
        _quantise_left(dy, at_q, width, do_left, sdo, flag, slot)
        _quantise_depth(dy, at_q, width, do_depth, sdo)
        for t in range(tokens):
            lanes[:] = np.float32(0.0)
            for start in range(at_q, at_q + width, SUM_LANES):
                end = min(start + SUM_LANES, at_q + width)
                dy_piece, o_piece = dy[t, start:end], out[b, t, start:end]
                for j in range(o_piece.size):
                    lanes[j] += dy_piece[j] * o_piece[j]
            delta[t] = lanes_total(lanes)
            dx[t, at_q : at_q + width] = np.float32(0.0)
            dx[t, at_k : at_k + width] = np.float32(0.0)
            dx[t, at_v : at_v + width] = np.float32(0.0)
            k_inverse[t] = _inverse_of(sk[t]) * np.float64(256.0)
            v_inverse[t] = _inverse_of(sv[t]) * np.float64(256.0)
        for i0 in range(0, tokens, QUERIES):
            rows = min(QUERIES, tokens - i0)
            least_do = _least(sdo, i0, rows)
            least_q = _least(sq, i0, rows)
            for j0 in range(0, i0 + 1, KEYS):
                cols = min(KEYS, tokens - j0)
                least_k = _least(sk, j0, cols)
                # Scores in x_q and their gradients in x_k, tile by tile of the microkernel.
                for r0 in range(0, rows, TILE_ROWS):
                    i, some = i0 + r0, min(TILE_ROWS, rows - r0)
                    for c0 in range(0, cols, TILE_COLUMNS):
                        j, part = j0 + c0, min(TILE_COLUMNS, cols - c0)
                        panel = j // TILE_COLUMNS
                        if not stored.size:
                            of_k = k_inverse[j : j + part]
                            _products(q_left, i, some, sq, k_columns[panel], of_k, scale, tile, x_q, r0, c0, part)
                        of_v = v_inverse[j : j + part]
                        _products(do_left, i, some, sdo, v_columns[panel], of_v, one, tile, x_k, r0, c0, part)
                for r in range(rows):
                    query = i0 + r
                    seen = min(cols, query + 1 - j0)
                    inverse = np.float32(1.0) / normalisers[b, h, query]
                    m = maxima[b, h, query]
                    fold_v = _fold_factor(least_do, sdo[query])
                    fold_k = _fold_factor(least_q, sq[query])
                    row_v, row_k, row_q = x_v[r], x_k[r], x_q[r]
                    if stored.size:
                        row_q[:seen] = stored[b, h, query, j0 : j0 + seen]
                    else:
                        for c in range(seen):
                            row_q[c] = exp32(min(row_q[c] - m, np.float32(0.0)))
                    d = delta[query]
                    if threshold:
                        base = ((np.int64(first_row + b) * heads + h) * context + query) * context
                        _keep_row(keep, seen, base + j0, key_low, key_high, step, site, threshold, factor)
                        for c in range(seen):
                            a = row_q[c] * inverse
                            e = a * (row_k[c] * keep[c] - d) * scale
                            row_v[c] = a * keep[c] * fold_v
                            row_k[c] = e * fold_k
                            row_q[c] = e
                    else:
                        for c in range(seen):
                            a = row_q[c] * inverse
                            e = a * (row_k[c] - d) * scale
                            row_v[c] = a * fold_v
                            row_k[c] = e * fold_k
                            row_q[c] = e
                    row_v[seen:cols] = np.float32(0.0)
                    row_k[seen:cols] = np.float32(0.0)
                    row_q[seen:cols] = np.float32(0.0)
                    top = np.int32(0)
                    for c in range(seen):
                        top = max(top, magnitude_bits(row_q[c]))
                    if top >= INFINITY_BITS:
                        flag[slot] = 1
                        row_v[:cols] = np.float32(0.0)
                        row_k[:cols] = np.float32(0.0)
                        row_q[:cols] = np.float32(0.0)
                for c in range(cols):
                    keep[c] = _fold_factor(least_k, sk[j0 + c])
                for r in range(rows):
                    row_q = x_q[r]
                    for c in range(cols):
                        row_q[c] *= keep[c]
                _left_columns(x_v, rows, cols, words, tops, factors, scales)
                _add_product(words, 1, KEYS, cols, do_depth, i0, rows, scales, least_do, dx, j0, at_v, width, tile)
                _left_columns(x_k, rows, cols, words, tops, factors, scales)
                _add_product(words, 1, KEYS, cols, q_depth, i0, rows, scales, least_q, dx, j0, at_k, width, tile)
                _left_rows(x_q, rows, cols, words, scales)
                _add_product(words, KEYS, 1, rows, k_depth, j0, cols, scales, least_k, dx, i0, at_q, width, tile)


# --- the operation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attention(Operation):
    """Input qkv [B, T, 3*H*D], outputs y [B, T, H*D], maxima and normalisers [B, H, T], and if `stored` weights
    [B, H, T, T]. `site` addresses the dropout mask."""

    heads: int
    width: int  # of one head
    context: int
    probability: float
    site: int
    stored: bool

    kind: ClassVar[str] = "attention"
    kept: ClassVar[frozenset[str]] = frozenset({"qkv", "y", "maxima", "normalisers", "weights"})
    constant: ClassVar[frozenset[str]] = frozenset({"maxima", "normalisers", "weights"})

    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        qkv = types["qkv"]
        inner = self.heads * self.width
        if qkv.shape[-1] != 3 * inner:
            raise SpecError(f"{self.name} expects q, k and v of width {3 * inner} in all, found {qkv}")
        b, t, _ = qkv.shape
        per_token = TensorType((b, self.heads, t))
        outputs = {"y": TensorType((b, t, inner)), "maxima": per_token, "normalisers": per_token}
        if self.stored:
            outputs["weights"] = TensorType((b, self.heads, t, t))
        return outputs

    def _padded(self, sizes: Sizes) -> tuple[int, int, int, int]:
        """Tokens padded to the most tile rows, panels over tokens, panels over the head, tokens padded to panels."""
        rows = -(-sizes.context // MOST_TILE_ROWS) * MOST_TILE_ROWS
        token_panels = -(-sizes.context // TILE_COLUMNS)
        return rows, token_panels, -(-self.width // TILE_COLUMNS), token_panels * TILE_COLUMNS

    def forward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        rows, token_panels, head_panels, tokens = self._padded(sizes)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "left": ((rows, self.width + PADDING), "int32"),
            "k_panels": ((token_panels, self.width, TILE_COLUMNS), "int32"),
            "v_panels": ((head_panels, sizes.context, TILE_COLUMNS), "int32"),
            "exponents": ((4, sizes.context), "int64"),
            "scores": ((MOST_TILE_ROWS, tokens), "float32"),
            "token_weights": ((MOST_TILE_ROWS, tokens + PADDING), "int32"),
            "keep": ((tokens,), "float32"),
            "inverses": ((2, tokens), "float64"),
            "tile": ((MOST_TILE_ROWS, TILE_COLUMNS), "int32"),
            "wide": ((MOST_TILE_ROWS, TILE_COLUMNS), "float64"),
        }
        return {r: BufferType((sizes.threads, *s), d) for r, (s, d) in shapes.items()}

    def backward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        rows, token_panels, head_panels, _ = self._padded(sizes)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "lefts": ((2, rows, self.width + PADDING), "int32"),
            "columns": ((2, token_panels, self.width, TILE_COLUMNS), "int32"),
            "depths": ((3, head_panels, sizes.context, TILE_COLUMNS), "int32"),
            "exponents": ((4, sizes.context), "int64"),
            "delta": ((sizes.context,), "float32"),
            "lanes": ((SUM_LANES,), "float32"),
            "tiles": ((3, QUERIES, KEYS), "float32"),
            "words": ((QUERIES, KEYS), "int32"),
            "tops": ((KEYS,), "int32"),
            "doubles": ((2, max(KEYS, QUERIES)), "float64"),
            "inverses": ((2, sizes.context), "float64"),
            "keep": ((KEYS,), "float32"),
            "tile": ((MOST_TILE_ROWS, TILE_COLUMNS), "int32"),
        }
        return {r: BufferType((sizes.threads, *s), d) for r, (s, d) in shapes.items()}

    def _head_tasks(
        self, run: Execution, function: Callable[..., None], arrays: list[Array], work: list[str]
    ) -> list[Task]:
        """Tasks over all (sequence, head) pairs; each thread has its own slice of the scratch buffers."""
        qkv = run.tensor(self.inputs["qkv"])
        scale = np.float32(1.0 / sqrt(self.width))
        mask = Mask.of(run, self.probability, self.site)
        stored = run.tensor(self.outputs["weights"]) if self.stored else NOTHING
        results = [run.tensor(self.outputs[r]) for r in ("y", "maxima", "normalisers")]
        scratch = [run.work(self.name, role) for role in work]
        return [
            (
                function,
                (qkv, self.heads, self.context, run.first_row, a, b, scale, *mask.arguments)
                + (*results, stored, *arrays, *(s[i] for s in scratch), run.flags, self.index),
            )
            for i, (a, b) in enumerate(run.team.ranges(len(qkv) * self.heads))
        ]

    def forward(self, run: Execution) -> None:
        work = list(self.forward_work(run.sizes, run.tier))
        run.team.run(self._head_tasks(run, k_attn_fwd, [], work))

    def backward(self, run: Execution) -> None:
        gradients = [run.gradient(self.outputs["y"]), run.gradient(self.inputs["qkv"])]
        work = list(self.backward_work(run.sizes, run.tier))
        run.team.run(self._head_tasks(run, k_attn_bwd, gradients, work))
