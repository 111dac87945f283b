"""The sums of squares that the gradient's norm is made of (squares.cuh, optimizer_mixed.cu).

Where our own kernel computes the gradient of a weight in one chain, it adds up the squares on the way, block by block
of 64 x 64. Those of all other parameters are added up at the end of a step, piece by piece of the optimizer. Which are
which depends on the configuration and the card's kernels alone.
"""

from collections.abc import Mapping

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.run import ceiling
from engine.backends.cuda.sources import Unit

BLOCK = 64  # SQUARES of squares.cuh


class SquarePlaces:
    """Where sums stand, one after another in one buffer of `elements`: first those of pieces, then blocks of weights.

    shapes: rows and columns of weights whose squares are added up by blocks; pieces: of all other parameters.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], pieces: int) -> None:
        self.shapes, self.pieces = shapes, pieces
        self.places: dict[str, int] = {}
        self.elements = pieces
        for name, shape in shapes.items():
            self.places[name] = self.elements
            across, down = _grid(shape)
            self.elements += across * down


def add_squares(launch: Launcher, unit: Unit, gradient: int, shape: tuple[int, int], squares: int) -> None:
    """Queue adding up the squares of a weight's gradient, fp32 of `shape`, by blocks; `unit`: optimizer_mixed."""
    launch(unit, "k_gradient_squares", "PiiP", _grid(shape), (128,), gradient, *shape, squares)


def _grid(shape: tuple[int, int]) -> tuple[int, int]:
    """Blocks across and down."""
    return ceiling(shape[1], BLOCK), ceiling(shape[0], BLOCK)
