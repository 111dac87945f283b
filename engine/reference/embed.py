"""Token plus learned position embedding, with dropout on the sum.

ids [B, T], token [V, d], position [context, d], y [B, T, d].
"""

import numpy as np

from engine.numerics.types import Doubles, Words
from engine.reference import dropout


def reference_forward(ids: Words, token: Doubles, position: Doubles, keep: Doubles | None) -> Doubles:
    return dropout.reference_forward(token[ids] + position[: ids.shape[1]], keep)


def reference_backward(
    ids: Words, token: Doubles, position: Doubles, keep: Doubles | None, dy: Doubles
) -> tuple[Doubles, Doubles]:
    """Gradients of token and position from that of y."""
    dy = dropout.reference_backward(dy, keep)
    dtoken, dposition = np.zeros_like(token), np.zeros_like(position)
    np.add.at(dtoken, ids, dy)
    dposition[: ids.shape[1]] = np.sum(dy, axis=0)
    return dtoken, dposition
