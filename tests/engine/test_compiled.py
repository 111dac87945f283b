"""The machine code: no fused multiply-add, the same bits for a generic processor, never a stale copy."""

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
from llvmlite import binding

import engine
import engine.numerics
import engine.operations
from engine.numerics.microkernel import IS_X86
from engine.self_test import DIGEST, micro_digest
from tests.engine.training import digests, make_trainer

ROOT = Path(engine.__file__).resolve().parent.parent

# x86-64: vfmadd132ps, vfnmsub231sd, ...; AArch64: fmadd, fnmsub, fmla, fmls.
FUSED = re.compile(r"\b(vfn?m(?:add|sub)[0-9a-z]*|fn?m(?:add|sub)|fml[as])\b")


def run(script: str, cache: Path, *, folder: Path = ROOT, **environment: str) -> str:
    """Standard output of a fresh Python that imports the engine from `folder`."""
    variables = os.environ | {"SAMEBITS_CACHE": str(cache), "PYTHONPATH": str(folder)} | environment
    result = subprocess.run(
        [sys.executable, "-c", script], env=variables, cwd=cache, capture_output=True, text=True, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# --- no contraction ---------------------------------------------------------------------------------------


def compiled_functions() -> dict[str, Any]:
    """Every function of the engine that Numba compiles and Python calls, by name."""
    found = {}
    for package in (engine, engine.numerics, engine.operations):
        for module_info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(module_info.name)
            for name, value in vars(module).items():
                if isinstance(value, numba.core.registry.CPUDispatcher) and value.__module__ == module.__name__:
                    found[f"{module.__name__}.{name}"] = value
    return found


def fused_instructions(function: Any, signature: Any, **options: Any) -> set[str]:
    """Compiles anew, past every cache, for this machine's processor."""
    fresh = numba.njit(nogil=True, error_model="numpy", **options)(function.py_func)
    fresh.compile(signature)
    return set(FUSED.findall("".join(fresh.inspect_asm().values())))


@pytest.fixture(scope="module", name="kernels")
def _kernels() -> dict[str, Any]:
    """Functions that a training in both tiers, evaluation included, has called, with their signatures."""
    for tier in ("portable", "debug"):
        for function in ("gelu", "relu"):
            trainer = make_trainer({"activation": function}, tier=tier)
            digests(trainer, 1)
    called = {
        name: f for name, f in compiled_functions().items() if f.signatures and not f.targetoptions.get("forceinline")
    }
    assert len(called) >= 25
    return called


@numba.njit
def contractible(x: Any, y: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] += x[i] * y[i]


@pytest.mark.skipif(IS_X86 and not binding.get_host_cpu_features().get("fma"), reason="this processor cannot fuse")
def test_the_search_finds_a_fused_multiply_add() -> None:
    signature = (numba.float32[::1],) * 3
    assert fused_instructions(contractible, signature, fastmath={"contract"})
    assert not fused_instructions(contractible, signature)


FEW = ("engine.operations.layernorm.k_layernorm_fwd", "engine.optimizer.k_adamw", "engine.operations.loss.k_loss_fwd")


def test_some_kernels_hold_no_fused_multiply_add(kernels: dict[str, Any]) -> None:
    for name in FEW:
        assert not fused_instructions(kernels[name], kernels[name].signatures[0]), name


@pytest.mark.slow
def test_no_kernel_holds_a_fused_multiply_add(kernels: dict[str, Any]) -> None:
    found = {
        name: fused
        for name, function in kernels.items()
        for signature in function.signatures
        if (fused := fused_instructions(function, signature))
    }
    assert not found


# --- other processors -------------------------------------------------------------------------------------

MICRO = "from engine.self_test import micro_digest; print(micro_digest())"


def test_this_machine_has_the_digest_on_record() -> None:
    """A golden value: the bits of a micro training that runs every kernel of the portable tier."""
    assert micro_digest() == DIGEST
    assert micro_digest(threads=3) == DIGEST


@pytest.mark.slow
@pytest.mark.parametrize(
    "processor", ["generic", pytest.param("x86-64-v3", marks=pytest.mark.skipif(not IS_X86, reason="x86 only"))]
)
def test_another_processor_gives_the_same_digest(processor: str, tmp_path: Path) -> None:
    """`generic` has vectors of four and no AVX at all: other tiles, other vectorisation, the same bits."""
    if processor != "generic" and not binding.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor cannot run it")
    features = "" if processor == "generic" else "+avx2,+fma"
    assert run(MICRO, tmp_path, NUMBA_CPU_NAME=processor, NUMBA_CPU_FEATURES=features) == DIGEST


# --- the cache of compiled code ---------------------------------------------------------------------------

NORMALS = """
import numpy as np
from engine.numerics.random import normal_fill, _normal_kernel
out = np.zeros(4, np.float32)
normal_fill(out, 1, 2, 1.0)
print(out.tobytes().hex(), sum(_normal_kernel.stats.cache_hits.values()))
"""
CALLEE = "    return y if SMALLEST_NORMAL_64 <= x < np.inf else np.nan"


def test_an_edited_callee_in_another_module_is_seen(tmp_path: Path) -> None:
    """normal_fill stands in random.py and calls log64 of elementary.py. Numba's own cache would miss the edit."""
    folder, cache = tmp_path / "copy", tmp_path / "cache"
    cache.mkdir()
    shutil.copytree(ROOT / "engine", folder / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    module = folder / "engine" / "numerics" / "elementary.py"
    source = module.read_text(encoding="utf-8")
    assert source.count(CALLEE) == 1

    def normals() -> list[str]:
        return run(NORMALS, cache, folder=folder).split()

    first = normals()
    assert first[1] == "0"
    assert normals() == [first[0], "1"]  # the same from the cache
    module.write_text(source.replace(CALLEE, CALLEE.replace("return y", "return 4.0 * y")), encoding="utf-8")
    edited = normals()
    assert edited[1] == "0" and edited[0] != first[0]
    module.write_text(source, encoding="utf-8")
    assert normals() == [first[0], "1"]  # back to the first folder, whatever the file's time
