"""Gradients of weights by our own kernel on compute capability 9.0 (weight_gradient_mixed.cu), joined over shards on
the way: each chain of sums goes through the tokens of a block of shards, and the tree joins chains."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.products import Matrix
from engine.backends.cuda.run import ceiling
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import BEFORE_MAPS, matrix_map

STEP, BOX_COLUMNS = 64, 64  # as in weight_gradient_mixed.cu
PAIRED = 2  # tiles of a cluster, one above the other
MOST_CHAINS = 4
ENOUGH_BLOCKS = 48  # for work beside that of the main stream
SPARE = 1024  # bytes: stages are moved to a multiple of it

Shapes = Sequence[tuple[int, int]]  # rows and columns of each gradient


@dataclass(frozen=True)
class Form:
    """Warpgroups of a tile (64 rows each), its columns, stages of tokens under way, blocks that share a processor."""

    groups: int
    columns: int
    stages: int
    blocks: int

    @property
    def rows(self) -> int:
        return 64 * self.groups

    def shared(self, chains: int) -> int:
        """Bytes of shared memory of a block."""
        stage = 2 * STEP * (self.rows + self.columns)
        return max(self.stages * stage, 4 * self.rows * self.columns if chains > 1 else 0) + SPARE

    def pairs(self, rows: int, columns: int) -> int:
        """Pairs of tiles of a gradient [rows, columns]."""
        return ceiling(rows, PAIRED * self.rows) * ceiling(columns, self.columns)


# The fastest of those tried on an H200 (docs/prod.md), for gradients of so many rows and columns, and for smaller ones.
LARGE, SMALL, FIRST_LARGE = Form(3, 192, 4, 1), Form(2, 128, 7, 1), 384


@dataclass(frozen=True)
class Gradient:
    """out fp32 [rows, columns] is, or has added, dy transposed times x; dy [shards, tokens, rows] and x [shards,
    tokens, columns] are 16-bit.

    squares: where sums of its squares go, fp64 by blocks (squares.py), or 0; only where there is one chain.
    """

    rows: int
    columns: int
    dy: Matrix
    x: Matrix
    out: int
    squares: int = 0


@dataclass(frozen=True)
class Taken:
    """`shards` of `tokens` tokens that are taken at once. usual: shards that chains are cut from, whatever is taken
    now. adds: whether a gradient is added to what stands there.

    Where half of a chain is taken at once, the second half goes on with what the first one left: no bit moves.
    """

    tokens: int
    shards: int
    usual: int
    adds: bool

    def chain(self, gradients: Sequence[Gradient]) -> int:
        """Shards of one chain."""
        length = self.usual // chains_of([(g.rows, g.columns) for g in gradients], self.usual)
        if 2 * self.shards < length or self.shards > self.usual:
            raise AssertionError(f"{self.shards} shards at once, where a chain has {length} of {self.usual}")
        return length


def form_of(shapes: Shapes) -> Form:
    return LARGE if min(min(shape) for shape in shapes) >= FIRST_LARGE else SMALL


def chains_of(shapes: Shapes, shards: int) -> int:
    """Into how many chains `shards` logical shards are cut, all those that are usually taken at once, for gradients
    of these rows and columns."""
    tiles = PAIRED * sum(form_of(shapes).pairs(*shape) for shape in shapes)
    chains = 1
    while 2 * chains <= min(shards, MOST_CHAINS) and tiles * chains < ENOUGH_BLOCKS:
        chains *= 2
    return chains


def kernel_unit(dtype: str, form: Form, chains: int) -> Unit:
    macros = {"GROUPS": form.groups, "COLUMNS": form.columns, "STAGES": form.stages, "BLOCKS": form.blocks}
    return Unit("weight_gradient_mixed", {"HALF_BF16": int(dtype == "bfloat16"), "CHAINS": chains, **macros})


class WeightGradients:
    """Queues gradients of weights on the stream that is current."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def __call__(self, gradients: Sequence[Gradient], taken: Taken) -> None:
        """One or two in one launch."""
        if len(gradients) > 2:
            raise AssertionError(f"{len(gradients)} gradients in one launch, which has room for two")
        length = taken.chain(gradients)
        form = form_of([(g.rows, g.columns) for g in gradients])
        if any(g.squares for g in gradients) and chains_of([(g.rows, g.columns) for g in gradients], taken.usual) > 1:
            raise AssertionError("squares are added up on the way where there is one chain alone")
        chains, goes_on = max(taken.shards // length, 1), taken.adds and taken.shards < length
        first, last = gradients[0], gradients[-1]
        maps = [map for g in (first, last) for map in _maps(g, taken)]
        self._launch(
            kernel_unit(first.dy.dtype, form, chains),
            "k_weight_gradient",
            BEFORE_MAPS + 4 * "128s" + "PPii" + "PPii" + "i" + "iiii",
            (PAIRED * sum(form.pairs(g.rows, g.columns) for g in gradients), chains),
            (128 * form.groups + 32,),
            *maps,
            *(first.out, first.squares, first.rows, first.columns),
            *(last.out, last.squares, last.rows, last.columns),
            form.pairs(first.rows, first.columns),
            *(taken.tokens, taken.shards // chains, int(taken.adds and not goes_on), int(goes_on)),
            shared=form.shared(chains),
        )


def _maps(gradient: Gradient, taken: Taken) -> list[bytes]:
    """Of dy and x."""
    return [
        matrix_map(m.address, m.dtype, (taken.shards, taken.tokens, width), m.stride, (tokens, BOX_COLUMNS))
        for m, width, tokens in ((gradient.dy, gradient.rows, STEP), (gradient.x, gradient.columns, STEP // PAIRED))
    ]
