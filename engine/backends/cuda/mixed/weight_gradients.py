"""Gradients of weights by our own kernel on compute capability 9.0 (weight_gradient_mixed.cu), joined over shards on
the way: each chain of sums goes through the tokens of a block of shards, and the tree joins chains."""

from dataclasses import dataclass

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.products import Matrix
from engine.backends.cuda.run import ceiling, padded
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import BEFORE_MAPS, matrix_map

STEP, BOX_COLUMNS = 64, 64  # as in weight_gradient_mixed.cu
PAIRED = 2  # tiles of a cluster, one above the other
MOST_CHAINS = 4
ENOUGH_BLOCKS = 48  # for work beside that of the main stream
SPARE = 1024  # bytes: stages are moved to a multiple of it


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

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """Of a gradient [rows, columns]."""
        return padded(ceiling(rows, self.rows), PAIRED), ceiling(columns, self.columns)


# The fastest of those tried on an H200 (docs/prod.md), for gradients of so many rows and columns, and for smaller ones.
LARGE, SMALL, FIRST_LARGE = Form(3, 192, 4, 1), Form(2, 192, 5, 1), 768


def form_of(rows: int, columns: int) -> Form:
    return LARGE if min(rows, columns) >= FIRST_LARGE else SMALL


def chains_of(rows: int, columns: int, shards: int) -> int:
    """Into how many chains `shards` logical shards are cut, all those that are usually taken at once."""
    down, across = form_of(rows, columns).tiles(rows, columns)
    chains = 1
    while 2 * chains <= min(shards, MOST_CHAINS) and down * across * chains < ENOUGH_BLOCKS:
        chains *= 2
    return chains


@dataclass(frozen=True)
class Taken:
    """A gradient [rows, columns] of which `shards` of `tokens` tokens are taken at once. usual: shards that chains are
    cut from, whatever is taken now. adds: whether it is added to what stands there.

    Where half of a chain is taken at once, the second half goes on with what the first one left: no bit moves.
    """

    rows: int
    columns: int
    tokens: int
    shards: int
    usual: int
    adds: bool

    @property
    def chain(self) -> int:
        """Shards of one chain."""
        length = self.usual // chains_of(self.rows, self.columns, self.usual)
        if 2 * self.shards < length or self.shards > self.usual:
            raise AssertionError(f"{self.shards} shards at once, where a chain has {length} of {self.usual}")
        return length


def unit_of(dtype: str, form: Form, chains: int) -> Unit:
    macros = {"GROUPS": form.groups, "COLUMNS": form.columns, "STAGES": form.stages, "BLOCKS": form.blocks}
    return Unit("weight_gradient_mixed", {"HALF_BF16": int(dtype == "bfloat16"), "CHAINS": chains, **macros})


class WeightGradients:
    """Queues gradients of weights on the stream that is current."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def __call__(self, dy: Matrix, x: Matrix, taken: Taken, out: int) -> None:
        """out fp32 [rows, columns] is (or has added) dy transposed times x; dy [shards, tokens, rows] and x [shards,
        tokens, columns] are 16-bit."""
        rows, columns, tokens, shards = taken.rows, taken.columns, taken.tokens, taken.shards
        form, length = form_of(rows, columns), taken.chain
        chains, goes_on = max(shards // length, 1), taken.adds and shards < length
        maps = (
            matrix_map(dy.address, dy.dtype, (shards, tokens, rows), dy.stride, (STEP, BOX_COLUMNS)),
            matrix_map(x.address, x.dtype, (shards, tokens, columns), x.stride, (STEP // PAIRED, BOX_COLUMNS)),
        )
        down, across = form.tiles(rows, columns)
        self._launch(
            unit_of(dy.dtype, form, chains),
            "k_weight_gradient",
            BEFORE_MAPS + "128s128sPiiiiii",
            (PAIRED * across, chains, down // PAIRED),
            (128 * form.groups + 32,),
            *maps,
            *(out, rows, columns, tokens, shards // chains, int(taken.adds and not goes_on), int(goes_on)),
            shared=form.shared(chains),
        )
