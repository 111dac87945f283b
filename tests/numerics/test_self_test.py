"""The float self-test notices each way in which a library can spoil a thread's arithmetic."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.numerics.self_test import check_float_environment

FLUSH_TO_ZERO = 0x8000
DENORMALS_ARE_ZERO = 0x0040
ROUND_DOWN, ROUND_UP, ROUND_TO_ZERO = 0x2000, 0x4000, 0x6000

# Sets bits of the x86 control word of the calling thread, as compilers' start-up code does.
PROGRAM = """
import json
import sys
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from engine.errors import UnsoundMachine
from engine.numerics.self_test import check_float_environment


@intrinsic
def load_control_word(typing_context, word):
    def generate(context, builder, signature, arguments):
        slot = builder.alloca(ir.IntType(32))
        builder.store(arguments[0], slot)
        pointer = builder.bitcast(slot, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
        load = builder.module.declare_intrinsic("llvm.x86.sse.ldmxcsr", (), kind)
        builder.call(load, [pointer])
        return context.get_dummy_value()

    return types.void(types.uint32), generate


@numba.njit("void(uint32)")
def set_control_word(word):
    load_control_word(word)


messages = {}
for bits in map(int, sys.argv[1:]):
    set_control_word(0x1F80 | bits)
    try:
        check_float_environment()
    except UnsoundMachine as error:
        messages[bits] = error
    set_control_word(0x1F80)
print(json.dumps({bits: str(error) for bits, error in messages.items()}))
"""


SETTINGS = {
    FLUSH_TO_ZERO: "no flush-to-zero",
    DENORMALS_ARE_ZERO: "no denormals-are-zero",
    FLUSH_TO_ZERO | DENORMALS_ARE_ZERO: "square root of a subnormal",
    ROUND_UP: "1 + 2^-25 rounds",
    ROUND_DOWN: "1 + 3 * 2^-25 rounds",
    ROUND_TO_ZERO: "-1 - 3 * 2^-25 rounds",
}


def test_this_machine_is_sound() -> None:
    check_float_environment()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="sets the x86 control word")
def test_a_changed_control_word_is_noticed_and_an_unchanged_one_is_not() -> None:
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, "0", *map(str, SETTINGS)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        check=True,
        encoding="utf-8",
    ).stdout
    messages = {int(bits): message for bits, message in json.loads(output).items()}
    assert set(messages) == set(SETTINGS)
    for bits, part in SETTINGS.items():
        assert part in messages[bits]
        assert "expected bits" in messages[bits]
