"""Causal multi-head self-attention (Vaswani et al. 2017), with dropout on the attention weights.

qkv [B, T, 3*H*D] holds q, k and v side by side, each with its heads side by side; y [B, T, H*D];
keep [B, H, T, T].
"""

from math import sqrt

import numpy as np

from engine.numerics.types import Doubles


def split_heads(packed: Doubles, heads: int, parts: int) -> list[Doubles]:
    """`parts` arrays [B, H, T, D] from [B, T, parts*H*D]."""
    b, t, inner = packed.shape
    split = packed.reshape(b, t, parts, heads, inner // (parts * heads)).transpose(2, 0, 3, 1, 4)
    return list(split)


def join_heads(parts: list[Doubles]) -> Doubles:
    """[B, T, parts*H*D] from arrays [B, H, T, D]."""
    b, heads, t, width = parts[0].shape
    joined = np.stack(parts).transpose(1, 3, 0, 2, 4)
    return joined.reshape(b, t, len(parts) * heads * width)


def attention_weights(q: Doubles, k: Doubles) -> Doubles:
    """Softmax over the keys up to each query, [B, H, T, T]; 0 above the diagonal."""
    scores = q @ k.swapaxes(-1, -2) / sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)
    p = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    weights: Doubles = p / np.sum(p, axis=-1, keepdims=True)
    return weights


def reference_forward(qkv: Doubles, heads: int, keep: Doubles | None) -> Doubles:
    q, k, v = split_heads(qkv, heads, 3)
    a = attention_weights(q, k)
    return join_heads([(a if keep is None else a * keep) @ v])


def reference_backward(qkv: Doubles, heads: int, keep: Doubles | None, dy: Doubles) -> Doubles:
    """Gradient of qkv from that of y."""
    q, k, v = split_heads(qkv, heads, 3)
    (do,) = split_heads(dy, heads, 1)
    a = attention_weights(q, k)
    multiplier = np.ones_like(a) if keep is None else keep
    da = (do @ v.swapaxes(-1, -2)) * multiplier
    ds = a * (da - np.sum(a * da, axis=-1, keepdims=True)) / sqrt(q.shape[-1])
    dv = (a * multiplier).swapaxes(-1, -2) @ do
    return join_heads([ds @ k, ds.swapaxes(-1, -2) @ q, dv])
