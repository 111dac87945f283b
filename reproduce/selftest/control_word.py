"""Sets the processor's control word for floating point, as start-up code of some libraries does."""

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_DEFAULT = 0x1F80
_FLUSH_TO_ZERO = 0x8000


@intrinsic  # type: ignore[untyped-decorator]
def _load_control_word(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        slot = builder.alloca(ir.IntType(32))
        builder.store(arguments[0], slot)
        pointer = builder.bitcast(slot, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
        load = builder.module.declare_intrinsic("llvm.x86.sse.ldmxcsr", (), kind)
        builder.call(load, [pointer])
        return context.get_dummy_value()

    return types.void(types.uint32), generate


@numba.njit("void(uint32)")  # type: ignore[untyped-decorator]
def _set_control_word(word: int) -> None:
    _load_control_word(word)


def flush_to_zero() -> None:
    """For this thread (x86 only): results below 2^-126 become zero."""
    _set_control_word(_DEFAULT | _FLUSH_TO_ZERO)
