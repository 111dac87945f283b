"""Names for the array types that kernels take. Kernels are compiled per actual type; these are for the reader."""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Scalar = Any
Array = npt.NDArray[Any]
