"""Causal attention of one head in float64, and what the tier prod's own kernels keep of it and of other tensors."""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.cuda.run import MaskArguments

Array = npt.NDArray[Any]
LOW_HALF = 0xFFFFFFFF


def attention(q: Array, k: Array, v: Array, dy: Array, kept: Array | float = 1.0) -> tuple[Array, ...]:
    """y, logarithms of row sums, dq, dk and dv of tokens [..., T, D]; kept: what each weight is multiplied by."""
    scale = 1 / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[-2], dtype=bool), q @ k.swapaxes(-1, -2) * scale, -np.inf)
    top = scores.max(-1, keepdims=True)
    w = np.exp(scores - top)
    total = w.sum(-1, keepdims=True)
    w = w / total
    dw = (dy @ v.swapaxes(-1, -2)) * kept
    ds = w * (dw - (dw * w).sum(-1, keepdims=True)) * scale
    y, dv = (w * kept) @ v, (w * kept).swapaxes(-1, -2) @ dy
    return y, (np.log(total) + top)[..., 0], ds @ k, ds.swapaxes(-1, -2) @ q, dv


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Philox 4x32-10 of counters uint64 [4, N] below 2^32: words [4, N]."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        high, low = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = low >> 32 ^ b ^ np.uint64(first), low & LOW_HALF
        c, d = high >> 32 ^ d ^ np.uint64(second), high & LOW_HALF
        first, second = (first + 0x9E3779B9) & LOW_HALF, (second + 0xBB67AE85) & LOW_HALF
    return np.stack([a, b, c, d])


def kept_pairs(key: tuple[int, int], step: int, site: int, threshold: int, head: int, tokens: int) -> Array:
    """bool [queries, keys] of the head-th head of the batch: a block of 128 bits serves queries q and q + 8 with keys
    k, k + 1, k + 8 and k + 9 of a patch of 16 x 16, 16 bits each."""
    q, k = np.meshgrid(np.arange(tokens, dtype=np.uint64), np.arange(tokens, dtype=np.uint64), indexing="ij")
    patches = np.uint64(-(-tokens // 16))
    block = ((np.uint64(head) * patches + q // 16) * patches + k // 16) * 32 + q % 8 * 4 + k % 8 // 2
    counter = np.stack([block & LOW_HALF, block >> 32, np.full_like(block, site), np.full_like(block, step)])
    words = philox(counter, key)
    chosen = np.choose((k % 2 * 2 + q // 8 % 2).astype(np.intp), words)
    decision = np.where(k // 8 % 2 == 1, chosen >> 16, chosen & 0xFFFF)
    found: Array = decision >= threshold
    return found


def dropped(x: Array, mask: MaskArguments, key: tuple[int, int], step: int, first: int) -> Array:
    """x through dropout, its elements those from number `first` (a multiple of 4) on."""
    site, threshold, factor = mask
    blocks = np.arange(first // 4, (first + x.size) // 4, dtype=np.uint64)
    constant = np.full_like(blocks, site), np.full_like(blocks, step)
    words = philox(np.stack([blocks, np.zeros_like(blocks), *constant]), key).T.reshape(x.shape)
    return np.where(words >= threshold, x * factor, 0.0)
