"""How the CPU backend's kernels are compiled.

Two kinds of function: a `kernel` is entered from Python and releases the GIL; a `device_function` is only called from
kernels. Neither may use fast-math: no contraction, no reassociation, IEEE semantics for division by zero.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from engine.numerics.kernel_cache import KernelCache

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile a function that Python calls, possibly from several threads at once."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    cache = KernelCache.of(function)
    if cache is not None:
        compiled._cache = cache
    return compiled  # type: ignore[no-any-return]


def device_function(function: F) -> F:
    """Compile a function that only kernels call; always inlined, or the loops that call it would not vectorise."""
    compiled: F = numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return compiled


def subroutine(function: F) -> F:
    """Compile a longer function that only kernels call; called rather than inlined, which keeps kernels small."""
    compiled: F = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled
