"""Start-up check that this thread computes IEEE-754 arithmetic.

A library loaded into the process can switch the processor to flushing subnormals to zero or to
another rounding direction; it does so per thread, and threads inherit it from their starter.
"""

import numpy as np

from engine.errors import UnsoundMachine
from engine.numerics.jit import kernel
from engine.numerics.types import Floats

SUBNORMAL = 2.0**-140
# fp32(sqrt(2^-149)), correctly rounded: the mantissa of sqrt(1/2) with the exponent -75.
SQRT_OF_SMALLEST_BITS = 0x1A3504F3


@kernel
def _probe(values: Floats, results: Floats) -> None:
    """Each result is one fp32 operation on inputs that the compiler cannot know."""
    results[0] = values[0] * values[1]
    results[1] = values[2] * values[3]
    results[2] = np.sqrt(values[4])
    results[3] = values[5] + values[6]
    results[4] = values[5] + values[7]
    results[5] = -values[5] - values[7]


PROBE_INPUTS = np.array(
    [2.0**-100, 2.0**-40, SUBNORMAL, 2.0**100, 2.0**-149, 1.0, 2.0**-25, 3.0 * 2.0**-25],
    dtype=np.float32,
)
# What each result tests, and the bits it must have.
PROBES = (
    ("a product below 2^-126 is kept (no flush-to-zero)", 0x00000200),
    ("a subnormal input is read as such (no denormals-are-zero)", 0x2B800000),
    ("the square root of a subnormal is correctly rounded", SQRT_OF_SMALLEST_BITS),
    ("1 + 2^-25 rounds to nearest", 0x3F800000),
    ("1 + 3 * 2^-25 rounds to nearest", 0x3F800001),
    ("-1 - 3 * 2^-25 rounds to nearest", 0xBF800001),
)


def check_float_environment() -> None:
    """Check the calling thread. Raises UnsoundMachine, naming every property that fails."""
    results = np.zeros(len(PROBES), dtype=np.float32)
    _probe(PROBE_INPUTS, results)
    failures = [
        f"{property_}: expected bits {expected:#010x}, found {found:#010x}"
        for (property_, expected), found in zip(PROBES, results.view(np.uint32).tolist(), strict=True)
        if found != expected
    ]
    if failures:
        raise UnsoundMachine(
            "expected IEEE-754 arithmetic in this thread, found:\n  "
            + "\n  ".join(failures)
            + "\nA library loaded into this process has probably switched the processor to "
            "flush-to-zero or to another rounding direction; start without it."
        )
