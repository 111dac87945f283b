"""Elementary functions that give the same bits on every machine.

No platform library is asked for exp, log, tanh, sin, cos or pow: their results differ between
releases, vendors and SIMD levels. Each function here is a fixed sequence of IEEE-754 additions,
subtractions, multiplications, divisions, comparisons and integer operations, each rounded once to
nearest even and never contracted into a fused multiply-add. That sequence, not the mathematical
function, is the definition; another backend has to repeat it step by step. docs/elementary.md gives
the formulas, the domains and the worst errors measured.

Functions ending in 32 are fp32 in, fp32 out, and free of branches, so that loops over them
vectorise; their NaN is always the same one (0x7FC00000), whatever NaN came in. Functions ending in
64 take and give float64.
"""

from math import pi

import numpy as np

from engine.numerics.bits import (
    bits_of_float32,
    bits_of_float64,
    float32_of_bits,
    float64_of_bits,
)
from engine.numerics.errors import NumericsDomainError
from engine.numerics.jit import device_function
from engine.numerics.types import Scalar

ZERO = np.float32(0.0)
HALF = np.float32(0.5)
ONE = np.float32(1.0)
TWO = np.float32(2.0)
INFINITY = np.float32(np.inf)
NAN = np.uint32(0x7FC00000).view(np.float32)
LARGEST = np.float32(np.finfo(np.float32).max)
SMALLEST_NORMAL = np.float32(2.0**-126)

ABSOLUTE_MASK = np.int32(0x7FFFFFFF)
SIGN_MASK = np.int32(-0x80000000)
FRACTION_MASK = np.int32(0x007FFFFF)
FRACTION_BITS = np.int32(23)
BITS_OF_ONE = np.int32(0x3F800000)

# Adding 1.5 * 2^23 rounds a small fp32 to an integer, to nearest even, and leaves that integer in
# the low bits of the sum: no float-to-integer conversion is needed, whose result for NaN or
# overflow differs between machines.
ROUNDER = np.float32(12582912.0)
LOG2_E = np.float32(1.442695)
# ln 2 in two parts; the first has 9 significant bits, so its product with an exponent is exact.
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-0.00021219444)

# Smallest input whose exponential is at least 2^-126, and largest whose exponential is finite.
EXP_SMALLEST = np.float32(-87.33654)
EXP_LARGEST = np.float32(88.72283)
# (exp(r) - 1 - r) / r^2 for |r| <= ln(2)/2.
EXP_0 = np.float32(0.5)
EXP_1 = np.float32(0.16666667)
EXP_2 = np.float32(0.041666485)
EXP_3 = np.float32(0.008333205)
EXP_4 = np.float32(0.0013933082)
EXP_5 = np.float32(0.00019946629)

BITS_OF_SQRT_HALF = np.int32(0x3F3504F3)
SUBNORMAL_SCALE = np.float32(2.0**23)
SUBNORMAL_EXPONENT = np.float32(23.0)
# (log(1 + f) - f + f^2/2) / f^3 for sqrt(1/2) <= 1 + f < sqrt(2).
LOG_0 = np.float32(0.33333316)
LOG_1 = np.float32(-0.25000814)
LOG_2 = np.float32(0.20002307)
LOG_3 = np.float32(-0.1662444)
LOG_4 = np.float32(0.14180686)
LOG_5 = np.float32(-0.13129504)
LOG_6 = np.float32(0.12885512)
LOG_7 = np.float32(-0.07862166)

# tanh rounds to 1 from 9.02 on.
TANH_CLAMP = np.float32(10.0)

# 2 * sqrt(2/pi), that times 0.044715, and three times the latter.
GELU_LINEAR = np.float32(1.5957691216057308)
GELU_CUBIC = np.float32(1.5957691216057308 * 0.044715)
GELU_CUBIC_SLOPE = np.float32(3.0 * 1.5957691216057308 * 0.044715)
# The derivative is exactly 0 or 1 well before this; clamping keeps its square from overflowing.
GELU_CLAMP = np.float32(16.0)


@device_function
def absolute32(x: Scalar) -> Scalar:
    """`x` with its sign bit cleared."""
    return float32_of_bits(np.int32(bits_of_float32(x) & ABSOLUTE_MASK))


@device_function
def _split_by_ln2(x: Scalar) -> tuple[Scalar, Scalar]:
    """r and k with `x = k ln 2 + r`, `|r| <= ln(2)/2`; k shifted into the place of an exponent."""
    shifted = x * LOG2_E + ROUNDER
    k = shifted - ROUNDER
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    return r, np.int32(bits_of_float32(shifted) << FRACTION_BITS)


@device_function
def _expm1_reduced(r: Scalar) -> Scalar:
    """exp(r) - 1 for `|r| <= ln(2)/2`, without loss of relative accuracy near zero."""
    q = ((((EXP_5 * r + EXP_4) * r + EXP_3) * r + EXP_2) * r + EXP_1) * r + EXP_0
    return r + (r * r) * q


@device_function
def exp32(x: Scalar) -> Scalar:
    """exp(x).

    Domain: every fp32. Results below 2^-126 are 0 by definition (x < -87.33654), so no subnormal
    comes out; x > 88.72283 gives +inf.
    """
    r, exponent = _split_by_ln2(x)
    y = ONE + _expm1_reduced(r)
    y = float32_of_bits(np.int32(bits_of_float32(y) + exponent))
    y = ZERO if x < EXP_SMALLEST else y
    y = INFINITY if x > EXP_LARGEST else y
    return y if x == x else NAN


@device_function
def log32(x: Scalar) -> Scalar:
    """The natural logarithm.

    Domain: every positive fp32, subnormals included. ±0 gives -inf, +inf gives +inf, negative
    numbers give NaN.
    """
    subnormal = x < SMALLEST_NORMAL
    scaled = x * SUBNORMAL_SCALE if subnormal else x
    offset = SUBNORMAL_EXPONENT if subnormal else ZERO
    bits = np.int32(bits_of_float32(scaled) - BITS_OF_SQRT_HALF)
    k = np.float32(np.int32(bits >> FRACTION_BITS)) - offset
    f = float32_of_bits(np.int32(np.int32(bits & FRACTION_MASK) + BITS_OF_SQRT_HALF)) - ONE
    q = LOG_7 * f + LOG_6
    q = q * f + LOG_5
    q = q * f + LOG_4
    q = q * f + LOG_3
    q = q * f + LOG_2
    q = q * f + LOG_1
    q = q * f + LOG_0
    square = f * f
    tail = ((square * f) * q + k * LN2_LOW) - HALF * square
    y = (f + tail) + k * LN2_HIGH
    y = x if x == INFINITY else y
    y = -INFINITY if x == ZERO else y
    return y if x >= ZERO else NAN


@device_function
def tanh32(x: Scalar) -> Scalar:
    """The hyperbolic tangent, as `e / (e + 2)` with `e = exp(2|x|) - 1`; odd in every bit.

    Domain: every fp32; the infinities give ±1.
    """
    magnitude = absolute32(x)
    clamped = magnitude if magnitude < TANH_CLAMP else TANH_CLAMP
    r, exponent = _split_by_ln2(clamped + clamped)
    scale = float32_of_bits(np.int32(exponent + BITS_OF_ONE))
    e = scale * _expm1_reduced(r) + (scale - ONE)
    y = e / (e + TWO)
    y = float32_of_bits(np.int32(bits_of_float32(y) | np.int32(bits_of_float32(x) & SIGN_MASK)))
    return y if x == x else NAN


@device_function
def gelu32(x: Scalar) -> Scalar:
    """GELU in tanh form: `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.

    Hendrycks and Gimpel, 2016. Evaluated through the identity `(1 + tanh(u))/2 = 1/(1 + exp(-2u))`,
    in which nothing cancels for negative x and the exponential never overflows. Domain: every
    finite fp32; other inputs give NaN.
    """
    v = x * (GELU_LINEAR + GELU_CUBIC * (x * x))
    e = exp32(-absolute32(v))
    numerator = x if x >= ZERO else x * e
    y = numerator / (ONE + e)
    return y if absolute32(x) <= LARGEST else NAN


@device_function
def gelu_grad32(x: Scalar) -> Scalar:
    """The derivative of GELU in tanh form: `s (1 + x v'(x) (1 - s))`, s the sigmoid of v(x).

    `v(x) = 2 sqrt(2/pi) (x + 0.044715 x^3)`. Domain: every finite fp32; other inputs give NaN.
    """
    clamped = x if x < GELU_CLAMP else GELU_CLAMP
    clamped = clamped if clamped > -GELU_CLAMP else -GELU_CLAMP
    square = clamped * clamped
    v = clamped * (GELU_LINEAR + GELU_CUBIC * square)
    slope = GELU_LINEAR + GELU_CUBIC_SLOPE * square
    e = exp32(-absolute32(v))
    larger = ONE / (ONE + e)
    smaller = e * larger
    s = larger if clamped >= ZERO else smaller
    complement = smaller if clamped >= ZERO else larger
    y = s * (ONE + (clamped * slope) * complement)
    return y if absolute32(x) <= LARGEST else NAN


ROUNDER_64 = 6755399441055744.0  # 1.5 * 2^52, see ROUNDER
TWO_OVER_PI = 0.6366197723675814
# pi/2 in three parts; the first two have 33 significant bits, so small multiples of them are exact.
HALF_PI_0 = float.fromhex("0x1.921fb544p+0")
HALF_PI_1 = float.fromhex("0x1.0b4611a6p-34")
HALF_PI_2 = float.fromhex("0x1.3198a2e037073p-69")
# (sin(r)/r - 1) / r^2 and (cos(r) - 1 + r^2/2) / r^4, both in z = r^2, for |r| <= pi/4.
SIN_0 = -0.16666666666666632
SIN_1 = 0.008333333333322455
SIN_2 = -0.00019841269829811358
SIN_3 = 2.7557313686246517e-06
SIN_4 = -2.5050756417527764e-08
SIN_5 = 1.589666000637777e-10
COS_0 = 0.0416666666666666
COS_1 = -0.001388888888887444
COS_2 = 2.4801587289634352e-05
COS_3 = -2.755731438656933e-07
COS_4 = 2.08757268928299e-09
COS_5 = -1.1359791744586805e-11

# ln 2 in two parts; the first has 32 significant bits.
LN2_HIGH_64 = float.fromhex("0x1.62e42feep-1")
LN2_LOW_64 = float.fromhex("0x1.a39ef35793c76p-33")
BITS_OF_SQRT_HALF_64 = np.int64(0x3FE6A09E667F3BCD)
FRACTION_MASK_64 = np.int64(0x000FFFFFFFFFFFFF)
FRACTION_BITS_64 = np.int64(52)
SMALLEST_NORMAL_64 = 2.0**-1022
# (log((1+s)/(1-s))/s - 2) / s^2 in z = s^2, for sqrt(1/2) <= (1+s)/(1-s) < sqrt(2).
LOG64_0 = 0.6666666666666735
LOG64_1 = 0.3999999999940858
LOG64_2 = 0.2857142874398362
LOG64_3 = 0.222221983880765
LOG64_4 = 0.18183574940981279
LOG64_5 = 0.15313755640298585
LOG64_6 = 0.14799117744869109


@device_function
def log64(x: Scalar) -> Scalar:
    """The natural logarithm. Domain: positive normal numbers and only those, else NaN."""
    bits = bits_of_float64(x) - BITS_OF_SQRT_HALF_64
    k = float(bits >> FRACTION_BITS_64)
    f = float64_of_bits((bits & FRACTION_MASK_64) + BITS_OF_SQRT_HALF_64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    r = ((LOG64_6 * z + LOG64_5) * z + LOG64_4) * z + LOG64_3
    r = ((r * z + LOG64_2) * z + LOG64_1) * z + LOG64_0
    half_square = 0.5 * (f * f)
    tail = s * (half_square + z * r) + k * LN2_LOW_64
    y = k * LN2_HIGH_64 + (f - (half_square - tail))
    return y if SMALLEST_NORMAL_64 <= x < np.inf else np.nan


def sin_reduced(r: float) -> float:
    """sin(r) in float64 for `|r| <= pi/4`."""
    z = r * r
    return r + (r * z) * (((((SIN_5 * z + SIN_4) * z + SIN_3) * z + SIN_2) * z + SIN_1) * z + SIN_0)


def cos_reduced(r: float) -> float:
    """cos(r) in float64 for `|r| <= pi/4`."""
    z = r * r
    tail = (z * z) * (((((COS_5 * z + COS_4) * z + COS_3) * z + COS_2) * z + COS_1) * z + COS_0)
    half = 0.5 * z
    leading = 1.0 - half
    return leading + (((1.0 - leading) - half) + tail)


# The host calls the two above as plain Python, kernels call the same source compiled.
_sin_reduced = device_function(sin_reduced)
_cos_reduced = device_function(cos_reduced)


@device_function
def sin_cos64(x: Scalar) -> tuple[Scalar, Scalar]:
    """sin(x) and cos(x). Domain: `|x| <= 4`; anything else gives NaN."""
    shifted = x * TWO_OVER_PI + ROUNDER_64
    quarters = shifted - ROUNDER_64
    quadrant = bits_of_float64(shifted)
    high = x - quarters * HALF_PI_0
    middle = high - quarters * HALF_PI_1
    low = ((high - middle) - quarters * HALF_PI_1) - quarters * HALF_PI_2
    r = middle + low
    # What the rounding of r lost enters to first order.
    lost = (middle - r) + low
    sine = _sin_reduced(r) + lost * (1.0 - 0.5 * (r * r))
    cosine = _cos_reduced(r) - lost * r
    swapped = (quadrant & np.int64(1)) != 0
    y = cosine if swapped else sine
    x_axis = sine if swapped else cosine
    y = -y if (quadrant & np.int64(2)) != 0 else y
    x_axis = -x_axis if ((quadrant + np.int64(1)) & np.int64(2)) != 0 else x_axis
    inside = -4.0 <= x <= 4.0
    return (y if inside else np.nan), (x_axis if inside else np.nan)


def cosine_decay(t: int, total: int) -> float:
    """The factor `(1 + cos(pi t/total)) / 2` of a cosine schedule, for `0 <= t <= total < 2^53`.

    Computed as sin^2 or 1 - sin^2 of an angle of at most pi/4, so it is accurate relative to itself
    at both ends, exactly 1, 1/2 and 0 at t = 0, total/2 and total, and
    `cosine_decay(t, total) + cosine_decay(total - t, total) == 1` exactly.

    Raises NumericsDomainError outside that range.
    """
    if not 0 <= t <= total or not 0 < total < 2**53:
        raise NumericsDomainError(
            f"cosine_decay: expected 0 <= t <= total and 0 < total < 2^53, found t={t}, total={total}"
        )
    if 2 * t == total:
        return 0.5
    sine = sin_reduced(pi / 2 * (min(t, total - t) / total))
    square = sine * sine
    return square if 2 * t > total else 1.0 - square


POWER_BITS = 192


def pow_int64(base: float, exponent: int) -> float:
    """`base ** exponent` for `0 <= base <= 1` and `exponent >= 0`, in float64.

    Square and multiply from the lowest bit of the exponent, on integers that keep the leading 192
    bits (truncated) with a binary exponent; then one rounding to nearest even. The relative error
    before it is below `exponent * 2^-190`. Results below 2^-1022 are 0 by definition.

    Raises NumericsDomainError outside that range.
    """
    if not 0.0 <= base <= 1.0 or exponent < 0:
        raise NumericsDomainError(
            f"pow_int64: expected 0 <= base <= 1 and exponent >= 0, found base={base!r}, exponent={exponent}"
        )
    numerator, denominator = base.as_integer_ratio()
    square = (numerator, 1 - denominator.bit_length())
    power = (1, 0)
    while exponent:
        if exponent & 1:
            power = _truncated_product(power, square)
        square = _truncated_product(square, square)
        exponent >>= 1
    return _round_to_float64(*power)


def _truncated_product(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The product of two numbers `mantissa * 2^exponent`, its mantissa cut to POWER_BITS bits."""
    mantissa = a[0] * b[0]
    excess = max(mantissa.bit_length() - POWER_BITS, 0)
    return mantissa >> excess, a[1] + b[1] + excess


def _round_to_float64(mantissa: int, exponent: int) -> float:
    """`mantissa * 2^exponent`, at most 1, rounded once to nearest even; 0 below 2^-1022."""
    if mantissa.bit_length() + exponent <= -1022:
        return 0.0
    # An integer over a power of two is divided with one correct rounding.
    return mantissa / (1 << -exponent)
