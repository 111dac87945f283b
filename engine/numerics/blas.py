"""The fp32 product of the tier `debug`: the BLAS of NumPy, whose rounding depends on machine and library.

The other ways to round are for measuring how far such products lie apart; nothing is trained with them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from engine.numerics.types import Floats

Product = Callable[[Floats, Floats, Floats], None]


def _blas(a: Floats, b: Floats, out: Floats) -> None:
    np.matmul(a, b, out=out)


def _reversed(a: Floats, b: Floats, out: Floats) -> None:
    np.matmul(np.ascontiguousarray(a[:, ::-1]), np.ascontiguousarray(b[::-1]), out=out)


def _halves(a: Floats, b: Floats, out: Floats) -> None:
    middle = a.shape[1] // 2
    np.matmul(np.ascontiguousarray(a[:, middle:]), np.ascontiguousarray(b[middle:]), out=out)
    out += np.matmul(np.ascontiguousarray(a[:, :middle]), np.ascontiguousarray(b[:middle]))


def _float64(a: Floats, b: Floats, out: Floats) -> None:
    out[...] = np.matmul(a.astype(np.float64), b.astype(np.float64))


WAYS: Mapping[str, Product] = {
    "products summed from the last term to the first": _reversed,
    "products summed in two halves": _halves,
    "products summed in float64 and rounded once": _float64,
}
"""Ways to round that differ from the BLAS's own, by what they do."""

_current: list[Any] = [_blas]


def product(a: Floats, b: Floats, out: Floats) -> Floats:
    """out = a b for fp32 a [M, K], b [K, N], out [M, N]; returns out."""
    _current[-1](a, b, out)
    return out


@contextmanager
def rounding(way: str) -> Iterator[None]:
    """Within it, products of the whole process are rounded in one of WAYS."""
    _current.append(WAYS[way])
    try:
        yield
    finally:
        _current.pop()
