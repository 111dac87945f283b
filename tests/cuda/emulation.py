"""Compiles a unit of kernels for the CPU, with tests/cuda/emulator.h in the place of CUDA, and launches them."""

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.cuda.sources import headers, source

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++")
CONTRACTING = ["-ffp-contract=fast", "-fexpensive-optimizations"]
CONTRACTING += ["-mfma"] if platform.machine() == "x86_64" else []
# PTX instructions, by what they compute.
INSTRUCTIONS = {
    r'asm\("cvt\.f32\.f16 .*?\);': "x = float_of_half(h);",
    r'asm\("cvt\.rn\.bf16x2\.f32 .*?\);': "word = bfloat_of_float(low) | (uint32)bfloat_of_float(high) << 16;",
    r'asm\("cvt\.rn\.f16x2\.f32 .*?\);': "word = half_of_float(low) | (uint32)half_of_float(high) << 16;",
    r'asm volatile\("cp\.async\.cg\..*?\);': "*to = *from;",
    r'asm volatile\("cp\.async\.wait_all.*?\);': ";",
    r"extern __shared__ (\w+) (\w+)\[\];": r"static \1 \2[1 << 14];",
    r'asm\("tanh\.approx\.f32 .*?\);': "t = tanhf(v);",
}


class Mask(ctypes.Structure):
    _fields_ = [("site", ctypes.c_uint32), ("threshold", ctypes.c_uint32), ("factor", ctypes.c_float)]


class Emulated:
    """The kernels of one unit. Arguments of a launch: arrays (their address), None (null), ctypes values.

    contracted: whether a product and a sum are rounded once, as the card's compiler is free to do in the tier prod.
    """

    def __init__(self, unit: str, macros: Mapping[str, int], folder: Path, contracted: bool = False) -> None:
        texts = {**headers(), f"{unit}.cu": source(unit)}
        for name, text in texts.items():
            for pattern, meaning in INSTRUCTIONS.items():
                text = re.sub(pattern, meaning, text)
            (folder / name).write_text(text, encoding="utf-8")
        kernels = re.findall(r"^(?:extern \"C\" __global__ .*\s)?(k_\w+)\(", source(unit), re.M)
        kernels += re.findall(r"__global__[^(]*\b(k_\w+)\(", source(unit))
        entries = [
            f'extern "C" void launch_{k}(void **v) {{ emulated::launch({k}, v); }}' for k in sorted(set(kernels))
        ]
        place = [
            'extern "C" void place(const unsigned *n) {',
            "gridDim = {n[0], n[1], n[2]}; blockDim = {n[3], n[4], n[5]}; }",
        ]
        lines = ['#include "emulator.h"', f'#include "{unit}.cu"', *place, *entries]
        (folder / "all.cpp").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "emulator.h").write_text((HERE / "emulator.h").read_text(encoding="utf-8"), encoding="utf-8")
        library = folder / "all.so"
        flags = [f"-D{name}={value}" for name, value in macros.items()]
        options = ["-std=c++20", "-O1", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
        options += CONTRACTING if contracted else ["-ffp-contract=off"]
        options.append("-U_FORTIFY_SOURCE")  # which takes a switch of coroutines for a broken stack
        subprocess.run(
            [str(COMPILER), *options, *flags, "-o", str(library), str(folder / "all.cpp")], check=True, cwd=folder
        )
        self._library = ctypes.CDLL(str(library))

    def __call__(self, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], *values: Any) -> None:
        sizes = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        self._library.place((ctypes.c_uint * 6)(*sizes))
        held = [self._value(value) for value in values]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        self._library[f"launch_{kernel}"](pointers)

    def _value(self, value: Any) -> Any:
        if value is None:
            return ctypes.c_void_p(0)
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous
            return ctypes.c_void_p(value.ctypes.data)
        if isinstance(value, float):
            return ctypes.c_float(value)
        return ctypes.c_int(value) if isinstance(value, int) else value
