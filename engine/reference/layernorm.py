"""LayerNorm over the last axis (Ba, Kiros & Hinton 2016); gain and bias [d], or both None."""

import numpy as np

from engine.numerics.types import Doubles

EPSILON = float(np.float32(1e-5))


def statistics(x: Doubles) -> tuple[Doubles, Doubles]:
    """The normalised x and 1/sqrt(variance + epsilon), the latter with a last axis of 1."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + EPSILON)
    return centred * rstd, rstd


def reference_forward(x: Doubles, gain: Doubles | None, bias: Doubles | None) -> Doubles:
    n, _ = statistics(x)
    return n if gain is None or bias is None else n * gain + bias


def reference_backward(x: Doubles, gain: Doubles | None, dy: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """Gradients of x, gain and bias from that of y."""
    n, rstd = statistics(x)
    g = dy if gain is None else dy * gain
    dx = rstd * (g - np.mean(g, axis=-1, keepdims=True) - n * np.mean(g * n, axis=-1, keepdims=True))
    tokens = tuple(range(x.ndim - 1))
    return dx, np.sum(dy * n, axis=tokens), np.sum(dy, axis=tokens)
