"""Trained fp32 numbers in seven eighths of their bytes, at the speed of memory.

Of a trained number's 32 bits only the exponent can be foretold: nearly all numbers of a tensor lie within 15 powers of
two. So sign and mantissa are kept as they are, and exponents as codes of 4 bits: 1 to 15 for the powers that are
common in this piece, 0 for an exponent that is written out in a list. The layout is in docs/format.md.

Importing this module imports the compiler, and in a new checkout compiles, so it is left to where numbers are really
split or joined.
"""

import struct
import threading

import numpy as np

from artifacts import float_kernels as kernels
from artifacts.errors import Corrupt
from artifacts.manifest import CHUNK_SIZE

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
    if count == 0:
        return None
    words = np.frombuffer(content[: 4 * count], "<u4")
    stride = max(1, count // _SAMPLE)
    base = kernels.survey(words, stride, int(_MOST_EQUAL * -(-count // stride)) + 8)
    if base < 0:
        return None
    half = -(-count // 2)
    scratch = _scratch(count)
    low, high, codes = scratch.low[:count], scratch.high[:count], scratch.codes[:half]
    rare = scratch.rare[: int(_MOST_EXCEPTIONS * count)]
    kernels.split(words[:half], base, 0, low[:half], high[:half], codes)
    kernels.split(words[half:], base, 4, low[half:], high[half:], codes)
    longs = codes[: half // 8 * 8].view("<u8")
    found = kernels.list_rare(codes, longs, 0x0F, words[:half], rare, 0)
    if found >= 0:
        found = kernels.list_rare(codes, longs, 0xF0, words[half:], rare, found)
    if found < 0:
        return None
    return [_BASE.pack(base), low.view(np.uint8).data, high.data, codes.data, rare[:found].data, content[4 * count :]]


def join_floats(payload: memoryview, target: memoryview, what: str) -> None:
    """The inverse of `split_floats`, into `target`, which the content has to fill. Corrupt, naming `what`, unless the
    payload has exactly the bytes that belong to it."""
    count = len(target) // 4
    half = -(-count // 2)
    fixed = 1 + 3 * count + half
    rest = len(target) - 4 * count
    if len(payload) < fixed + rest:
        raise Corrupt(f"{what}: {len(payload)} bytes are too few for {count} split numbers")
    low = np.frombuffer(payload, "<u2", count, 1)
    high = np.frombuffer(payload, np.uint8, count, 1 + 2 * count)
    codes = np.frombuffer(payload, np.uint8, half, 1 + 3 * count)
    longs = np.frombuffer(payload, "<u8", half // 8, 1 + 3 * count)
    rare = np.frombuffer(payload, np.uint8, len(payload) - fixed - rest, fixed)
    if count % 2 and codes[-1] >> 4:
        raise Corrupt(f"{what}: the code after the last number is not 0")
    words = np.frombuffer(target[: 4 * count], "<u4")
    before = (payload[0] - 1) % 256
    kernels.join(low[:half], high[:half], codes, 0, before, words[:half])
    kernels.join(low[half:], high[half:], codes, 4, before, words[half:])
    taken = kernels.fill_rare(codes, longs, 0x0F, words[:half], rare, 0)
    if taken >= 0:
        taken = kernels.fill_rare(codes, longs, 0xF0, words[half:], rare, taken)
    if taken != len(rare):
        raise Corrupt(f"{what}: as many exponents as codes are 0 should be written out, the length says {len(rare)}")
    target[4 * count :] = payload[len(payload) - rest :]


class _Scratch:
    """Room for the parts of `count` numbers."""

    def __init__(self, count: int) -> None:
        self.low = np.empty(count, "<u2")
        self.high = np.empty(count, np.uint8)
        self.codes = np.empty(-(-count // 2), np.uint8)
        self.rare = np.empty(int(_MOST_EXCEPTIONS * count), np.uint8)


_own = threading.local()


def _scratch(count: int) -> _Scratch:
    """This thread's room, made once for chunks of bundles: making pages takes longer than filling them."""
    if count > CHUNK_SIZE // 4:
        return _Scratch(count)
    found: _Scratch | None = getattr(_own, "scratch", None)
    if found is None:
        found = _own.scratch = _Scratch(CHUNK_SIZE // 4)
    return found
