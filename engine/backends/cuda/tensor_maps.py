"""Descriptions of int8 planes for Hopper's bulk copy engine, encoded by the driver."""

import ctypes
from functools import cache

from engine.backends.cuda.errors import DeviceLost

BOX_DEPTH = 128  # bytes: the width of the swizzle
BOX_ROWS = 128
UINT8, NO_INTERLEAVE, SWIZZLE_128, L2_256, ZEROS = 0, 0, 3, 3, 0
SIZE, ALIGNMENT = 128, 64


@cache
def tensor_map(address: int, rows: int, padded: int, shards: int, stride: int) -> bytes:
    """The map of planes int8 [shards, 2, rows, padded], `stride` bytes from one shard to the next."""
    raw = ctypes.create_string_buffer(SIZE + ALIGNMENT)
    place = (ctypes.addressof(raw) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        UINT8,
        4,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 4)(padded, rows, 2, shards),
        (ctypes.c_uint64 * 3)(padded, rows * padded, stride or 2 * rows * padded),
        (ctypes.c_uint32 * 4)(BOX_DEPTH, BOX_ROWS, 2, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        NO_INTERLEAVE,
        SWIZZLE_128,
        L2_256,
        ZEROS,
    )
    if code:
        raise DeviceLost(f"the CUDA driver refused a tensor map with error {code}: rows {rows}, depth {padded}")
    return ctypes.string_at(place, SIZE)
