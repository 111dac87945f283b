"""How far a portable kernel may be from the mathematics: what all the bounds are made of.

U is the unit roundoff of fp32: one rounding changes a value by at most U of itself (or by TINY,
where it is subnormal).

Fixed-point product. An operand x has one exponent s per row (of A) or column (of B): the largest
with rint(max|x| * 2**s) <= 32639. Then max|x| * 2**(s+1) > 32639, so a unit of its integers is

    2**-s < 2 * max|x| / 32639.                                                            (1)

Quantising moves each element by at most half a unit. So with units a and b of a row and a column,

    |C - sum(x*y)| <= sum over k of (|x_k|*b/2 + |y_k|*a/2 + a*b/4)    both factors moved
                      + K * 128*128 * a*b                             the dropped lo*lo' terms
                      + U*|C| + TINY                                   the rounding to fp32

which is `product_bound`, with units computed exactly from the fp32 inputs. A finite difference would
not do: the quantised forward is a staircase, flat almost everywhere.

Ordered sums of n elements add 32 lanes of ceil(n/32) elements and a tree of depth 5, so they err by
at most `additions(n)` * U of the sum of magnitudes.

Second-order terms (U*U and the like) are covered by the factor SLACK.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

U = 2.0**-24
TINY = 2.0**-149
SLACK = 1 + 2.0**-8
LARGEST = 32639
DROPPED = 128.0 * 128.0
# Worst errors of the elementary functions, in units of their last place (docs/elementary.md).
EXP_ULP, LOG_ULP = 1.0, 0.8
EXP_ERROR = 2 * U * EXP_ULP  # relative; an ulp is at most 2U of a value
EXP_FLUSHED = 2.0**-126  # smaller exponentials are 0


def unit(x: Array, axis: int) -> Doubles:
    """2**-s along an axis, by (1); exact when x is what the kernel quantises."""
    return 2 * np.max(np.abs(x.astype(np.float64)), axis=axis, keepdims=True) / LARGEST


def product_bound(x: Array, y: Array) -> Doubles:
    """Of the fixed-point product of x [..., M, K] and y [..., K, N]; see above."""
    x, y = np.abs(x.astype(np.float64)), np.abs(y.astype(np.float64))
    a, b = unit(x, -1), unit(y, -2)
    depth = x.shape[-1]
    moved = np.sum(x, axis=-1, keepdims=True) * b / 2 + a * np.sum(y, axis=-2, keepdims=True) / 2
    bound: Doubles = (moved + depth * (0.25 + DROPPED) * a * b) * SLACK + U * (x @ y) * SLACK + TINY
    return bound


def additions(n: int) -> int:
    return -(-n // 32) + 5


def column_sum_bound(x: Array) -> Doubles:
    """Of an integer sum over tokens (axis 0): |q| < 2**30 and at least 2**29 at the largest, so a
    unit is at most max|x| * 2**-29, and each token moves by half of it."""
    x = np.abs(x.astype(np.float64))
    bound: Doubles = len(x) / 2 * np.max(x, axis=0) * 2.0**-29 + U * np.sum(x, axis=0) + TINY
    return bound * SLACK
