"""Trained fp32 numbers in seven eighths of their bytes, at the speed of memory.

Of a trained number's 32 bits only the exponent can be foretold: nearly all numbers of a tensor lie within 15 powers of
two. So sign and mantissa are kept as they are, and exponents as codes of 4 bits: 1 to 15 for the powers that are
common in this piece, 0 for an exponent that is written out in a list. The layout is in docs/format.md.

Kernels are compiled on first use, and importing this module imports the compiler, so both are left to where numbers
are really split or joined.
"""

import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from artifacts.errors import Corrupt
from artifacts.manifest import CHUNK_SIZE

F = TypeVar("F", bound=Callable[..., Any])
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]

_CODES = 15
_SAMPLE = 4096
# More exceptions than this part of the numbers, or this much sameness in what should be random, and a
# general compressor does better.
_MOST_EXCEPTIONS = 1 / 16
_MOST_EQUAL = 1 / 16
_BASE = struct.Struct("<B")


def split_floats(content: memoryview) -> list[bytes | memoryview] | None:
    """The parts of the payload of `content`, fp32 numbers in little-endian order, good until this thread splits again;
    None where they are not such as this is made for: the payload would not be clearly shorter, or a compressor is
    likely to make it shorter still."""
    count = len(content) // 4
    words = np.frombuffer(content[: 4 * count], "<u4")
    stride = max(1, count // _SAMPLE)
    sample = words[::stride]
    if count == 0 or not _looks_random(sample, words[1::stride]):
        return None
    base = _common_exponents(sample)
    scratch = _scratch(count)
    low, high, exponents = scratch.low[:count], scratch.high[:count], scratch.exponents[:count]
    _split(words, low, high, exponents)
    codes = np.subtract(exponents, np.uint8(base), out=scratch.codes[:count])
    is_rare = np.greater_equal(codes, _CODES, out=scratch.is_rare[:count])
    if np.count_nonzero(is_rare) > _MOST_EXCEPTIONS * count:
        return None
    rare = exponents[is_rare]
    codes += np.uint8(1)
    codes[is_rare] = 0
    half = -(-count // 2)
    second = codes[half:]
    second <<= np.uint8(4)
    codes[: count - half] |= second
    return [_BASE.pack(base), low.view(np.uint8).data, high.data, codes[:half].data, rare.data, content[4 * count :]]


def join_floats(payload: memoryview, target: memoryview, what: str) -> None:
    """The inverse of `split_floats`, into `target`, which the content has to fill. Corrupt, naming `what`, unless the
    payload has exactly the bytes that belong to it."""
    count = len(target) // 4
    half = -(-count // 2)
    fixed = 1 + 2 * count + count + half
    rest = len(target) - 4 * count
    if len(payload) < fixed + rest:
        raise Corrupt(f"{what}: {len(payload)} bytes are too few for {count} split numbers")
    low = np.frombuffer(payload, "<u2", count, 1)
    high = np.frombuffer(payload, np.uint8, count, 1 + 2 * count)
    codes = np.frombuffer(payload, np.uint8, half, 1 + 3 * count)
    scratch = _scratch(count)
    exponents = scratch.exponents[: 2 * half]
    np.bitwise_and(codes, np.uint8(15), out=exponents[:half])
    np.right_shift(codes, np.uint8(4), out=exponents[half:])
    if count % 2 and exponents[-1]:
        raise Corrupt(f"{what}: the code after the last number is not 0")
    exponents = exponents[:count]
    places = np.flatnonzero(np.equal(exponents, 0, out=scratch.is_rare[:count]))
    if len(payload) != fixed + len(places) + rest:
        raise Corrupt(f"{what}: {len(places)} exponents should be written out, but the length says otherwise")
    exponents += np.uint8((payload[0] - 1) % 256)
    exponents[places] = np.frombuffer(payload, np.uint8, len(places), fixed)
    _join(low, high, exponents, np.frombuffer(target[: 4 * count], "<u4"))
    target[4 * count :] = payload[len(payload) - rest :]


class _Scratch:
    """Room for what comes in between for `count` numbers."""

    def __init__(self, count: int) -> None:
        self.low = np.empty(count, "<u2")
        self.high = np.empty(count, np.uint8)
        self.exponents = np.empty(count + 1, np.uint8)
        self.codes = np.empty(count, np.uint8)
        self.is_rare = np.empty(count, np.bool_)


_own = threading.local()


def _scratch(count: int) -> _Scratch:
    """This thread's room, made once for chunks of bundles: making pages takes longer than filling them."""
    if count > CHUNK_SIZE // 4:
        return _Scratch(count)
    found: _Scratch | None = getattr(_own, "scratch", None)
    if found is None:
        found = _own.scratch = _Scratch(CHUNK_SIZE // 4)
    return found


def _looks_random(sample: Words, following: Words) -> bool:
    """Whether the mantissas vary as those of measured numbers do, and also from one number to the next; not so for
    zeros, whole numbers and repetitions."""
    most = _MOST_EQUAL * len(sample) + 8
    if np.count_nonzero(sample[: len(following)] == following) > most:
        return False
    parts = (sample & 0xFF, (sample >> 8) & 0xFF, (sample >> 16) & 0x7F)
    return all(np.bincount(part.astype(np.intp)).max() <= most for part in parts)


def _common_exponents(sample: Words) -> int:
    """The first of the 15 neighbouring exponents that are most common, as the numbers of `sample` have them."""
    counts = np.bincount(((sample >> 23) & 0xFF).astype(np.intp), minlength=256)
    sums = np.concatenate([[0], np.cumsum(counts)])
    return int(np.argmax(sums[_CODES:] - sums[:-_CODES]))


def _compiled(function: F) -> F:
    try:
        compiled: F = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to keep compiled code in
        compiled = numba.njit(nogil=True)(function)
    return compiled


@_compiled
def _split(words: Words, low: NDArray[np.uint16], high: Bytes, exponents: Bytes) -> None:
    for i in range(len(words)):
        word = words[i]
        low[i] = word & 0xFFFF
        high[i] = ((word >> 16) & 0x7F) | ((word >> 24) & 0x80)
        exponents[i] = (word >> 23) & 0xFF


@_compiled
def _join(low: NDArray[np.uint16], high: Bytes, exponents: Bytes, words: Words) -> None:
    for i in range(len(words)):
        top = np.uint32(high[i])
        words[i] = (
            np.uint32(low[i]) | ((top & 0x7F) << 16) | (np.uint32(exponents[i]) << 23) | ((top & 0x80) << 24)
        )
