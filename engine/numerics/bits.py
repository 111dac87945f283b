"""Bit casts between floats and integers, for use inside kernels."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def float64_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float64 whose IEEE-754 encoding is the given int64."""
    if bits != types.int64:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of_float64(typing_context: Any, value: Any) -> Any:
    """The IEEE-754 encoding of a float64 as int64."""
    if value != types.float64:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of_float32(typing_context: Any, value: Any) -> Any:
    """The IEEE-754 encoding of a float32 as int32."""
    if value != types.float32:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float32_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 whose IEEE-754 encoding is the given int32."""
    if bits != types.int32:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate
