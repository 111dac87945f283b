"""GELU in its tanh form (Hendrycks & Gimpel 2016), or ReLU."""

from math import pi, sqrt

import numpy as np

from engine.numerics.types import Doubles

LINEAR = sqrt(2 / pi)
CUBIC = 0.044715


def reference_forward(x: Doubles, function: str) -> Doubles:
    if function == "relu":
        return np.maximum(x, 0.0)
    y: Doubles = 0.5 * x * (1 + np.tanh(LINEAR * (x + CUBIC * x**3)))
    return y


def reference_backward(x: Doubles, function: str, dy: Doubles) -> Doubles:
    if function == "relu":
        return np.where(x > 0, dy, 0.0)
    t = np.tanh(LINEAR * (x + CUBIC * x**3))
    dx: Doubles = dy * 0.5 * (1 + t + x * (1 - t * t) * LINEAR * (1 + 3 * CUBIC * x**2))
    return dx
