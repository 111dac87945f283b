"""The portable tier's definitions once more, in NumPy int64 and float32: a second implementation.

It shares no code with the kernels: no packed words, no tiles of the microkernel, no panels. Where a
definition is a sequence of fp32 operations it is written here as such, one NumPy operation each;
where it is a sum of integers, an int64 sum. Results must equal the kernels' bit for bit. Only the
coefficients of the elementary functions are taken from the engine.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from engine.numerics import elementary as c
from engine.reference.dropout import keep_mask

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

F = np.float32
LARGEST = 32639
TILE = 64  # queries and keys of a backward tile of attention


# --- elementary functions -------------------------------------------------------------------------


def exp32(x: Floats) -> Floats:
    with np.errstate(all="ignore"):
        shifted = x * c.LOG2_E + c.ROUNDER
        k = shifted - c.ROUNDER
        r = (x - k * c.LN2_HIGH) - k * c.LN2_LOW
        q = ((((c.EXP_5 * r + c.EXP_4) * r + c.EXP_3) * r + c.EXP_2) * r + c.EXP_1) * r + c.EXP_0
        y = F(1) + (r + (r * r) * q)
        y = (y.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)
    return np.where(x < c.EXP_SMALLEST, F(0), np.where(x > c.EXP_LARGEST, F(np.inf), y))


def log32(x: Floats) -> Floats:
    """For normal x only: sums of exponentials are at least 1."""
    bits = x.view(np.int32) - c.BITS_OF_SQRT_HALF
    k = (bits >> 23).astype(F)
    f = ((bits & c.FRACTION_MASK) + c.BITS_OF_SQRT_HALF).view(np.float32) - F(1)
    q = c.LOG_7 * f + c.LOG_6
    for coefficient in (c.LOG_5, c.LOG_4, c.LOG_3, c.LOG_2, c.LOG_1, c.LOG_0):
        q = q * f + coefficient
    square = f * f
    tail = ((square * f) * q + k * c.LN2_LOW) - F(0.5) * square
    return (f + tail) + k * c.LN2_HIGH


def gelu32(x: Floats) -> Floats:
    v = x * (c.GELU_LINEAR + c.GELU_CUBIC * (x * x))
    e = exp32(-np.abs(v))
    return np.where(x >= 0, x, x * e) / (F(1) + e)


def gelu_grad32(x: Floats) -> Floats:
    x = np.clip(x, -c.GELU_CLAMP, c.GELU_CLAMP)
    square = x * x
    v = x * (c.GELU_LINEAR + c.GELU_CUBIC * square)
    slope = c.GELU_LINEAR + c.GELU_CUBIC_SLOPE * square
    e = exp32(-np.abs(v))
    larger = F(1) / (F(1) + e)
    smaller = e * larger
    s, rest = np.where(x >= 0, larger, smaller), np.where(x >= 0, smaller, larger)
    return s * (F(1) + (x * slope) * rest)


# --- the fixed-point product ----------------------------------------------------------------------


def exponents(x: Array, axis: int) -> Longs:
    """The largest s with rint(max|x| * 2**s) <= 32639 along an axis; 0 where all are zero."""
    top = np.max(np.abs(x.astype(np.float64)), axis=axis)
    s = 15 - np.frexp(top)[1].astype(np.int64)
    s -= np.rint(np.ldexp(top, s)) > LARGEST
    return np.where(top == 0, 0, s)


def integers(x: Array, s: Longs) -> Longs:
    return np.rint(np.ldexp(x.astype(np.float64), s)).astype(np.int64)


def product_of_integers(a: Longs, b: Longs) -> Longs:
    """P of the definition for integer matrices [M, K] and [K, N]."""
    a_low, b_low = (a + 128) % 256 - 128, (b + 128) % 256 - 128
    a_high, b_high = (a - a_low) // 256, (b - b_low) // 256
    return 65536 * (a_high @ b_high) + 256 * (a_high @ b_low + a_low @ b_high)


def rounded(p: Longs, exponent: Longs) -> Floats:
    """fp32(p * 2**-exponent): exact in float64 for |p| < 2**53, then rounded once."""
    assert not p.size or np.max(np.abs(p)) < 2**53
    with np.errstate(over="ignore"):
        return np.ldexp(p.astype(np.float64), -exponent).astype(F)


def product(a: Floats, b: Floats) -> Floats:
    sa, sb = exponents(a, 1), exponents(b, 0)
    p = product_of_integers(integers(a, sa[:, None]), integers(b, sb[None]))
    return rounded(p, sa[:, None] + sb[None])


# --- sums -----------------------------------------------------------------------------------------


def ordered_sum(x: Array) -> Array:
    """Along the last axis: 32 lanes in order, then halves onto halves. In the dtype of x."""
    lanes = np.zeros((*x.shape[:-1], 32), x.dtype)
    for start in range(0, x.shape[-1], 32):
        piece = x[..., start : start + 32]
        lanes[..., : piece.shape[-1]] += piece
    for half in (16, 8, 4, 2, 1):
        lanes[..., :half] += lanes[..., half : 2 * half]
    return lanes[..., 0]


def sum_exponents(x: Floats) -> Longs:
    """Per column: the largest s with max|x| * 2**s < 2**30; 0 where all are zero."""
    top = np.max(np.abs(x.astype(np.float64)), axis=0)
    return np.where(top == 0, 0, 30 - np.frexp(top)[1].astype(np.int64))


def column_sums(x: Floats) -> Floats:
    s = sum_exponents(x)
    return rounded(np.sum(integers(x, s), axis=0), s)


# --- operations -----------------------------------------------------------------------------------


def linear_forward(x: Floats, w: Floats, bias: Floats | None) -> Floats:
    y = product(x.reshape(-1, x.shape[-1]), w.T).reshape(*x.shape[:-1], len(w))
    return y if bias is None else y + bias


def linear_backward(x: Floats, w: Floats, dy: Floats) -> tuple[Floats, Floats, Floats]:
    x, rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    s = exponents(rows, 0)
    dbias = rounded(np.sum(integers(rows, s[None]), axis=0), s)
    return product(rows, w).reshape(*dy.shape[:-1], w.shape[1]), product(rows.T, x), dbias


def layernorm_forward(x: Floats, gain: Floats | None, bias: Floats | None) -> tuple[Floats, Floats, Floats]:
    """y, mean and rstd."""
    d = F(x.shape[-1])
    mean = ordered_sum(x) / d
    e = x - mean[..., None]
    rstd = F(1) / np.sqrt(ordered_sum(e * e) / d + F(1e-5))
    y = e * rstd[..., None]
    return (y if gain is None or bias is None else y * gain + bias), mean, rstd


def layernorm_backward(
    x: Floats, gain: Floats | None, mean: Floats, rstd: Floats, dy: Floats
) -> tuple[Floats, Floats, Floats]:
    d = F(x.shape[-1])
    g = dy if gain is None else dy * gain
    n = (x - mean[..., None]) * rstd[..., None]
    average, average_n = (ordered_sum(z)[..., None] / d for z in (g, g * n))
    dx = rstd[..., None] * ((g - average) - n * average_n)
    dgain, dbias = (column_sums(z.reshape(-1, x.shape[-1])) for z in (dy * n, dy))
    return dx, dgain, dbias


def activation_forward(x: Floats, function: str) -> Floats:
    return gelu32(x) if function == "gelu" else np.where(x <= 0, F(0), x)


def activation_backward(x: Floats, function: str, dy: Floats) -> Floats:
    return dy * gelu_grad32(x) if function == "gelu" else np.where(x <= 0, F(0), dy)


def dropped(x: Floats, keep: Floats | None) -> Floats:
    """keep holds the fp32 factor or 0; a dropped element is +0 whatever its sign was."""
    return x if keep is None else np.where(keep > 0, x * keep, F(0))


def embed_backward(ids: Array, dy: Floats, vocab: int, context: int) -> tuple[Floats, Floats]:
    """dtoken and dposition; dy is already masked."""
    rows = dy.reshape(-1, dy.shape[-1])
    s = sum_exponents(rows)
    q = integers(rows, s)
    tokens = np.zeros((vocab, rows.shape[1]), np.int64)
    positions = np.zeros((context, rows.shape[1]), np.int64)
    np.add.at(tokens, ids.reshape(-1), q)
    np.add.at(positions, np.arange(len(rows)) % ids.shape[1], q)
    return rounded(tokens, s), rounded(positions, s)


def loss_forward(logits: Floats, targets: Array) -> tuple[Floats, Floats, Floats]:
    """losses, maxima, sums."""
    m = np.max(logits, axis=-1)
    total = ordered_sum(exp32(logits - m[..., None]))
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log32(total) - (chosen - m), m, total


def loss_backward(logits: Floats, targets: Array, m: Floats, total: Floats, scale: Any) -> Floats:
    p = exp32(logits - m[..., None]) / total[..., None]
    hit = np.arange(logits.shape[-1]) == targets[..., None]
    return np.where(hit, p - F(1), p) * scale


# --- attention ------------------------------------------------------------------------------------


def token_scales(x: Floats) -> tuple[Longs, Longs, npt.NDArray[np.bool_]]:
    """Per token of x [T, D]: integers [T, D], exponent [T], whether it is all zero [T]."""
    s = exponents(x, 1)
    return integers(x, s[:, None]), s, ~np.any(x, axis=1)


def least_of(s: Longs, zero: npt.NDArray[np.bool_]) -> int:
    """The least exponent of the tokens that are not all zero; 0 if all are."""
    return int(np.min(s[~zero])) if np.any(~zero) else 0


def head_scores(q: Floats, k: Floats) -> Floats:
    (qi, sq, _), (ki, sk, _) = token_scales(q), token_scales(k)
    with np.errstate(over="ignore"):
        return rounded(product_of_integers(qi, ki.T), sq[:, None] + sk[None]) * scale_of(q)


def scale_of(q: Floats) -> Any:
    return F(1.0 / np.sqrt(float(q.shape[1])))


def head_forward(q: Floats, k: Floats, v: Floats, keep: Floats | None) -> tuple[Floats, Floats, Floats, Floats]:
    """o [T, D], m [T], l [T] and p [T, T] of one sequence and head."""
    tokens = len(q)
    scores = head_scores(q, k)
    vi, sv, zero = token_scales(v)
    o, m, norm, p = np.empty_like(q), np.empty(tokens, F), np.empty(tokens, F), np.zeros_like(scores)
    for i in range(tokens):
        m[i] = np.max(scores[i, : i + 1])
        p[i, : i + 1] = exp32(scores[i, : i + 1] - m[i])
        row = p[i, : i + 1].astype(np.float64)
        norm[i] = rounded(np.sum(np.rint(row * 2.0**30).astype(np.int64)), np.int64(30))
        s0 = least_of(sv[: i + 1], zero[: i + 1])
        w = np.rint(np.ldexp(row, 14 + s0 - sv[: i + 1])).astype(np.int64)
        w[zero[: i + 1]] = 0
        if keep is not None:
            w[keep[i, : i + 1] == 0] = 0
        total = product_of_integers(w[None], vi[: i + 1])[0]
        o[i] = rounded(total, np.int64(14 + s0)) / norm[i]
        if keep is not None:
            o[i] *= np.max(keep)
    return o, m, norm, p


def tile_product(x: Floats, right: Longs, s: Longs, zero: npt.NDArray[np.bool_]) -> Floats:
    """Left operand x [rows, tokens] folded with the right operand's exponents, times [tokens, D]."""
    s0 = least_of(s, zero)
    fold = np.where(zero | (s0 - s < -126), 0.0, np.ldexp(1.0, s0 - s)).astype(F)
    x = x * fold
    sx = exponents(x, 1)
    return rounded(product_of_integers(integers(x, sx[:, None]), right), sx[:, None] + s0)


def head_backward(
    q: Floats, k: Floats, v: Floats, keep: Floats | None, kept: tuple[Floats, ...], do: Floats
) -> tuple[Floats, Floats, Floats]:
    """dq, dk, dv of one sequence and head; `kept` is what head_forward returned."""
    o, _, norm, p = kept
    (qi, sq, zq), (ki, sk, zk), (vi, sv, _), (di, sd, zd) = map(token_scales, (q, k, v, do))
    delta = ordered_sum(do * o)
    a = p * (F(1) / norm)[:, None]
    multiplier = np.ones_like(a) if keep is None else keep
    g = rounded(product_of_integers(di, vi.T), sd[:, None] + sv[None]) * multiplier
    visible = np.tri(len(q), dtype=bool)
    e = np.where(visible, a * (g - delta[:, None]) * scale_of(q), F(0))
    b = np.where(visible, a * multiplier, F(0))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(q)
    for i in range(0, len(q), TILE):
        rows = slice(i, i + TILE)
        for j in range(0, i + 1, TILE):
            columns = slice(j, j + TILE)
            dv[columns] += tile_product(b[rows, columns].T, di[rows], sd[rows], zd[rows])
            dk[columns] += tile_product(e[rows, columns].T, qi[rows], sq[rows], zq[rows])
            dq[rows] += tile_product(e[rows, columns], ki[columns], sk[columns], zk[columns])
    return dq, dk, dv


def _heads(packed: Floats, heads: int, parts: int) -> Array:
    b, t, inner = packed.shape
    return packed.reshape(b, t, parts, heads, inner // (parts * heads)).transpose(2, 0, 3, 1, 4)


def attention_forward(qkv: Floats, heads: int, keep: Floats | None) -> tuple[Floats, Floats, Floats, Floats]:
    """y [B, T, H*D], maxima, normalisers [B, H, T] and weights [B, H, T, T]."""
    q, k, v = _heads(qkv, heads, 3)
    b, h, t, d = q.shape
    y, p = np.empty((b, h, t, d), F), np.empty((b, h, t, t), F)
    m, norm = np.empty((b, h, t), F), np.empty((b, h, t), F)
    for at in np.ndindex(b, h):
        mask = None if keep is None else keep[at]
        y[at], m[at], norm[at], p[at] = head_forward(q[at], k[at], v[at], mask)
    return y.transpose(0, 2, 1, 3).reshape(b, t, h * d), m, norm, p


def attention_backward(qkv: Floats, heads: int, keep: Floats | None, kept: tuple[Floats, ...], dy: Floats) -> Floats:
    q, k, v = _heads(qkv, heads, 3)
    (do,), (o,) = _heads(dy, heads, 1), _heads(kept[0], heads, 1)
    d = np.empty((3, *q.shape), F)
    for at in np.ndindex(q.shape[:2]):
        mask = None if keep is None else keep[at]
        parts = (o[at], *(array[at] for array in kept[1:]))
        d[(slice(None), *at)] = head_backward(q[at], k[at], v[at], mask, parts, do[at])
    b, _, t, _ = q.shape
    return d.transpose(1, 3, 0, 2, 4).reshape(b, t, qkv.shape[-1])


# --- masks, optimizer, digest ---------------------------------------------------------------------

FACTOR = 0xD6E8FEB86659FD93  # odd


def mask32(*address: Any, first: int = 0) -> Floats | None:
    """keep_mask of the reference with the factor rounded to fp32."""
    keep = keep_mask(*address, first=first)
    return None if keep is None else keep.astype(F)


def gradient_norm(flat: Floats) -> float:
    """Square root of the ordered float64 sum over chunks of 4096 of ordered sums of squares."""
    squares = flat.astype(np.float64) ** 2
    parts = [ordered_sum(squares[i : i + 4096]) for i in range(0, flat.size, 4096)]
    return float(np.sqrt(ordered_sum(np.array(parts))))


def adamw(
    w: Floats,
    g: Floats,
    m: Floats,
    v: Floats,
    clip: Any,
    beta1: float,
    beta2: float,
    correction1: Any,
    correction2: Any,
    epsilon: float,
    rate: Any,
    decay: Any,
) -> tuple[Floats, Floats, Floats]:
    g = g * clip
    m = F(beta1) * m + F(1 - beta1) * g
    v = F(beta2) * v + F(1 - beta2) * (g * g)
    step = (m / correction1) / (np.sqrt(v / correction2) + F(epsilon))
    return w * decay - rate * step, m, v


def digest_words(x: Floats) -> tuple[int, int]:
    """The two sums modulo 2**64 of a tensor, from Python integers."""
    return mixed_words(dict(enumerate(x.reshape(-1).view(np.uint32).tolist())))


def grouped_digest_words(x: Floats) -> tuple[int, int]:
    """The same in the tier prod: a table [blocks of 256, halves, 32 groups, 4], where it begins within the tensor."""
    count = -(-x.size // 256)
    table = np.zeros(256 * count, np.uint32)
    table[: x.size] = x.reshape(-1).view(np.uint32)
    groups = table.reshape(count, 2, 32, 4).transpose(0, 2, 1, 3).reshape(-1, 8).tolist()
    there = (np.arange(256 * count) < x.size).reshape(count, 2, 32, 4)[:, 0, :, 0].reshape(-1)
    values = {n: sum(bits * FACTOR**j for j, bits in enumerate(group)) for n, group in enumerate(groups) if there[n]}
    return mixed_words(values)


def mixed_words(values: dict[int, int]) -> tuple[int, int]:
    """The sums of the two words that integers are mixed to with their numbers."""
    mask = 2**64 - 1
    first = second = 0
    for i, value in values.items():
        z = ((i + 1) * 0x9E3779B97F4A7C15 + value) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        y = (z * FACTOR) & mask
        first, second = (first + z) & mask, (second + (y ^ (y >> 32))) & mask
    return first, second


def digest(step: int, loss: Any, tensors: list[tuple[Floats, Floats, Floats]]) -> bytes:
    """The step digest; `tensors` holds w, m, v of each parameter in order."""
    hasher = blake3(b"samebits step digest 1\n")
    hasher.update(step.to_bytes(8, "little"))
    hasher.update(np.array(loss, "<f4").tobytes())
    for triple in tensors:
        for tensor in triple:
            for word in digest_words(tensor):
                hasher.update(word.to_bytes(8, "little"))
    return hasher.digest()
