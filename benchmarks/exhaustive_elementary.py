"""Measure the elementary functions on every fp32 input: worst error, and a hash of all outputs.

    python benchmarks/exhaustive_elementary.py [--stride N] [NAME ...]

For each function one JSON object is printed. Inputs are all 2^32 bit patterns in ascending order
(every N-th with `--stride N`). Inside the function's domain, cut into segments, the error is taken
against NumPy's float64 functions (long double for the float64 functions); the worst input of each
segment is then evaluated again with mpmath at 60 digits, and that is the figure given. Outside the
domain the output has to equal its definition, or the script stops. An ulp is the distance of fp32
(float64) neighbours in the binade of the exact result. `blake3` covers the outputs in order, as
little-endian numbers: two machines or backends that agree on it agree on every bit.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mpmath
import numba
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from engine.numerics import elementary

CHUNK = 1 << 17  # fits the caches
THREADS = 2
INPUTS = 1 << 32
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149

Array = npt.NDArray[Any]


@dataclass
class Worst:
    """The largest error in one segment of a domain, in ulp and absolute, and where."""

    low: float
    high: float
    ulp: float = 0.0
    ulp_at: float = 0.0
    absolute: float = 0.0
    absolute_at: float = 0.0
    inputs: int = 0

    def include(self, other: "Worst") -> None:
        if other.ulp > self.ulp:
            self.ulp, self.ulp_at = other.ulp, other.ulp_at
        if other.absolute > self.absolute:
            self.absolute, self.absolute_at = other.absolute, other.absolute_at
        self.inputs += other.inputs


@dataclass(frozen=True)
class Case:
    """One function: compiled loop, references, domain in segments, and what is beyond it."""

    name: str
    loop: Callable[[Array, Array], None]
    dtype: type
    reference: Callable[[Array], Array]
    exact: Callable[[Any], Any]
    segments: tuple[tuple[float, float], ...]
    outside: Callable[[Array], Array]

    def __call__(self, x: Array) -> Array:
        y = np.empty(x.shape, dtype=self.dtype)
        self.loop(x, y)
        return y


def loop_over(function: Callable[[Any], Any]) -> Callable[[Array, Array], None]:
    """A compiled loop `y[i] = function(x[i])`, with the flags that the engine compiles with."""

    @numba.njit(nogil=True, error_model="numpy")
    def loop(x: Array, y: Array) -> None:
        for i in range(x.size):
            y[i] = function(x[i])

    return loop


@numba.njit(nogil=True, error_model="numpy")
def largest_errors(
    y: Array, high: Array, low: Array, fraction_bits: int, smallest_exponent: int
) -> tuple[float, int, float, int]:
    """Largest ulp and absolute error of y against the sums high + low (float64), with indices."""
    ulp, ulp_at, absolute, absolute_at = -1.0, 0, -1.0, 0
    for i in range(y.size):
        error = abs((np.float64(y[i]) - high[i]) - low[i])
        bits = np.float64(high[i]).view(np.int64)
        exponent = ((bits >> np.int64(52)) & np.int64(0x7FF)) - np.int64(1023)
        exponent = max(exponent, np.int64(smallest_exponent)) - np.int64(fraction_bits)
        scaled = error * np.int64((np.int64(1023) - exponent) << np.int64(52)).view(np.float64)
        # Written so that a NaN counts as larger than anything.
        if not scaled <= ulp:
            ulp, ulp_at = scaled, i
        if not error <= absolute:
            absolute, absolute_at = error, i
    return ulp, ulp_at, absolute, absolute_at


GELU_SCALE = 2.0 * float(mpmath.sqrt(2 / mpmath.pi))
GELU_CUBIC = 0.044715


def gelu_reference(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1.0 + np.exp(-GELU_SCALE * (x + GELU_CUBIC * (x * x * x))))


def gelu_grad_reference(x: Array) -> Array:
    v = GELU_SCALE * (x + GELU_CUBIC * (x * x * x))
    slope = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * (x * x))
    with np.errstate(over="ignore"):
        return (1.0 + x * slope / (1.0 + np.exp(v))) / (1.0 + np.exp(-v))


def gelu_exact(x: Any) -> Any:
    u = mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
    return x / (1 + mpmath.exp(-2 * u))


def gelu_grad_exact(x: Any) -> Any:
    scale, cubic = 2 * mpmath.sqrt(2 / mpmath.pi), mpmath.mpf("0.044715")
    v, slope = scale * (x + cubic * x**3), scale * (1 + 3 * cubic * x**2)
    return (1 + x * slope / (1 + mpmath.exp(v))) / (1 + mpmath.exp(-v))


def long_double(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: function(x.astype(np.longdouble))


def nan_like(x: Array) -> Array:
    return np.full(x.shape, np.nan, dtype=x.dtype)


def exp_outside(x: Array) -> Array:
    y = np.where(x > 0, np.float32(np.inf), np.float32(0))
    return np.where(np.isnan(x), np.float32(np.nan), y)


def log_outside(x: Array) -> Array:
    y = np.where(x == np.inf, x, nan_like(x))
    return np.where(x == 0, np.float32(-np.inf), y)


def tanh_outside(x: Array) -> Array:
    return np.where(np.isnan(x), np.float32(np.nan), np.sign(x))


def float64_nan(x: Array) -> Array:
    return np.full(x.shape, np.nan)


def cases() -> dict[str, Case]:
    """Every function that is measured, by name."""
    sin_cos64 = elementary.sin_cos64

    @elementary.device_function
    def sin_only(x: Any) -> Any:
        return sin_cos64(x)[0]

    @elementary.device_function
    def cos_only(x: Any) -> Any:
        return sin_cos64(x)[1]

    def case32(name: str, *rest: Any) -> Case:
        return Case(name, loop_over(getattr(elementary, name)), np.float32, *rest)

    everything = (-LARGEST, LARGEST)
    above_zero = (SMALLEST, LARGEST)
    exp_domain = (float(elementary.EXP_SMALLEST), float(elementary.EXP_LARGEST))
    gelu_segments = ((-LARGEST, -5.0), (-5.0, -1.0), (-1.0, LARGEST))
    slope_segments = ((-LARGEST, -5.0), (-5.0, -1.0), (-1.0, -0.5), (-0.5, LARGEST))
    found = (
        case32("exp32", np.exp, mpmath.exp, (exp_domain,), exp_outside),
        case32("log32", np.log, mpmath.log, (above_zero,), log_outside),
        case32("tanh32", np.tanh, mpmath.tanh, (everything,), tanh_outside),
        case32("gelu32", gelu_reference, gelu_exact, gelu_segments, nan_like),
        case32("gelu_grad32", gelu_grad_reference, gelu_grad_exact, slope_segments, nan_like),
        Case(
            "log64",
            loop_over(elementary.log64),
            np.float64,
            long_double(np.log),
            mpmath.log,
            (above_zero,),
            float64_nan,
        ),
        Case(
            "cos64",
            loop_over(cos_only),
            np.float64,
            long_double(np.cos),
            mpmath.cos,
            ((-4.0, 4.0),),
            float64_nan,
        ),
        Case(
            "sin64",
            loop_over(sin_only),
            np.float64,
            long_double(np.sin),
            mpmath.sin,
            ((-4.0, 4.0),),
            float64_nan,
        ),
    )
    return {case.name: case for case in found}


def examine(case: Case, bits: Array) -> tuple[bytes, list[Worst]]:
    """Outputs (little-endian) for the fp32 inputs with these bits, and the worst error per segment.

    Raises AssertionError where an output outside the domain is not what its definition says.
    """
    x = bits.astype(np.uint32, copy=False).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        widened = x.astype(case.dtype, copy=False)
    y = case(widened)
    result = []
    outside = np.ones(x.shape, dtype=bool)
    for low, high in case.segments:
        inside = (x >= low) & (x <= high)
        outside &= ~inside
        # Most chunks lie in one segment, and need not be copied.
        whole = inside.all()
        result.append(_segment(case, low, high, x if whole else x[inside], y if whole else y[inside]))
    if outside.any():
        _check_outside(case, x[outside], y[outside])
    return y.astype(y.dtype.newbyteorder("<"), copy=False).tobytes(), result


def _check_outside(case: Case, x: Array, y: Array) -> None:
    integer = np.uint32 if case.dtype is np.float32 else np.uint64
    wrong = y.view(integer) != case.outside(x).astype(case.dtype).view(integer)
    if wrong.any():
        raise AssertionError(f"{case.name}({x[wrong][0]!r}): {y[wrong][0]!r} is not its definition")


def _segment(case: Case, low: float, high: float, x: Array, y: Array) -> Worst:
    if not x.size:
        return Worst(low, high)
    exact = case.reference(x.astype(np.float64))
    leading = exact.astype(np.float64, copy=False)
    rest = (exact - leading).astype(np.float64, copy=False)
    fraction_bits, smallest = (23, -126) if case.dtype is np.float32 else (52, -1022)
    ulp, i, absolute, j = largest_errors(y, leading, rest, fraction_bits, smallest)
    return Worst(low, high, ulp, float(x[i]), absolute, float(x[j]), x.size)


def exact_error(case: Case, x: float) -> tuple[float, float]:
    """The error at one input in ulp and absolute, by mpmath."""
    with mpmath.workdps(60):
        exact = case.exact(mpmath.mpf(x))
        fraction_bits, smallest = (23, -126) if case.dtype is np.float32 else (52, -1022)
        exponent = smallest if exact == 0 else max(int(mpmath.frexp(exact)[1]) - 1, smallest)
        y = case(np.array([x], dtype=np.float32).astype(case.dtype))[0]
        error = abs(mpmath.mpf(float(y)) - exact)
        return float(error / mpmath.mpf(2) ** (exponent - fraction_bits)), float(error)


def measure(case: Case, stride: int = 1) -> dict[str, Any]:
    """Run one function over every `stride`-th fp32 bit pattern."""
    hasher = blake3()
    worst = [Worst(low, high) for low, high in case.segments]
    for outputs, found in _in_order(case, stride):
        hasher.update(outputs)
        for total, part in zip(worst, found, strict=True):
            total.include(part)
    segments = []
    for segment in worst:
        ulp, _ = exact_error(case, segment.ulp_at)
        _, absolute = exact_error(case, segment.absolute_at)
        segments.append(
            {
                "from": segment.low,
                "to": segment.high,
                "inputs": segment.inputs,
                "worst_ulp": ulp,
                "worst_ulp_at": segment.ulp_at,
                "worst_absolute": absolute,
                "worst_absolute_at": segment.absolute_at,
            }
        )
    return {
        "function": case.name,
        "stride": stride,
        "segments": segments,
        "blake3": hasher.hexdigest(),
    }


def _in_order(case: Case, stride: int) -> Iterator[tuple[bytes, list[Worst]]]:
    """The chunks' results in order, with few chunks in flight."""
    step = CHUNK * stride
    chunks = (np.arange(a, min(a + step, INPUTS), stride, dtype=np.uint32) for a in range(0, INPUTS, step))
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(examine, case, bits) for bits in islice(chunks, 2 * THREADS)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(examine, case, bits) for bits in islice(chunks, 1)]


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description="Measure elementary functions on fp32 inputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--stride", type=int, default=1, help="take every N-th input")
    arguments = parser.parse_args()
    if np.finfo(np.longdouble).nmant < 63:
        parser.error("expected a long double of at least 64 significant bits on this platform")
    for name in arguments.names or known:
        print(json.dumps(measure(known[name], arguments.stride), indent=2), flush=True)


if __name__ == "__main__":
    main()
