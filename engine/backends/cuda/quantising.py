"""Quantising the operands of linear layers: values, or what makes them, become int8 planes with exponents."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.cuda.neighbours import BLOCK_DEPTH, STEP, planes
from engine.backends.cuda.run import MASK, NO_MASK, THREADS, MaskArguments, Run, ceiling, padded
from engine.backends.cuda.sources import Unit
from engine.operations.base import BufferType
from engine.operations.linear import Linear

DEEP_ROW = 8192  # from this depth on a row is quantised by a whole block
WARP_ROWS = 2  # as in linear_quantise.cu
DEEP_ROWS = 4
GROUP_ROWS = 4
GROUP_THREADS = 256  # narrow rows are taken by several groups of a block of about this size, at most MOST_GROUPS
MOST_GROUPS = 8
WEIGHT_ROWS = 16
TILE_COLUMNS = 32
TILE_TOKENS = 128
BLOCKS_EACH = 6  # of quantising rows, for each processor: more only add to the column maxima's atomics
TOPS_PIECE = 64  # tokens that a block looks through for column maxima
QUANTISE = Unit("linear_quantise")
SOURCE = f"PPPPPPPq{MASK}i"  # struct Source of linear_quantise.cu
ROWS = "iiiPPiiPP"  # struct Rows
COLUMNS = f"{SOURCE}PPPPi4x"  # struct Columns
KINDS = {"plain": 0, "normalised": 1, "gelu": 2, "relu": 3, "masked": 4, "logits": 5}
WEIGHT = np.dtype(
    [(name, "<u8") for name in ("x", "rows", "columns", "row_exponents", "column_exponents", "tops", "flag")]
    + [(name, "<i4") for name in ("wide", "deep", "deep_padded", "wide_padded")]
    + [(name, "<i4") for name in ("first_row_block", "first_column_block", "column_blocks", "unused")]
)


@dataclass(frozen=True)
class Operand:
    """Addresses of planes and exponents; `stride` bytes from the planes of one shard to the next."""

    planes: int
    exponents: int
    rows: int
    depth: int
    stride: int = 0

    @property
    def padded(self) -> int:
        return padded(self.depth, STEP)


@dataclass(frozen=True)
class Source:
    """Where values to be quantised come from: a tensor, or a tensor through an elementwise operation."""

    x: int
    kind: str = "plain"
    norm: tuple[int, int, int, int] = (0, 0, 0, 0)  # mean, rstd, gain, bias; of logits, maxima and sums
    targets: int = 0
    values: int = 0
    base: int = 0
    mask: MaskArguments = NO_MASK

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.x, *self.norm, self.targets, self.values, self.base, *self.mask, KINDS[self.kind])


def in_blocks(depth: int) -> bool:
    """Whether a block can keep rows of this depth in registers."""
    return depth % 4 == 0 and depth <= BLOCK_DEPTH


def quantise_in_blocks(
    run: Run, kernel: str, form: str, source: tuple[Any, ...], operand: Operand, flag: int, tops: int, shards: int
) -> None:
    """Launch a kernel of the family that keeps rows in registers; `source` are the arguments before struct Rows."""
    width = operand.padded // 4
    groups = min(MOST_GROUPS, max(1, GROUP_THREADS // width))
    block_rows = groups * GROUP_ROWS
    rounds = max(1, operand.rows // (block_rows * BLOCKS_EACH * run.launch.card.processors))
    rows = (operand.rows, operand.depth, operand.padded, operand.planes, operand.exponents)
    run.launch(
        QUANTISE,
        kernel,
        f"{form}{ROWS}",
        (ceiling(operand.rows, block_rows * rounds),),
        (groups * width,),
        *(*source, *rows, operand.rows // shards, rounds, tops, flag),
        shared=4 * operand.padded,
    )


def quantise_rows(run: Run, source: Source, operand: Operand, flag: int, tops: int = 0, shards: int = 1) -> None:
    """Planes of values; with `tops`, zeros int32 [shards, depth], also the largest magnitudes of columns by shard."""
    if in_blocks(operand.depth):
        kernel = f"k_quantise_{source.kind}"
        quantise_in_blocks(run, kernel, SOURCE, source.arguments, operand, flag, tops, shards)
        return
    places = (operand.planes, operand.exponents, operand.rows // shards, tops, flag)
    values = (source.x, operand.rows, operand.depth, operand.padded, *places)
    deep = operand.depth >= DEEP_ROW
    grid = (ceiling(operand.rows, DEEP_ROWS if deep else THREADS // 32 * WARP_ROWS),)
    run.launch(QUANTISE, "k_quantise_deep_rows" if deep else "k_quantise_rows", "PiiiPPiPP", grid, (THREADS,), *values)


def column_tops(run: Run, x: int, tokens: int, columns: int, shards: int, tops: int) -> None:
    """tops int32 [shards, columns], zeros, become the largest magnitudes of x [shards, tokens, columns]."""
    grid = (ceiling(columns, 32), min(ceiling(tokens, TOPS_PIECE), 65535), shards)
    run.launch(QUANTISE, "k_column_tops", "PiiP", grid, (32, 8), x, tokens, columns, tops)


@dataclass(frozen=True)
class Columns:
    """Values [shards, depth, rows] whose columns become rows of `operand`; totals (zeros, or 0) get their sums."""

    source: Source
    operand: Operand
    tops: int
    totals: int = 0

    @property
    def arguments(self) -> tuple[Any, ...]:
        operand = self.operand
        places = (self.tops, operand.planes, operand.exponents, self.totals, operand.rows)
        return (*self.source.arguments, *places)


def quantise_columns(run: Run, first: Columns, second: Columns, shards: int, flag: int) -> None:
    """Two tensors of the same tokens."""
    blocks = [ceiling(c.operand.rows, TILE_COLUMNS) for c in (first, second)]
    depth, deep = first.operand.depth, first.operand.padded
    run.launch(
        QUANTISE,
        "k_quantise_columns",
        f"{COLUMNS}{COLUMNS}iiiP",
        (sum(blocks), deep // TILE_TOKENS, shards),
        (THREADS,),
        *(*first.arguments, *second.arguments, blocks[0], depth, deep, flag),
    )


def row_work(tokens: int, depth: int) -> dict[str, BufferType]:
    return {"rows": planes(tokens, depth), "row_exponents": BufferType((tokens,), "int32")}


def planes_of_tensor(address: int, tokens: int, depth: int) -> Operand:
    """A tensor that exists as planes, its exponents after them."""
    return Operand(address, address + 2 * tokens * padded(depth, STEP), tokens, depth)


# --- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightTable:
    """What the kernels that quantise all weights of a step need to know of them."""

    rows: npt.NDArray[Any]  # of WEIGHT
    row_blocks: int
    column_blocks: int


def weight_table(run: Run, operations: list[Linear]) -> WeightTable:
    table = np.zeros(len(operations), WEIGHT)
    row_blocks = column_blocks = 0
    for entry, operation in zip(table, operations, strict=True):
        wide, deep = operation.wide, operation.deep
        entry["x"] = run.parameter(operation.parameters["weight"])
        for role in ("rows", "columns", "row_exponents", "column_exponents"):
            entry[role] = run.derived(operation, role)
        entry["tops"], entry["flag"] = run.zeroed(operation, "weight_tops"), run.flag(operation)
        entry["wide"], entry["deep"] = wide, deep
        entry["wide_padded"], entry["deep_padded"] = padded(wide, STEP), padded(deep, STEP)
        entry["first_row_block"], entry["first_column_block"] = row_blocks, column_blocks
        entry["column_blocks"] = ceiling(deep, TILE_COLUMNS)
        row_blocks += ceiling(wide, WEIGHT_ROWS)
        column_blocks += ceiling(deep, TILE_COLUMNS) * ceiling(wide, TILE_TOKENS)
    return WeightTable(table, row_blocks, column_blocks)


def quantise_weights(run: Run, table: WeightTable, address: int) -> None:
    for name, blocks in (("rows", table.row_blocks), ("columns", table.column_blocks)):
        kernel = f"k_quantise_weight_{name}"
        run.launch(QUANTISE, kernel, "Pi", (blocks,), (THREADS,), address, len(table.rows))
