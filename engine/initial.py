"""Initial weights: a function of the seed and each parameter's number, computed on the host for every backend."""

import numpy as np

from engine.numerics.random import normal_fill
from engine.numerics.types import Floats
from engine.program import Parameter


def fill_initial(parameter: Parameter, number: int, seed: int, out: Floats) -> None:
    """Write the start values of the `number`-th parameter into `out`, in its shape."""
    if parameter.start == "normal":
        normal_fill(out.reshape(-1), seed, number, parameter.std)
    else:
        out[:] = np.float32(0.0 if parameter.start == "zeros" else 1.0)
