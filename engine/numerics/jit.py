"""How the CPU backend's kernels are compiled.

Two kinds of function: a `kernel` is entered from Python and releases the GIL; a `device_function` is only called from
kernels. Neither may use fast-math: no contraction, no reassociation, IEEE semantics for division by zero.

Compiled code is cached in a folder named by the digest of every engine source file. Numba's own cache looks only at
the file a function stands in, so it would run stale code after a change to a callee in another module.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import platformdirs
from blake3 import blake3

F = TypeVar("F", bound=Callable[..., Any])

ENGINE_FOLDER = Path(__file__).resolve().parent.parent


def engine_source_digest(folder: Path = ENGINE_FOLDER) -> str:
    """BLAKE3 (hex) over the names and contents of all Python files of the engine, in name order."""
    hasher = blake3()
    for path in sorted(folder.rglob("*.py"), key=lambda p: p.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix().encode()
        content = path.read_bytes()
        hasher.update(b"%d %s %d " % (len(name), name, len(content)))
        hasher.update(content)
    return hasher.hexdigest()


def _use_cache_folder() -> bool:
    """Point Numba at this source version's cache folder; False where no such folder can be written."""
    root = os.environ.get("SAMEBITS_CACHE") or platformdirs.user_cache_dir("samebits")
    folder = Path(root) / "compiled" / engine_source_digest()[:32]
    try:
        str(ENGINE_FOLDER).encode()  # Numba names its files by this; a path the locale cannot express would stop it
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeEncodeError):
        return False
    if not os.access(folder, os.W_OK):
        return False
    numba.config.CACHE_DIR = str(folder)
    return True


CACHED = _use_cache_folder()


def kernel(function: F) -> F:
    """Compile a function that Python calls, possibly from several threads at once."""
    compiled: F = numba.njit(nogil=True, error_model="numpy", cache=CACHED)(function)
    return compiled


def device_function(function: F) -> F:
    """Compile a function that only kernels call; always inlined, or the loops that call it would not vectorise."""
    compiled: F = numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return compiled


def subroutine(function: F) -> F:
    """Compile a longer function that only kernels call; called rather than inlined, which keeps kernels small."""
    compiled: F = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled
