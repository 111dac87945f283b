"""The residual sum, with dropout on the branch; all tensors of one shape."""

from engine.numerics.types import Doubles
from engine.reference import dropout


def reference_forward(x: Doubles, branch: Doubles, keep: Doubles | None) -> Doubles:
    return x + dropout.reference_forward(branch, keep)


def reference_backward(dy: Doubles, keep: Doubles | None) -> tuple[Doubles, Doubles]:
    """Gradients of x and branch from that of y."""
    return dy, dropout.reference_backward(dy, keep)
