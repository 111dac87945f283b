"""Compiled kernels, kept between processes by what they are made of, not by where it lies.

A folder is named by the digest of the sources, a file in it by kernel, argument types, processor and compiler. So
clones, worktrees and copies of the same sources share what one of them compiled, and after an edit to any of them
everything is compiled anew. Numba's own cache goes by the path of a source and looks at the file that a function stands
in alone, so that a copy compiles again and an edited callee in another module goes unseen.

A file is written aside and renamed, holds one compiled function with its key and a hash, and is never written to again:
processes that compile at the same time cannot take each other's code for their own, and a file that a crash cut short
is compiled again.
"""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import llvmlite
import numba
import platformdirs
from blake3 import blake3
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

ENGINE_FOLDER = Path(__file__).resolve().parent.parent
NOT_COMPILED = ("backends/cuda/", "backends/opening.py", "initial.py", "reference/", "self_test.py", "trainer.py")
"""Sources without kernels, and that no source with kernels imports: an edit to them compiles nothing anew."""
_HASH_BYTES = 32
_COMPILER = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, getattr(sys, "abiflags", ""))


def compiled_sources(folder: Path = ENGINE_FOLDER) -> list[str]:
    """The engine's Python files that may decide compiled code, relative to its folder with `/`, in order."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return sorted(name for name in names if not name.startswith(NOT_COMPILED))


def compiled_sources_digest(folder: Path = ENGINE_FOLDER) -> str:
    """BLAKE3 (hex) over their names and contents."""
    hasher = blake3()
    for name in compiled_sources(folder):
        encoded, content = name.encode(), (folder / name).read_bytes()
        hasher.update(b"%d %s %d " % (len(encoded), encoded, len(content)))
        hasher.update(content)
    return hasher.hexdigest()


def _open_folder() -> Path | None:
    """The folder of these sources; None where it cannot be written."""
    root = os.environ.get("SAMEBITS_CACHE") or platformdirs.user_cache_dir("samebits")
    folder = Path(root) / "compiled" / compiled_sources_digest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


FOLDER = _open_folder()
"""Where compiled kernels are kept; None if nowhere, and every process compiles anew."""


def nothing_compiled() -> bool:
    """Whether kernels have yet to be compiled: none of these sources is kept."""
    return FOLDER is None or not any(FOLDER.glob("*.kernel"))


class KernelCache(_Cache):  # type: ignore[misc]
    """The compiled forms of one function, for Numba's dispatcher."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "KernelCache | None":
        """None where nothing can be kept, or for a function from elsewhere, which the digest does not cover."""
        source = Path(function.__code__.co_filename).resolve()
        if FOLDER is None or not source.is_relative_to(ENGINE_FOLDER):
            return None
        name = source.relative_to(ENGINE_FOLDER).as_posix()
        if name.startswith(NOT_COMPILED) or function.__closure__ is not None:
            raise AssertionError(f"{function.__qualname__} of {name} depends on more than the digest of the sources")
        module = name.removesuffix(".py").replace("/", ".")
        return cls(FOLDER, f"{module}.{function.__qualname__}")

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for argument types `sig`, or None."""
        target_context.refresh()  # makes known what its code may refer to
        key = self._key(sig, target_context.codegen())
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        payload = content[_HASH_BYTES:]
        if blake3(payload).digest() != content[:_HASH_BYTES]:
            return None
        found, reduced = pickle.loads(payload)
        return CompileResult._rebuild(target_context, *reduced) if found == key else None

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.lifted or data.library.has_dynamic_globals:  # refers to addresses of this process
            return
        key = self._key(sig, data.codegen)
        payload = dumps((key, data._reduce()))
        path = self._path(key)
        with suppress(OSError):  # a cache that cannot be written only costs time
            _write(path, blake3(payload).digest() + payload)

    def _key(self, sig: Any, codegen: Any) -> tuple[str, ...]:
        """codegen says what processor it compiles for."""
        return (self._name, repr(sig), *map(str, codegen.magic_tuple()), *_COMPILER)

    def _path(self, key: tuple[str, ...]) -> Path:
        return self._folder / f"{self._name}.{blake3(repr(key).encode()).hexdigest()[:16]}.kernel"

    def enable(self) -> None:
        """Part of Numba's interface: it is always enabled."""

    def disable(self) -> None:
        """Part of Numba's interface: `kernel` leaves the cache out instead."""

    def flush(self) -> None:
        """Part of Numba's interface: nothing is ever stale."""


def _write(path: Path, content: bytes) -> None:
    partial = path.with_suffix(f".{uuid4().hex}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
