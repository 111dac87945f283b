"""Dropout (Srivastava et al. 2014), its mask a function of an address.

The function is Philox 4x32-10 (Salmon et al. 2011).
"""

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from engine.numerics.types import Doubles

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def reference_forward(x: Doubles, keep: Doubles | None) -> Doubles:
    return x if keep is None else x * keep


def reference_backward(dy: Doubles, keep: Doubles | None) -> Doubles:
    return dy if keep is None else dy * keep


def random_words(seed: int, step: int, site: int, elements: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The word of each element e: word e % 4 of the block with counter (e // 4, site, step)."""
    block = elements // np.uint64(4)
    counter = [
        block & LOW,
        block >> HALF,
        np.full_like(block, site),
        np.full_like(block, step),
    ]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first = np.uint64(0xD2511F53) * counter[0]
        third = np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (third >> HALF) ^ counter[1] ^ np.uint64(key[0]),
            third & LOW,
            (first >> HALF) ^ counter[3] ^ np.uint64(key[1]),
            first & LOW,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    words: npt.NDArray[np.uint64] = np.choose((elements % np.uint64(4)).astype(np.int64), counter)
    return words


def keep_mask(
    seed: int, step: int, site: int, shape: tuple[int, ...], probability: float, first: int = 0
) -> Doubles | None:
    """Multipliers of a tensor of `shape`, elements numbered from `first` in memory order.

    None if the probability is 0.
    """
    if probability == 0.0:
        return None
    exact = Fraction(repr(probability))
    count = int(np.prod(shape, dtype=np.int64))
    words = random_words(seed, step, site, np.arange(first, first + count, dtype=np.uint64))
    kept = words >= np.uint64(exact * 2**32 // 1)
    return np.where(kept, float(1 / (1 - exact)), 0.0).reshape(shape)
