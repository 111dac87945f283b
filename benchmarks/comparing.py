"""What benchmarks say of results beside times: how far they are from float64, and whether they repeat."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def relative(found: Array, wanted: Array) -> float:
    """The largest distance, relative to the largest number; infinite where one is none."""
    distance = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return distance if np.isfinite(distance) else np.inf


def repeated(results: Callable[[], list[Array]]) -> tuple[list[Array], bool]:
    """The results of the first of three calls, and whether the others gave the same bits."""
    first, *others = (results() for _ in range(3))
    return first, all(np.array_equal(a, b) for other in others for a, b in zip(first, other, strict=True))
