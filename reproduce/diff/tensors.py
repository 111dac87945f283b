"""Where two states differ, and by how much."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reproduce.verification.distances import relative_distance, shown

Arrays = Mapping[str, npt.NDArray[Any]]


def compare_states(a: Arrays, b: Arrays) -> list[dict[str, Any]]:
    """One entry for each tensor of weights and moments that differs, in the order of their names: how many elements,
    index and values of the first, its distance and the largest one in ulp (steps between neighbouring fp32 numbers),
    and the relative distance of the whole."""
    found: list[dict[str, Any]] = []
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if name.startswith("history/"):
            continue
        if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
            found.append({"tensor": name, "a": _kind(x), "b": _kind(y)})
            continue
        unequal = np.flatnonzero(_bits(x) != _bits(y))
        if not len(unequal):
            continue
        steps = ulps(x.reshape(-1)[unequal], y.reshape(-1)[unequal])
        at = int(unequal[0])
        found.append(
            {
                "tensor": name,
                "elements": len(unequal),
                "of": x.size,
                "index": [int(i) for i in np.unravel_index(at, x.shape)],
                "a": str(x.reshape(-1)[at]),
                "b": str(y.reshape(-1)[at]),
                "ulp": int(steps[0]),
                "largest_ulp": int(steps.max()),
                "relative_distance": shown(float(f"{relative_distance(x, y):.6g}")),
            }
        )
    return found


def ulps(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """How many fp32 numbers lie from each element to the other; -0 and 0 are one apart, so that every change of bits
    has a distance. NaNs count by their bits, beyond infinity."""
    result: npt.NDArray[np.int64] = np.abs(_rank(a) - _rank(b))
    return result


def _rank(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The place of each number when all fp32 numbers are sorted."""
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.int64)
    return np.where(bits & 0x80000000, 0x7FFFFFFF - bits, bits)


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype(f"u{flat.dtype.itemsize}"))


def _kind(array: npt.NDArray[Any] | None) -> str:
    return "not there" if array is None else f"{array.dtype} {list(array.shape)}"
