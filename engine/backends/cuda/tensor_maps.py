"""Descriptions of tensors for Hopper's bulk copy engine, encoded by the driver."""

import ctypes
from collections.abc import Sequence
from functools import cache

from engine.backends.cuda.errors import DeviceLost

BOX_DEPTH = 128  # bytes: the width of the widest swizzle
BOX_ROWS = 128
# CUtensorMapDataType, CUtensorMapSwizzle by the bytes of a box's row, and the rest of what the driver wants to know
UINT8, HALVES = 0, {"float16": 6, "bfloat16": 9}
SWIZZLES = {32: 1, 64: 2, 128: 3}
NO_INTERLEAVE, L2_256, ZEROS = 0, 3, 0
SIZE, ALIGNMENT = 128, 64
# Parameters start at 0x210 of their bank on this architecture, and tensor maps must lie at a multiple of 64.
BEFORE_MAPS = "48x"


@cache
def tensor_map(address: int, rows: int, padded: int, shards: int, stride: int) -> bytes:
    """The map of planes int8 [shards, 2, rows, padded], `stride` bytes from one shard to the next."""
    strides = (padded, rows * padded, stride or 2 * rows * padded)
    return _encoded(UINT8, address, (padded, rows, 2, shards), strides, (BOX_DEPTH, BOX_ROWS, 2, 1), BOX_DEPTH)


@cache
def heads_map(address: int, dtype: str, shape: tuple[int, int, int, int], box: tuple[int, int]) -> bytes:
    """The map of a tensor of 16-bit floats [rows, tokens, heads, width] = `shape`, in boxes of (tokens, elements) of
    one head; what a box has beyond the tensor is zeros."""
    rows, tokens, heads, width = shape
    line = 2 * heads * width
    sizes, strides = (width, tokens, heads, rows), (line, 2 * width, tokens * line)
    return _encoded(HALVES[dtype], address, sizes, strides, (box[1], box[0], 1, 1), 2 * box[1])


@cache
def matrix_map(address: int, dtype: str, shape: tuple[int, int, int], stride: int, box: tuple[int, int]) -> bytes:
    """The map of matrices of 16-bit floats [matrices, rows, columns] = `shape`, one right after another, lines of
    `stride` elements, in boxes of (rows, columns) of one matrix; what a box has beyond its matrix is zeros.

    Its coordinates are column, row, 0, matrix."""
    matrices, rows, columns = shape
    sizes, strides = (columns, rows, 1, matrices), (2 * stride, 2 * rows * stride, 2 * rows * stride)
    return _encoded(HALVES[dtype], address, sizes, strides, (box[1], box[0], 1, 1), 2 * box[1])


def _encoded(
    dtype: int, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], depth: int
) -> bytes:
    """sizes and box in elements, innermost first; strides in bytes, without the innermost; depth: bytes of a row."""
    raw = ctypes.create_string_buffer(SIZE + ALIGNMENT)
    place = (ctypes.addressof(raw) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        dtype,
        4,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 4)(*sizes),
        (ctypes.c_uint64 * 3)(*strides),
        (ctypes.c_uint32 * 4)(*box),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        NO_INTERLEAVE,
        SWIZZLES[depth],
        L2_256,
        ZEROS,
    )
    if code:
        raise DeviceLost(f"the CUDA driver refused a tensor map with error {code}: sizes {tuple(sizes)}")
    return ctypes.string_at(place, SIZE)
