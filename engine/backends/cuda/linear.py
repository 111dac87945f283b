"""Linear layers on the card: operands quantised to int8 planes once, products on integer tensor cores."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.cuda.compiler import HOPPER
from engine.backends.cuda.neighbours import BLOCK_DEPTH, STEP, Neighbours, planes
from engine.backends.cuda.run import MASK, NO_MASK, THREADS, MaskArguments, Run, ceiling, join_shards, padded
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import tensor_map
from engine.backends.cuda.twin import Twin
from engine.operations.activation import Activation
from engine.operations.base import BufferType, Sizes
from engine.operations.linear import Linear
from engine.operations.loss import Loss
from engine.operations.residual_add import ResidualAdd

STAGE_DEPTH = 64  # of the kernels that run on every architecture
DEEP_ROW = 8192  # from this depth on a row is quantised by a whole block
WARP_ROWS = 2  # as in linear_quantise.cu
DEEP_ROWS = 4
BLOCK_ROWS = 4
WEIGHT_ROWS = 16
TILE_COLUMNS = 32
TILE_TOKENS = 128
BLOCKS_EACH = 6  # of quantising rows, for each processor: more only add to the column maxima's atomics
INT32_DEPTH = 65536  # up to this depth sums of products fit in int32
TOPS_PIECE = 64  # tokens that a block looks through for column maxima
QUANTISE = Unit("linear_quantise")
EPILOGUE = f"PPPq{MASK}i"  # struct Epilogue of epilogue.cuh
PRODUCT = f"PPPPPqqqiiii{EPILOGUE}"
# Parameters start at 0x210 of their bank on this architecture, and tensor maps must lie at a multiple of 64.
HOPPER_PRODUCT = f"48x128s128sPPPqiiii{EPILOGUE}"
HOPPER_SHARED = 3 * 65536 + 1024
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


@dataclass(frozen=True)
class Epilogue:
    """What a product does with its results; see epilogue.cuh."""

    bias: int = 0
    residual: int = 0
    values: int = 0
    base: int = 0
    mask: MaskArguments = NO_MASK
    add: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.bias, self.residual, self.values, self.base, *self.mask, int(self.add))


def linear_unit(run: Run) -> Unit:
    # More stages hide more latency; how many fit depends on the card's shared memory.
    limit = run.launch.card.shared_limit
    return Unit("linear", {"STAGES": 4 if limit >= 4 * 32768 else 3 if limit >= 3 * 32768 else 2})


def in_blocks(depth: int) -> bool:
    """Whether a block can keep rows of this depth in registers."""
    return depth % 4 == 0 and depth <= BLOCK_DEPTH


def quantise_in_blocks(
    run: Run, kernel: str, form: str, source: tuple[Any, ...], operand: Operand, flag: int, tops: int, shards: int
) -> None:
    """Launch a kernel of the family that keeps rows in registers; `source` are the arguments before struct Rows."""
    rounds = max(1, operand.rows // (BLOCK_ROWS * BLOCKS_EACH * run.launch.card.processors))
    rows = (operand.rows, operand.depth, operand.padded, operand.planes, operand.exponents)
    run.launch(
        QUANTISE,
        kernel,
        f"{form}{ROWS}",
        (ceiling(operand.rows, BLOCK_ROWS * rounds),),
        (operand.padded // 4,),
        *(*source, *rows, operand.rows // shards, rounds, tops, flag),
    )


def quantise_rows(run: Run, source: Source, operand: Operand, flag: int, tops: int = 0, shards: int = 1) -> None:
    """Planes of values; with `tops`, zeros int32 [shards, depth], also the largest magnitudes of its columns by shard."""
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


def multiply(
    run: Run,
    a: Operand,
    b: Operand,
    out: int,
    epilogue: Epilogue,
    *,
    shards: int = 1,
    out_stride: int = 0,
) -> None:
    """out [a.rows, b.rows] = the product through `epilogue`; once for each shard."""
    unit, kernel = linear_unit(run), choose_kernel(run, a, b, shards)
    name = f"{kernel}_residual" if epilogue.residual else kernel
    if kernel == "k_product_hopper":
        maps = [tensor_map(o.planes, o.rows, o.padded, shards, o.stride) for o in (a, b)]
        tiles = ceiling(a.rows, 128) * ceiling(b.rows, 128) * shards
        run.launch(
            unit,
            name,
            HOPPER_PRODUCT,
            (min(tiles, run.launch.card.processors),),
            (384,),
            *(*maps, a.exponents, b.exponents, out, out_stride),
            *(a.rows, b.rows, a.padded, shards, *epilogue.arguments),
            shared=HOPPER_SHARED,
        )
        return
    tile, threads = TILES[kernel]
    run.launch(
        unit,
        name,
        PRODUCT,
        (ceiling(a.rows, tile) * ceiling(b.rows, tile), 1, shards),
        (threads,),
        *(a.planes, b.planes, a.exponents, b.exponents, out),
        *(a.stride, b.stride, out_stride, a.rows, b.rows, a.padded, 0, *epilogue.arguments),
        shared=unit.macros["STAGES"] * 4 * tile * STAGE_DEPTH,
    )


# Edge of a square tile, and threads, of the kernels that run on every architecture.
TILES = {"k_product_deep": (64, 128), "k_product_large": (128, 256), "k_product_small": (64, 128)}


def choose_kernel(run: Run, a: Operand, b: Operand, shards: int) -> str:
    """The fastest kernel for a product; all give the same bits."""
    card = run.launch.card
    tiles = ceiling(a.rows, 128) * ceiling(b.rows, 128) * shards
    if a.padded > INT32_DEPTH:
        return "k_product_deep"
    if tiles < card.processors // 2:
        return "k_product_small"
    return "k_product_hopper" if card.capability == HOPPER else "k_product_large"


class LinearTwin(Twin[Linear]):
    joins = True

    def __init__(self, neighbours: Neighbours, tied: bool) -> None:
        self.before = neighbours.before
        self.after = neighbours.after
        self.tied = tied  # whether the embedding adds to the gradient of the same weight

    def derived(self, operation: Linear, tier: str) -> dict[str, BufferType]:
        if tier == "debug":
            return {}
        return {
            "rows": planes(operation.wide, operation.deep),
            "row_exponents": BufferType((operation.wide,), "int32"),
            "columns": planes(operation.deep, operation.wide),
            "column_exponents": BufferType((operation.deep,), "int32"),
        }

    def zeroed(self, operation: Linear, tier: str, shards: int) -> dict[str, BufferType]:
        if tier == "debug":
            return {}
        return {
            "weight_tops": BufferType((operation.deep,), "int32"),
            "x_tops": BufferType((shards, operation.deep), "int32"),
            "dy_tops": BufferType((shards, operation.wide), "int32"),
            "dy_totals": BufferType((shards, operation.wide), "int64"),
        }

    def forward_work(self, operation: Linear, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        if tier == "debug" or self.before:
            return {}
        return row_work(sizes.batch * sizes.context, operation.deep)

    def backward_work(self, operation: Linear, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        tokens = sizes.batch * sizes.context
        wide, deep = operation.wide, operation.deep
        # Gradients of the weight by shard, until they are joined.
        partials = {} if self.tied else {"partials": BufferType((shards, wide, deep), "float32")}
        if tier == "debug":
            return partials | {"bias_partials": BufferType((shards, wide), "float32")}
        rows = {} if isinstance(self.after, Activation | Loss) else row_work(tokens, wide)
        return rows | partials | {
            "dy": planes(wide, tokens // shards, shards),
            "dy_exponents": BufferType((shards, wide), "int32"),
            "x": planes(deep, tokens // shards, shards),
            "x_exponents": BufferType((shards, deep), "int32"),
        }  # fmt: skip

    def _weight_rows(self, run: Run, operation: Linear) -> Operand:
        places = (run.derived(operation, "rows"), run.derived(operation, "row_exponents"))
        return Operand(*places, operation.wide, operation.deep)

    def _weight_columns(self, run: Run, operation: Linear) -> Operand:
        places = (run.derived(operation, "columns"), run.derived(operation, "column_exponents"))
        return Operand(*places, operation.deep, operation.wide)

    def forward(self, run: Run, operation: Linear) -> None:
        x, y = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["y"])
        bias = run.parameter(operation.parameters["bias"]) if "bias" in operation.parameters else 0
        if run.tier == "debug":
            weight, deep = run.parameter(operation.parameters["weight"]), operation.deep
            debug_product(run, (x, deep, 1), (weight, deep, 1), (run.tokens, operation.wide, deep), y, bias)
            return
        if self.before:
            rows = planes_of_tensor(x, run.tokens, operation.deep)
        else:
            rows = Operand(
                run.work(operation, "rows"), run.work(operation, "row_exponents"), run.tokens, operation.deep
            )
            # The backward pass quantises x by columns: their largest magnitudes are found on the way.
            quantise_rows(run, Source(x), rows, run.flag(operation), *column_tops_of(run, operation))
        epilogue = Epilogue(bias=bias)
        if isinstance(self.after, ResidualAdd):
            base, mask = masked(run, self.after, operation.wide)
            epilogue = Epilogue(bias, run.tensor(self.after.inputs["x"]), run.values, base, mask)
        multiply(run, rows, self._weight_rows(run, operation), y, epilogue)

    def _x(self, run: Run, operation: Linear) -> Source:
        """x as the backward pass reads it again."""
        before = self.before
        if before is None:
            return Source(run.tensor(operation.inputs["x"]))
        x = run.tensor(before.inputs["x"])
        if isinstance(before, Activation):
            return Source(x, before.function)
        statistics = [run.tensor(before.outputs[r]) for r in ("mean", "rstd")]
        parameters = [run.parameter(before.parameters[r]) if before.parameters else 0 for r in ("gain", "bias")]
        return Source(x, "normalised", (statistics[0], statistics[1], parameters[0], parameters[1]))

    def _dy(self, run: Run, operation: Linear) -> Source:
        if isinstance(self.after, Loss):
            return logits_gradient(run, self.after)
        if not isinstance(self.after, ResidualAdd):
            return Source(run.gradient(operation.outputs["y"]))
        dy, (base, mask) = run.gradient(self.after.outputs["y"]), masked(run, self.after, operation.wide)
        return Source(dy, "masked", values=run.values, base=base, mask=mask) if mask[1] else Source(dy)

    def backward(self, run: Run, operation: Linear) -> None:
        dx, add = run.gradient(operation.inputs["x"]), run.accumulates(operation, "x")
        if run.tier == "debug":
            self._backward_debug(run, operation, dx, add)
            return
        wide, deep, flag, shards = operation.wide, operation.deep, run.flag(operation), run.shards
        dy, dy_tops = self._dy(run, operation), run.zeroed(operation, "dy_tops")
        maker = self.after if isinstance(self.after, Activation | Loss) else operation
        rows = Operand(run.work(maker, "rows"), run.work(maker, "row_exponents"), run.tokens, wide)
        if maker is operation:
            quantise_rows(run, dy, rows, flag, dy_tops, shards)
        left, right = (
            Operand(
                run.work(operation, role),
                run.work(operation, f"{role}_exponents"),
                width,
                run.shard_tokens,
                2 * width * padded(run.shard_tokens, STEP),
            )
            for role, width in (("dy", wide), ("x", deep))
        )
        bias = operation.parameters.get("bias")
        totals = run.zeroed(operation, "dy_totals") if bias else 0
        x = Columns(self._x(run, operation), right, run.zeroed(operation, "x_tops"))
        # Nothing on the way back needs the weight's gradient: it is computed beside what follows.
        with run.launch.beside():
            quantise_columns(run, Columns(dy, left, dy_tops, totals), x, shards, flag)
            partials = self._partials(run, operation)
            multiply(run, left, right, partials, Epilogue(), shards=shards, out_stride=wide * deep)
            self._join(run, operation, partials)
            if bias:
                run.launch(
                    linear_unit(run),
                    "k_linear_bias_gradient",
                    "PPiiPi",
                    (ceiling(wide, THREADS),),
                    (THREADS,),
                    *(totals, left.exponents, wide, shards, run.parameter_gradient(bias), int(run.adds)),
                )
        multiply(run, rows, self._weight_columns(run, operation), dx, Epilogue(add=add))

    def _partials(self, run: Run, operation: Linear) -> int:
        return run.token_gradients if self.tied else run.work(operation, "partials")

    def _join(self, run: Run, operation: Linear, partials: int) -> None:
        if not self.tied:  # else the embedding's backward pass does
            join_shards(run, partials, operation.wide * operation.deep, operation.parameters["weight"])

    def _backward_debug(self, run: Run, operation: Linear, dx: int, add: bool) -> None:
        x, dy = run.tensor(operation.inputs["x"]), run.gradient(operation.outputs["y"])
        weight = run.parameter(operation.parameters["weight"])
        wide, deep, tokens = operation.wide, operation.deep, run.shard_tokens
        debug_product(run, (dy, wide, 1), (weight, 1, deep), (run.tokens, deep, wide), dx, 0, add=add)
        shard, sizes, partials = (
            (tokens * wide, tokens * deep, wide * deep),
            (wide, deep, tokens),
            self._partials(run, operation),
        )
        debug_product(run, (dy, 1, wide), (x, 1, deep), sizes, partials, 0, shards=run.shards, shard=shard)
        self._join(run, operation, partials)
        if "bias" in operation.parameters:
            partials = run.work(operation, "bias_partials")
            run.launch(
                linear_unit(run),
                "k_debug_bias_gradient",
                "PiiP",
                (ceiling(wide, THREADS), run.shards),
                (THREADS,),
                *(dy, tokens, wide, partials),
            )
            join_shards(run, partials, wide, operation.parameters["bias"])


def logits_gradient(run: Run, loss: Loss) -> Source:
    """The gradient of the logits, from the logits."""
    maxima, sums = (run.tensor(loss.outputs[r]) for r in ("maxima", "sums"))
    logits, targets = (run.tensor(loss.inputs[r]) for r in ("logits", "targets"))
    return Source(logits, "logits", (maxima, sums, 0, 0), targets, mask=(0, 0, float(run.loss_scale)))


def row_work(tokens: int, depth: int) -> dict[str, BufferType]:
    return {"rows": planes(tokens, depth), "row_exponents": BufferType((tokens,), "int32")}


def planes_of_tensor(address: int, tokens: int, depth: int) -> Operand:
    """A tensor that exists as planes, its exponents after them."""
    return Operand(address, address + 2 * tokens * padded(depth, STEP), tokens, depth)


def column_tops_of(run: Run, operation: Linear) -> tuple[int, int]:
    """Where x's column maxima go, and the shards they are kept for: nowhere outside training."""
    return (run.zeroed(operation, "x_tops"), run.shards) if run.training else (0, 1)


def masked(run: Run, residual: ResidualAdd, width: int) -> tuple[int, MaskArguments]:
    """Address of this run's first element in the mask of a residual sum, and the mask."""
    return run.first_row * run.sizes.context * width, run.mask(residual.probability, residual.site)


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


def debug_product(
    run: Run,
    a: tuple[int, int, int],
    b: tuple[int, int, int],
    sizes: tuple[int, int, int],
    out: int,
    bias: int,
    *,
    add: bool = False,
    shards: int = 1,
    shard: tuple[int, int, int] = (0, 0, 0),
) -> None:
    """fp32 product in ascending order of depth. a: address and strides of (row, depth); b: of (column, depth)."""
    rows, columns, depth = sizes
    run.launch(
        linear_unit(run),
        "k_debug_product",
        "PqqPqqPPiiiiqqq",
        (ceiling(columns, 16), ceiling(rows, 16), shards),
        (16, 16),
        *(*a, *b, bias, out, rows, columns, depth, int(add), *shard),
    )
