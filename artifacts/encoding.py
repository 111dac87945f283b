"""How one object lies in its file: a header of 16 bytes, then the payload, then the end of the
file.

    offset  size  content
    0       4     magic "SBOB"
    4       1     version, 1
    5       1     encoding: 0 raw, 1 zstd, 2 split fp32 numbers
    6       1     shuffle width: 1 (none), 2, 4 or 8
    7       1     reserved, 0
    8       8     length of the content in bytes, unsigned, little-endian

An encoding is only a way to store: the object's name is the hash of its content.
"""

import struct
from collections.abc import Callable

import numpy as np
import zstandard

from artifacts.errors import Corrupt, UnknownVersion

MAX_CONTENT = 64 * 2**20
"""Largest content of one object, in bytes; a reader allocates no more for one object."""

HEADER_SIZE = 16
DEFAULT_LEVEL = 1

_HEADER = struct.Struct("<4sBBBBQ")
_MAGIC = b"SBOB"
_VERSION = 1
_RAW = 0
_ZSTD = 1
_SPLIT = 2
_WIDTHS = (1, 2, 4, 8)
_ZSTD_FRAME = b"\x28\xb5\x2f\xfd"
# Below this the few bytes saved are not worth waking the compiler for.
_LEAST_TO_SPLIT = 64 * 2**10


def encode(content: memoryview, width: int, level: int) -> list[bytes | memoryview]:
    """The parts of the object file of `content`, to be written one after the other, before this thread encodes
    again.

    `width` is the size in bytes of the numbers that `content` holds, 1 where it is not made of
    numbers: bytes of equal significance are laid side by side before compression. What looks like trained fp32
    numbers is split instead (see floats.py): not quite as small, but several times as fast. Content that
    shrinks by less than 1/32 is kept raw, because it is then read back sooner.
    """
    if width == 4 and len(content) >= _LEAST_TO_SPLIT:
        from artifacts.floats import split_floats

        parts = split_floats(content)
        if parts is not None:
            return [_HEADER.pack(_MAGIC, _VERSION, _SPLIT, width, 0, len(content)), *parts]
    shuffled = content if width == 1 else _shuffle(content, width)
    compressed = _compressor(width, level).compress(shuffled)
    if len(compressed) > len(content) - len(content) // 32 - 1:
        return [_HEADER.pack(_MAGIC, _VERSION, _RAW, 1, 0, len(content)), content]
    return [_HEADER.pack(_MAGIC, _VERSION, _ZSTD, width, 0, len(content)), compressed]


def new_memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


def decode(
    file: bytes | memoryview, limit: int, what: str, memory: Callable[[int], memoryview] = new_memory
) -> memoryview:
    """The content of an object file, at most `limit` bytes, in `memory` where it does not lie ready in the file.
    Raises Corrupt, naming `what`.

    The caller still has to compare the content's hash with the object's name.
    """
    encoding, width, length, payload = _open(file, limit, what)
    if encoding == _RAW:
        return payload
    if width == 1:
        return _decompress(payload, length, what)
    target = memory(length)
    _unpack(encoding, width, payload, target, what)
    return target


def decode_into(file: bytes | memoryview, target: memoryview, what: str) -> None:
    """`decode` into `target`, which the content has to fill. After an error its bytes are
    undefined."""
    encoding, width, length, payload = _open(file, len(target), what)
    if length != len(target):
        raise Corrupt(f"{what}: expected {len(target)} bytes, found {length}")
    _unpack(encoding, width, payload, target, what)


def _unpack(encoding: int, width: int, payload: memoryview, target: memoryview, what: str) -> None:
    """Writes the content to `target`, which has its length."""
    if encoding == _SPLIT:
        from artifacts.floats import join_floats

        join_floats(payload, target, what)
        return
    stored = payload if encoding == _RAW else _decompress(payload, len(target), what)
    if width == 1:
        target[:] = stored
    else:
        _unshuffle(stored, width, target)


def _open(file: bytes | memoryview, limit: int, what: str) -> tuple[int, int, int, memoryview]:
    """Encoding, width, length of the content (at most `limit` bytes), and payload."""
    if len(file) < HEADER_SIZE:
        raise Corrupt(f"{what}: {len(file)} bytes, shorter than an object header")
    magic, version, encoding, width, reserved, length = _HEADER.unpack_from(file)
    if magic != _MAGIC:
        raise Corrupt(f"{what}: not an object file (expected {_MAGIC!r}, found {magic!r})")
    if version != _VERSION:
        raise UnknownVersion(f"{what}: object version {version}, this program reads {_VERSION}")
    if encoding not in (_RAW, _ZSTD, _SPLIT) or width not in _WIDTHS or reserved != 0:
        raise Corrupt(f"{what}: unknown encoding {encoding}, width {width}, reserved {reserved}")
    if length > limit:
        raise Corrupt(f"{what}: declares {length} bytes, at most {limit} are allowed here")
    payload = memoryview(file)[HEADER_SIZE:]
    if encoding == _RAW and (width != 1 or len(payload) != length):
        raise Corrupt(f"{what}: declares {length} raw bytes, holds {len(payload)}")
    if encoding == _SPLIT and width != 4:
        raise Corrupt(f"{what}: split numbers of {width} bytes, expected 4")
    return encoding, width, length, payload


def _compressor(width: int, level: int) -> zstandard.ZstdCompressor:
    """One per call: a compressor must not be shared by threads, and making one costs nothing."""
    # Numbers hardly repeat strings of bytes: what shrinks is the entropy of the exponents. With so
    # small a table and so long a shortest match the search finds runs of one value and little else,
    # which on trained weights takes half the time and leaves 1 % less than the level's own choice.
    search = {"hash_log": 6, "min_match": 7} if width > 1 else {}
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        # BLAKE3 already covers the content, so the frame carries no checksum of its own.
        write_checksum=False,
        write_content_size=True,
        **search,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _decompress(payload: memoryview, length: int, what: str) -> memoryview:
    # The library allocates what the frame declares, so the frame has to agree with the header
    # first; skippable frames, which declare nothing, are refused by their magic.
    if payload[:4] != _ZSTD_FRAME:
        raise Corrupt(f"{what}: no zstd frame after the header")
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_CONTENT)
    try:
        declared = zstandard.frame_content_size(payload)
        if declared != length:
            raise Corrupt(f"{what}: header declares {length} bytes, zstd frame {declared}")
        content = decompressor.decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{what}: damaged zstd frame: {error}") from error
    if len(content) != length:
        raise Corrupt(f"{what}: expected {length} bytes, zstd frame holds {len(content)}")
    return memoryview(content)


def _shuffle(content: memoryview, width: int) -> memoryview:
    """First the lowest byte of every number, then the next; a last incomplete number follows as it
    is."""
    count = len(content) // width
    source = np.frombuffer(content, np.uint8)
    target = np.empty(len(content), np.uint8)
    numbers = source[: count * width].reshape(count, width)
    planes = target[: count * width].reshape(width, count)
    # One strided copy per plane: four times as fast as one transposed copy.
    for plane in range(width):
        planes[plane] = numbers[:, plane]
    target[count * width :] = source[count * width :]
    return target.data


def _unshuffle(content: memoryview, width: int, result: memoryview) -> None:
    """The inverse of `_shuffle`, written to `result`."""
    count = len(content) // width
    source = np.frombuffer(content, np.uint8)
    target = np.frombuffer(result, np.uint8)
    numbers = target[: count * width].reshape(count, width)
    planes = source[: count * width].reshape(width, count)
    for plane in range(width):
        numbers[:, plane] = planes[plane]
    target[count * width :] = source[count * width :]
