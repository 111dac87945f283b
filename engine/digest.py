"""The step digest: a fingerprint of weights and moments after a step, made from one number per tensor.

Per tensor a 128-bit number: the sums, modulo 2**64, of two words mixed from each element's index and bits. Sums of
integers have no order, so the optimizer adds them up on its way. The digest is BLAKE3 over all of them. It finds
accidents and the tensor they hit; against a forger stands the bundle's own hash, which covers the content itself.
"""

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from engine.numerics.bits import bits_of_float32
from engine.numerics.jit import device_function, kernel
from engine.numerics.types import Floats, Scalar

Sums = npt.NDArray[np.uint64]

DOMAIN = b"samebits step digest 1\n"


@device_function
def mix(index: Scalar, bits: Scalar) -> Scalar:
    """64 bits from an element's index and encoding: the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    z = (np.uint64(index) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(np.uint32(bits))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@device_function
def second(z: Scalar) -> Scalar:
    """The second word of an element, from its first."""
    y = z * np.uint64(0xD6E8FEB86659FD93)
    return y ^ (y >> np.uint64(32))


@device_function
def with_element(a: Scalar, b: Scalar, index: Scalar, x: Scalar) -> tuple[Scalar, Scalar]:
    """The two sums of a tensor with one more element in them."""
    z = mix(index, bits_of_float32(x))
    return a + z, b + second(z)


@kernel
def k_digest(x: Floats, sums: Sums) -> None:
    """sums [2] of a flat fp32 tensor."""
    a = b = np.uint64(0)
    for i in range(x.size):
        a, b = with_element(a, b, i, x[i])
    sums[0], sums[1] = a, b


def step_digest(step: int, loss: np.float32, sums: Sums) -> bytes:
    """The digest after `step` steps; sums uint64 [parameters, 3, 2]: weights, m, v of each parameter in order."""
    hasher = blake3(DOMAIN)
    hasher.update(step.to_bytes(8, "little"))
    hasher.update(np.float32(loss).astype("<f4").tobytes())
    hasher.update(sums.astype("<u8").tobytes())
    return hasher.digest()
