"""Sums whose order is written down once, and sums of integers, whose order does not matter.

- A short float sum along a row: 32 lanes, lane j adds elements j, j+32, ... in that order starting from zero; then a
  tree over the lanes (16, 8, 4, 2, 1 apart).
- A float sum over tokens: per column, `q = rint(x * 2**s)` with |q| <= 2**30, added up as 64-bit integers.
"""

import numpy as np

from engine.numerics.bits import bits_of_float64
from engine.numerics.fixed_point import power_of_two
from engine.numerics.jit import device_function
from engine.numerics.types import Array, Scalar

SUM_LANES = 32


@device_function
def lanes_total(lanes: Array) -> Scalar:
    """The tree over 32 lanes; overwrites `lanes`."""
    half = 16
    while half > 0:
        for j in range(half):
            lanes[j] += lanes[j + half]
        half //= 2
    return lanes[0]


@device_function
def sum_exponent(largest: Scalar) -> Scalar:
    """The largest s with largest * 2**s < 2**30, for finite fp32 `largest`; 0 if that is zero."""
    if largest == np.float32(0.0):
        return np.int64(0)
    value = np.float64(largest)
    return np.int64(29) - ((bits_of_float64(value) >> np.int64(52)) - np.int64(1023))


@device_function
def sum_integer(x: Scalar, factor: Scalar) -> Scalar:
    """rint(x * factor) as int64, for |x * factor| <= 2**30; ties to even."""
    shifted = np.float64(x) * factor + np.float64(6755399441055744.0)
    return np.int64(shifted - np.float64(6755399441055744.0))


@device_function
def float_of_sum(total: Scalar, exponent: Scalar) -> Scalar:
    """fp32(total * 2**-exponent) for an int64 total."""
    return np.float32(np.float64(total) * power_of_two(-exponent))
