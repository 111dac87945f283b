"""The fixed-point product `C = A @ B`: float matrices in, float matrix out, exact integers between.

Definition (A is [M, K], B is [K, N], both fp32):
1. Each row of A and each column of B gets its own exponent `s`: the largest integer with
   `rint(max|x| * 2**s) <= 32639`; an all-zero row has s = 0. (32639 = 127*256 + 127.)
2. `q = rint(x * 2**s)`, ties to even, split into `lo = ((q + 128) mod 256) - 128` and `hi = (q - lo) / 256`.
3. `P = 65536*sum(hi*hi') + 256*sum(hi*lo' + lo*hi')`; the `lo*lo'` term is dropped by definition.
4. `C = fp32(P * 2**-(sA + sB))`: one rounding, to nearest even, from the exact value.

Sums of integers do not depend on their order, so neither does any bit of C. Since `P/256 = sum(hi*q' + lo*hi')`, an
element of A is kept as one word holding the pair (hi, lo), an element of B as the pair (q', hi').
"""

import numpy as np

from engine.numerics.bits import (
    bits_of_float32,
    bits_of_float64,
    float32_of_bits,
    float64_of_bits,
)
from engine.numerics.jit import device_function, subroutine
from engine.numerics.microkernel import DEPTH_LIMIT, TILE_COLUMNS, TILE_ROWS, multiply_tile
from engine.numerics.types import Doubles, Floats, Longs, Scalar, Words

LARGEST = 32639
WORD = 4  # bytes of a packed pair
# Exponent given to rows whose scale must not count where several rows' scales are compared: it is above any real one.
ZERO_ROW = 1000
# Numba widens int32 arithmetic to int64 unless each result is cast back; with int32 throughout, loops use full vectors.
EIGHT = np.int32(8)
SIXTEEN = np.int32(16)
HALF_BYTE = np.int32(128)
LOW_HALF = np.int32(0xFFFF)


@device_function
def power_of_two(exponent: Scalar) -> Scalar:
    """2**exponent as float64, for -1022 <= exponent <= 1023."""
    return float64_of_bits((np.int64(exponent) + np.int64(1023)) << np.int64(52))


@device_function
def exponent_for(largest: Scalar) -> Scalar:
    """The exponent s of step 1 for a row whose greatest magnitude is `largest` (fp32, finite); 0 if that is zero."""
    if largest == np.float32(0.0):
        return np.int64(0)
    value = np.float64(largest)
    s = np.int64(14) - ((bits_of_float64(value) >> np.int64(52)) - np.int64(1023))
    if np.rint(value * power_of_two(s)) > np.float64(LARGEST):
        s -= np.int64(1)
    return s


@device_function
def integer_of(x: Scalar, factor: Scalar) -> Scalar:
    """q of step 2: fp32 `x` times float64 power of two `factor`, to the nearest integer, ties to even."""
    # Adding and taking away 1.5 * 2**52 rounds to an integer in the current (nearest even) mode.
    shifted = np.float64(x) * factor + np.float64(6755399441055744.0)
    return np.int32(shifted - np.float64(6755399441055744.0))


@device_function
def _high(q: Scalar) -> Scalar:
    """hi of step 2: (q - lo) / 256 = floor((q + 128) / 256)."""
    return np.int32(np.int32(q + HALF_BYTE) >> EIGHT)


@device_function
def left_word(q: Scalar) -> Scalar:
    """The pair (hi, lo) of an element of A in one int32."""
    hi = _high(q)
    lo = np.int32(q - np.int32(hi << EIGHT))
    return np.int32(np.int32(hi & LOW_HALF) | np.int32(lo << SIXTEEN))


@device_function
def right_word(q: Scalar) -> Scalar:
    """The pair (q, hi) of an element of B in one int32."""
    return np.int32(np.int32(q & LOW_HALF) | np.int32(_high(q) << SIXTEEN))


@device_function
def magnitude_bits(x: Scalar) -> Scalar:
    """The encoding of |x|: ordered like the magnitudes, with infinity and then NaN above every finite one."""
    return np.int32(bits_of_float32(x) & np.int32(0x7FFFFFFF))


INFINITY_BITS = np.int32(0x7F800000)


@subroutine
def row_exponent(row: Floats, size: Scalar, flag: Longs, slot: Scalar) -> Scalar:
    """Exponent of the first `size` elements of a contiguous fp32 row; sets flag[slot] if one is not finite."""
    top = np.int32(0)
    for k in range(size):
        top = max(top, magnitude_bits(row[k]))
    if top >= INFINITY_BITS:
        flag[slot] = 1
        return np.int64(0)
    return exponent_for(float32_of_bits(top))


@subroutine
def multiply_block(
    left: Scalar,
    row_stride: Scalar,
    depth_stride: Scalar,
    panel: Scalar,
    depth: Scalar,
    tile: Words,
    wide: Doubles,
) -> None:
    """wide[i, j] = P/256 for a tile of TILE_ROWS x TILE_COLUMNS, as exact float64.

    left: address of left words, element (i, k) at i*row_stride + k*depth_stride; panel: address of right words
    [depth, TILE_COLUMNS]; both int32. tile: int32, wide: float64 [TILE_ROWS, TILE_COLUMNS] scratch.
    """
    for start in range(0, depth, DEPTH_LIMIT):
        part = min(DEPTH_LIMIT, depth - start)
        multiply_tile(
            left + WORD * start * depth_stride,
            row_stride,
            depth_stride,
            panel + WORD * start * TILE_COLUMNS,
            part,
            tile.ctypes.data,
        )
        if start == 0:
            for i in range(TILE_ROWS):
                for j in range(TILE_COLUMNS):
                    wide[i, j] = np.float64(tile[i, j])
        else:
            for i in range(TILE_ROWS):
                for j in range(TILE_COLUMNS):
                    wide[i, j] += np.float64(tile[i, j])
