"""The step digest: a fingerprint of weights and moments after a step, made from one number per tensor.

Per tensor a 128-bit number: the sums, modulo 2**64, of two words mixed from each element's index and bits. Sums of
integers have no order, so the optimizer adds them up on its way. The digest is BLAKE3 over all of them. It finds
accidents and the tensor they hit; against a forger stands the bundle's own hash, which covers the content itself.

In the tier prod eight elements are mixed together, four neighbours and the four that stand 128 further on, as a warp of
a card has them: mixing each by itself would take it four times as many instructions as the optimizer's update.

In the tier debug the number of a tensor is the BLAKE3 of its content, and a run keeps those of every step.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from engine.numerics.bits import bits_of_float32
from engine.numerics.jit import device_function, kernel
from engine.numerics.types import Floats, Scalar

Sums = npt.NDArray[np.uint64]
Hashes = npt.NDArray[np.uint8]

GROUP, APART = 8, 128  # elements that k_group_digest takes together, and how far their second half is from the first
DOMAIN = b"samebits step digest 1\n"
CONTENT_DOMAIN = b"samebits step digest of contents 1\n"
_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_LARGE = 1 << 20  # bytes of a tensor that is worth more than one thread


@device_function
def mix(index: Scalar, value: Scalar) -> Scalar:
    """64 bits from a place and what is there: the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    z = (np.uint64(index) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(value)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@device_function
def second(z: Scalar) -> Scalar:
    """The second word of an element or a group, from its first."""
    y = z * _FACTOR
    return y ^ (y >> np.uint64(32))


@device_function
def with_element(a: Scalar, b: Scalar, index: Scalar, x: Scalar) -> tuple[Scalar, Scalar]:
    """The two sums of a tensor with one more element in them."""
    z = mix(index, np.uint32(bits_of_float32(x)))
    return a + z, b + second(z)


@kernel
def k_digest(x: Floats, sums: Sums) -> None:
    """sums [2] of a flat fp32 tensor."""
    a = b = np.uint64(0)
    for i in range(x.size):
        a, b = with_element(a, b, i, x[i])
    sums[0], sums[1] = a, b


@kernel
def k_group_digest(x: Floats, sums: Sums) -> None:
    """sums [2] of a flat fp32 tensor in the tier prod. A group's encodings, times the powers 0 to 7 of an odd factor,
    are added up and mixed with the group's number; elements that it lacks at the tensor's end count as zeros."""
    a = b = np.uint64(0)
    group = 0
    for block in range(0, x.size, 2 * APART):
        for first in range(block, min(block + APART, x.size), GROUP // 2):
            value = np.uint64(0)
            for half in (APART, 0):
                for i in range(first + half + GROUP // 2 - 1, first + half - 1, -1):
                    bits = bits_of_float32(x[i]) if i < x.size else 0
                    value = value * _FACTOR + np.uint64(np.uint32(bits))
            z = mix(group, value)
            a += z
            b += second(z)
            group += 1
    sums[0], sums[1] = a, b


def step_digest(step: int, loss: np.float32, sums: Sums) -> bytes:
    """The digest after `step` steps; sums uint64 [parameters, 3, 2]: weights, m, v of each parameter in order."""
    return _digest(DOMAIN, step, loss, sums.astype("<u8").tobytes())


def content_hashes(tensors: Mapping[str, Floats], threads: int) -> Hashes:
    """BLAKE3 of the bytes of each tensor (C order, little-endian): [tensors, 32], in the order of their names."""
    hashes = np.empty((len(tensors), blake3.digest_size), np.uint8)
    for row, name in zip(hashes, sorted(tensors), strict=True):
        content = np.ascontiguousarray(tensors[name], "<f4").reshape(-1).view(np.uint8)
        hasher = blake3(content.data, max_threads=threads if content.nbytes >= _LARGE else 1)
        row[:] = np.frombuffer(hasher.digest(), np.uint8)
    return hashes


def content_digest(step: int, loss: np.float32, hashes: Hashes) -> bytes:
    """The digest after `step` steps in the tier debug; hashes: of all weights, m and v, from content_hashes."""
    return _digest(CONTENT_DOMAIN, step, loss, hashes.tobytes())


def _digest(domain: bytes, step: int, loss: np.float32, numbers: bytes) -> bytes:
    hasher = blake3(domain)
    hasher.update(step.to_bytes(8, "little"))
    hasher.update(np.float32(loss).astype("<f4").tobytes())
    hasher.update(numbers)
    return hasher.digest()
