"""The machine code: no fused multiply-add, the same bits for a generic processor, never a stale copy."""

import ast
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import binding

import engine
import engine.numerics
import engine.operations
from engine.numerics.kernel_cache import ENGINE_FOLDER, FOLDER, NOT_COMPILED, KernelCache, compiled_sources
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
from engine.numerics.kernel_cache import nothing_compiled
from engine.numerics.random import normal_fill, _normal_kernel
empty = nothing_compiled()
out = np.zeros(4, np.float32)
normal_fill(out, 1, 2, 1.0)
print(out.tobytes().hex(), sum(_normal_kernel.stats.cache_hits.values()), empty)
"""
CALLEE = "    return y if SMALLEST_NORMAL_64 <= x < np.inf else np.nan"
MISSES = """
import sys, numba
print(sum(sum(value.stats.cache_misses.values()) for name, module in list(sys.modules.items())
          if name.startswith("engine.") for value in vars(module).values()
          if isinstance(value, numba.core.registry.CPUDispatcher) and value.__module__ == name))
"""


def copy_of_engine(folder: Path) -> Path:
    shutil.copytree(ROOT / "engine", folder / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(name="cache")
def _cache(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_an_edited_callee_in_another_module_is_seen(tmp_path: Path, cache: Path) -> None:
    """normal_fill stands in random.py and calls log64 of elementary.py. Numba's own cache would miss the edit."""
    folder = copy_of_engine(tmp_path / "copy")
    module = folder / "engine" / "numerics" / "elementary.py"
    source = module.read_text(encoding="utf-8")
    assert source.count(CALLEE) == 1

    def normals() -> list[str]:
        return run(NORMALS, cache, folder=folder).split()

    numbers, *found = normals()
    assert found == ["0", "True"]
    assert normals() == [numbers, "1", "False"]  # the same from the cache
    module.write_text(source.replace(CALLEE, CALLEE.replace("return y", "return 4.0 * y")), encoding="utf-8")
    edited, *found = normals()
    assert found == ["0", "True"] and edited != numbers
    module.write_text(source, encoding="utf-8")
    assert normals() == [numbers, "1", "False"]  # back to the first folder, whatever the file's time


@pytest.mark.skipif(FOLDER is None, reason="no folder for compiled kernels")
def test_a_copy_elsewhere_compiles_nothing(tmp_path: Path) -> None:
    """All kernels of the portable tier, compiled by this process or before it, are taken over by a copy."""
    micro_digest()
    assert FOLDER is not None
    folder = copy_of_engine(tmp_path / "ein anderer Ort, größer")
    assert run(MICRO + MISSES, FOLDER.parent.parent, folder=folder).split() == [DIGEST, "0"]


def test_processes_that_compile_at_once_have_the_same_code(cache: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = [future.result().split()[0] for future in [pool.submit(run, NORMALS, cache) for _ in range(3)]]
    assert len(set(found)) == 1
    assert run(NORMALS, cache).split() == [found[0], "1", "False"]
    assert [path.suffix for path in cache.rglob("*.*")] == [".kernel"]  # nothing half written is left


def test_without_a_folder_that_can_be_written_nothing_is_kept(cache: Path) -> None:
    script = """
import numpy as np
from engine.digest import k_digest
from engine.numerics.kernel_cache import FOLDER, nothing_compiled
k_digest(np.ones(2, np.float32), np.zeros(2, np.uint64))
print(FOLDER, nothing_compiled(), k_digest.stats.cache_path)
"""
    (cache / "file").touch()
    assert run(script, cache, SAMEBITS_CACHE=str(cache / "file")) == "None True None"
    assert [path.name for path in cache.iterdir()] == ["file"]


def doubled(x: Any) -> None:
    for i in range(x.size):
        x[i] += x[i]


def doubler(folder: Path) -> Any:
    """`doubled` as another process would compile it or take it from the folder."""
    dispatcher = numba.njit(doubled)
    dispatcher._cache = KernelCache(folder, "doubled")
    return dispatcher


def double_two(dispatcher: Any, type_: Any = np.float32) -> int:
    """Doubles a 2 and returns how often the folder had the code."""
    x = np.full(3, 2, type_)
    dispatcher(x)
    assert x.tolist() == [4, 4, 4]
    return sum(dispatcher.stats.cache_hits.values())


def test_each_kind_of_argument_has_its_own_code(tmp_path: Path) -> None:
    """Two that know nothing of each other, as in two processes, then a third that takes both from disk."""
    first, second, third = (doubler(tmp_path) for _ in range(3))
    assert double_two(first, np.float32) == double_two(second, np.int64) == 0
    assert double_two(third, np.float32) == 1
    assert double_two(third, np.int64) == 2
    assert len(list(tmp_path.iterdir())) == 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "less than a hash": lambda content: content[:20],
    "cut short": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
    "a flipped bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "a flipped bit of the hash": lambda content: bytes([content[0] ^ 1]) + content[1:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again(tmp_path: Path, damage: str) -> None:
    assert double_two(doubler(tmp_path)) == 0
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert double_two(doubler(tmp_path)) == 0
    assert double_two(doubler(tmp_path)) == 1


def test_code_for_another_processor_or_compiler_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double_two(doubler(tmp_path))
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr("engine.numerics.kernel_cache._COMPILER", ("another",))
    assert double_two(doubler(tmp_path)) == 0
    (other,) = set(tmp_path.iterdir()) - {path}
    other.write_bytes(path.read_bytes())  # even under a name that it should not have
    assert double_two(doubler(tmp_path)) == 0


def test_no_source_with_kernels_needs_one_that_the_digest_leaves_out() -> None:
    """Such a source could decide compiled code without being covered by the digest."""
    for name in compiled_sources():
        tree = ast.parse((ENGINE_FOLDER / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module is not None
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in modules:
                path = module.removeprefix("engine.").replace(".", "/") + ".py"
                assert not path.startswith(NOT_COMPILED), f"{name} imports {module}"
    for left_out in NOT_COMPILED:
        assert (ENGINE_FOLDER / left_out).exists()


def function_in(path: Path) -> Any:
    names: dict[str, Any] = {}
    exec(compile("def f(): pass", str(path), "exec"), names)
    return names["f"]


@pytest.mark.skipif(FOLDER is None, reason="no folder for compiled kernels")
def test_only_what_the_digest_covers_is_kept() -> None:
    assert KernelCache.of(function_in(ENGINE_FOLDER / "optimizer.py")) is not None
    assert KernelCache.of(function_in(ENGINE_FOLDER.parent / "tests" / "optimizer.py")) is None
    captured = 1.0

    def closure() -> float:
        return captured

    closure.__code__ = closure.__code__.replace(co_filename=str(ENGINE_FOLDER / "optimizer.py"))
    for function in (closure, function_in(ENGINE_FOLDER / "trainer.py")):
        with pytest.raises(AssertionError, match="more than the digest"):
            KernelCache.of(function)
