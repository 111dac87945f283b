"""The loops of floats.py, compiled. They hold no lock of the interpreter, and each runs at the speed of memory.

Arguments are typed ahead, so that there is one machine code of each whatever the alignment of a payload in its file.
Sizes are the caller's to check.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
Bytes = NDArray[np.uint8]
Shorts = NDArray[np.uint16]
Words = NDArray[np.uint32]
Longs = NDArray[np.uint64]

CODES = 15

_u32 = np.uint32
_ONE_EACH = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)


def _array(number: Any, writable: bool = False) -> Any:
    return types.Array(number, 1, "C", readonly=not writable, aligned=False)


def _compiled(*arguments: Any, result: Any = types.void) -> Callable[[F], F]:
    def compile_(function: F) -> F:
        signature = result(*arguments)
        try:
            compiled: F = numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # no folder to keep compiled code in
            compiled = numba.njit(signature, nogil=True)(function)
        return compiled

    return compile_


@_compiled(_array(types.uint32), types.int64, types.int64, result=types.int64)
def survey(words: Words, stride: int, most: int) -> int:
    """The first of the CODES neighbouring exponents that are most common among every `stride`-th number; -1 unless the
    mantissas vary as those of measured numbers do, and also from one number to the next: not so for zeros, whole
    numbers and repetitions. No value of a mantissa's byte may come more often than `most` times."""
    counts = np.zeros((4, 256), np.int64)
    same = 0
    for i in range(0, len(words), stride):
        word = words[i]
        counts[0, word & _u32(0xFF)] += 1
        counts[1, (word >> _u32(8)) & _u32(0xFF)] += 1
        counts[2, (word >> _u32(16)) & _u32(0x7F)] += 1
        counts[3, (word >> _u32(23)) & _u32(0xFF)] += 1
        if i + 1 < len(words) and words[i + 1] == word:
            same += 1
    if max(same, counts[:3].max()) > most:
        return -1
    best = 0
    covered = most_covered = counts[3, :CODES].sum()
    for base in range(1, 256 - CODES + 1):
        covered += counts[3, base + CODES - 1] - counts[3, base - 1]
        if covered > most_covered:
            best, most_covered = base, covered
    return best


@_compiled(
    _array(types.uint32),
    types.uint32,
    types.uint32,
    _array(types.uint16, writable=True),
    _array(types.uint8, writable=True),
    _array(types.uint8, writable=True),
)
def split(words: Words, base: int, shift: int, low: Shorts, high: Bytes, codes: Bytes) -> None:
    """The parts of numbers whose codes are `shift` bits up in `codes`: what lies below stays, what lies above becomes
    0."""
    below = (_u32(1) << shift) - _u32(1)
    for i in range(len(words)):
        word = words[i]
        low[i] = word & _u32(0xFFFF)
        high[i] = ((word >> _u32(16)) & _u32(0x7F)) | ((word >> _u32(24)) & _u32(0x80))
        above = ((word >> _u32(23)) - base) & _u32(0xFF)
        code = above + _u32(1) if above < _u32(CODES) else _u32(0)
        codes[i] = (_u32(codes[i]) & below) | (code << shift)


@_compiled(
    _array(types.uint16),
    _array(types.uint8),
    _array(types.uint8),
    types.uint32,
    types.uint32,
    _array(types.uint32, writable=True),
)
def join(low: Shorts, high: Bytes, codes: Bytes, shift: int, before: int, words: Words) -> None:
    """The numbers whose codes are `shift` bits up in `codes`; `before` is the exponent below that of code 1. Those of
    code 0 are wrong until `fill_rare`."""
    for i in range(len(words)):
        top = _u32(high[i])
        exponent = (((_u32(codes[i]) >> shift) & _u32(15)) + before) & _u32(0xFF)
        words[i] = (
            _u32(low[i]) | ((top & _u32(0x7F)) << _u32(16)) | (exponent << _u32(23)) | ((top & _u32(0x80)) << _u32(24))
        )


# Codes of 0 are looked for eight at a time, which is several times as fast: taking 1 from each byte's code borrows
# into the byte's top bit where the code is 0, and for the first time in a block only there.


@_compiled(
    _array(types.uint8),
    _array(types.uint64),
    types.uint8,
    _array(types.uint32),
    _array(types.uint8, writable=True),
    types.int64,
    result=types.int64,
)
def list_rare(codes: Bytes, longs: Longs, mask: int, words: Words, rare: Bytes, found: int) -> int:
    """Writes the exponents of the numbers whose code is 0 to `rare` from place `found` on and returns the place after
    them, or -1 if there is no room. Their codes are those bits of `codes` that `mask` has; `longs` are the codes again,
    eight by eight as far as that goes."""
    masks = _ONE_EACH * np.uint64(mask)
    ones = _ONE_EACH * np.uint64(mask & -mask)
    for block in range(len(longs)):
        eight = longs[block] & masks
        if (eight - ones) & ~eight & _TOPS:
            for i in range(8 * block, min(8 * block + 8, len(words))):
                if codes[i] & mask == 0:
                    if found == len(rare):
                        return -1
                    rare[found] = (words[i] >> _u32(23)) & _u32(0xFF)
                    found += 1
    for i in range(8 * len(longs), len(words)):
        if codes[i] & mask == 0:
            if found == len(rare):
                return -1
            rare[found] = (words[i] >> _u32(23)) & _u32(0xFF)
            found += 1
    return found


@_compiled(
    _array(types.uint8),
    _array(types.uint64),
    types.uint8,
    _array(types.uint32, writable=True),
    _array(types.uint8),
    types.int64,
    result=types.int64,
)
def fill_rare(codes: Bytes, longs: Longs, mask: int, words: Words, rare: Bytes, taken: int) -> int:
    """The inverse of `list_rare`: returns the place after the last exponent taken, or -1 if there are too few."""
    masks = _ONE_EACH * np.uint64(mask)
    ones = _ONE_EACH * np.uint64(mask & -mask)
    for block in range(len(longs)):
        eight = longs[block] & masks
        if (eight - ones) & ~eight & _TOPS:
            for i in range(8 * block, min(8 * block + 8, len(words))):
                if codes[i] & mask == 0:
                    if taken == len(rare):
                        return -1
                    words[i] = (words[i] & _u32(0x807FFFFF)) | (_u32(rare[taken]) << _u32(23))
                    taken += 1
    for i in range(8 * len(longs), len(words)):
        if codes[i] & mask == 0:
            if taken == len(rare):
                return -1
            words[i] = (words[i] & _u32(0x807FFFFF)) | (_u32(rare[taken]) << _u32(23))
            taken += 1
    return taken
