"""`y = x W^T + b`: x [..., K], weight [N, K], bias [N] or None, y [..., N]."""

import numpy as np

from engine.numerics.types import Doubles


def reference_forward(x: Doubles, weight: Doubles, bias: Doubles | None) -> Doubles:
    y: Doubles = x @ weight.T
    return y if bias is None else y + bias


def reference_backward(x: Doubles, weight: Doubles, dy: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """Gradients of x, weight and bias from that of y."""
    rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    dweight: Doubles = rows.T @ flat
    return dy @ weight, dweight, np.sum(rows, axis=0)
