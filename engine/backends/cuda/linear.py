"""Linear layers on the card: operands quantised to int8 planes once, products on integer tensor cores."""

from dataclasses import dataclass

from engine.backends.cuda.compiler import HOPPER
from engine.backends.cuda.run import THREADS, Run, ceiling, padded
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import tensor_map
from engine.backends.cuda.twin import Twin
from engine.operations.base import BufferType, Sizes
from engine.operations.linear import Linear

STEP = 128  # planes are padded to a multiple of this depth
STAGE_DEPTH = 64  # of the kernels that run on every architecture
DEEP_ROW = 8192  # from this depth on a row is quantised by a whole block
WARP_ROWS = 2  # as in linear.cu
DEEP_ROWS = 4
BLOCK_ROWS = 8
BLOCK_DEPTH = 4096  # up to this depth a block keeps rows in registers
INT32_DEPTH = 65536  # up to this depth sums of products fit in int32
TOPS_PIECE = 64  # tokens that a block looks through for column maxima
PRODUCT = "PPPPPPqqqiiii"
# Parameters start at 0x210 of their bank on this architecture, and tensor maps must lie at a multiple of 64.
HOPPER_PRODUCT = "48x128s128sPPPPqiiiii4x"
HOPPER_SHARED = 3 * 65536 + 1024


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


def planes(rows: int, depth: int, shards: int = 1) -> BufferType:
    return BufferType((shards, 2, rows, padded(depth, STEP)), "int8")


def linear_unit(run: Run) -> Unit:
    # More stages hide more latency; how many fit depends on the card's shared memory.
    limit = run.launch.card.shared_limit
    return Unit("linear", {"STAGES": 4 if limit >= 4 * 32768 else 3 if limit >= 3 * 32768 else 2})


def quantise_rows(run: Run, x: int, operand: Operand, flag: int, tops: int = 0, shards: int = 1) -> None:
    """Planes of x; with `tops`, zeros int32 [shards, depth], also the largest magnitudes of its columns by shard."""
    unit, arguments = linear_unit(run), "PiiiPPiPP"
    places = (operand.planes, operand.exponents, operand.rows // shards, tops, flag)
    values = (x, operand.rows, operand.depth, operand.padded, *places)
    if operand.depth % 4 == 0 and operand.depth <= BLOCK_DEPTH:
        grid = (ceiling(operand.rows, BLOCK_ROWS),)
        run.launch(unit, "k_quantise_block", arguments, grid, (operand.padded // 4,), *values)
    elif operand.depth >= DEEP_ROW:
        grid = (ceiling(operand.rows, DEEP_ROWS),)
        run.launch(unit, "k_quantise_deep_rows", arguments, grid, (THREADS,), *values)
    else:
        grid = (ceiling(operand.rows, THREADS // 32 * WARP_ROWS),)
        run.launch(unit, "k_quantise_rows", arguments, grid, (THREADS,), *values)


def column_tops(run: Run, x: int, tokens: int, columns: int, shards: int, tops: int) -> None:
    """tops int32 [shards, columns], zeros, become the largest magnitudes of x [shards, tokens, columns]."""
    grid = (ceiling(columns, 32), min(ceiling(tokens, TOPS_PIECE), 65535), shards)
    run.launch(linear_unit(run), "k_column_tops", "PiiP", grid, (32, 8), x, tokens, columns, tops)


def quantise_columns(run: Run, x: int, operand: Operand, shards: int, tops: int, totals: int, flag: int) -> None:
    """x [shards, depth, rows] with its columns as rows of the operand; totals (zeros, or 0 for none) get their sums."""
    grid = (ceiling(operand.rows, 64), operand.padded // 64, shards)
    run.launch(
        linear_unit(run),
        "k_quantise_columns",
        "PiiiPPPPP",
        grid,
        (THREADS,),
        *(x, operand.depth, operand.rows, operand.padded, tops, operand.planes, operand.exponents, totals, flag),
    )


def multiply(
    run: Run,
    a: Operand,
    b: Operand,
    out: int,
    *,
    bias: int = 0,
    add: bool = False,
    shards: int = 1,
    out_stride: int = 0,
) -> None:
    """out [a.rows, b.rows] = product (+ bias), or += where `add`; once for each shard."""
    unit, kernel = linear_unit(run), choose_kernel(run, a, b, shards)
    if kernel == "k_product_hopper":
        maps = [tensor_map(o.planes, o.rows, o.padded, shards, o.stride) for o in (a, b)]
        tiles = ceiling(a.rows, 128) * ceiling(b.rows, 128) * shards
        run.launch(
            unit,
            kernel,
            HOPPER_PRODUCT,
            (min(tiles, run.launch.card.processors),),
            (384,),
            *(*maps, a.exponents, b.exponents, bias, out, out_stride),
            *(a.rows, b.rows, a.padded, shards, int(add)),
            shared=HOPPER_SHARED,
        )
        return
    tile, threads = TILES[kernel]
    run.launch(
        unit,
        kernel,
        PRODUCT,
        (ceiling(a.rows, tile) * ceiling(b.rows, tile), 1, shards),
        (threads,),
        *(a.planes, b.planes, a.exponents, b.exponents, bias, out),
        *(a.stride, b.stride, out_stride, a.rows, b.rows, a.padded, int(add)),
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
        if tier == "debug":
            return {}
        return self._row_work(sizes.batch * sizes.context, operation.deep)

    def _row_work(self, tokens: int, depth: int) -> dict[str, BufferType]:
        return {"rows": planes(tokens, depth), "row_exponents": BufferType((tokens,), "int32")}

    def backward_work(self, operation: Linear, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        if tier == "debug":
            return {}
        tokens = sizes.batch * sizes.context
        wide, deep = operation.wide, operation.deep
        return self._row_work(tokens, wide) | {
            "dy": planes(wide, tokens // shards, shards),
            "dy_exponents": BufferType((shards, wide), "int32"),
            "x": planes(deep, tokens // shards, shards),
            "x_exponents": BufferType((shards, deep), "int32"),
        }

    def prepare(self, run: Run, operation: Linear) -> None:
        if run.tier == "debug":
            return
        weight, flag = run.parameter(operation.parameters["weight"]), run.flag(operation)
        tops = run.zeroed(operation, "weight_tops")
        quantise_rows(run, weight, self._weight_rows(run, operation), flag, tops)
        quantise_columns(run, weight, self._weight_columns(run, operation), 1, tops, 0, flag)

    def _weight_rows(self, run: Run, operation: Linear) -> Operand:
        places = (run.derived(operation, "rows"), run.derived(operation, "row_exponents"))
        return Operand(*places, operation.wide, operation.deep)

    def _weight_columns(self, run: Run, operation: Linear) -> Operand:
        places = (run.derived(operation, "columns"), run.derived(operation, "column_exponents"))
        return Operand(*places, operation.deep, operation.wide)

    def _token_rows(self, run: Run, operation: Linear, depth: int) -> Operand:
        places = (run.work(operation, "rows"), run.work(operation, "row_exponents"))
        return Operand(*places, run.tokens, depth)

    def forward(self, run: Run, operation: Linear) -> None:
        x, y = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["y"])
        bias = run.parameter(operation.parameters["bias"]) if "bias" in operation.parameters else 0
        if run.tier == "debug":
            weight, deep = run.parameter(operation.parameters["weight"]), operation.deep
            debug_product(run, (x, deep, 1), (weight, deep, 1), (run.tokens, operation.wide, deep), y, bias)
            return
        rows = self._token_rows(run, operation, operation.deep)
        # The backward pass quantises x by columns: their largest magnitudes are found on the way.
        tops = run.zeroed(operation, "x_tops") if run.training else 0
        quantise_rows(run, x, rows, run.flag(operation), tops, run.shards if run.training else 1)
        multiply(run, rows, self._weight_rows(run, operation), y, bias=bias)

    def backward(self, run: Run, operation: Linear) -> None:
        x, dx = run.tensor(operation.inputs["x"]), run.gradient(operation.inputs["x"])
        dy = run.gradient(operation.outputs["y"])
        gradient = run.parameter_gradient(operation.parameters["weight"])
        bias = run.parameter_gradient(operation.parameters["bias"]) if "bias" in operation.parameters else 0
        add = run.accumulates(operation, "x")
        if run.tier == "debug":
            self._backward_debug(run, operation, (x, dx, dy, gradient, bias), add)
            return
        flag, shards, depth = run.flag(operation), run.shards, run.shard_tokens
        rows = self._token_rows(run, operation, operation.wide)
        dy_tops = run.zeroed(operation, "dy_tops")
        left, right = (
            Operand(
                run.work(operation, role),
                run.work(operation, f"{role}_exponents"),
                width,
                depth,
                2 * width * padded(depth, STEP),
            )
            for role, width in (("dy", operation.wide), ("x", operation.deep))
        )
        totals = run.zeroed(operation, "dy_totals") if bias else 0
        quantise_rows(run, dy, rows, flag, dy_tops, shards)
        # Nothing on the way back needs the weight's gradient: it is computed beside what follows.
        with run.launch.beside():
            quantise_columns(run, x, right, shards, run.zeroed(operation, "x_tops"), 0, flag)
            quantise_columns(run, dy, left, shards, dy_tops, totals, flag)
            multiply(run, left, right, gradient, add=True, shards=shards, out_stride=run.set_stride)
            if bias:
                run.launch(
                    linear_unit(run),
                    "k_linear_bias_gradient",
                    "PPiPq",
                    (ceiling(operation.wide, THREADS), shards),
                    (THREADS,),
                    *(totals, left.exponents, operation.wide, bias, run.set_stride),
                )
        multiply(run, rows, self._weight_columns(run, operation), dx, add=add)

    def _backward_debug(self, run: Run, operation: Linear, places: tuple[int, int, int, int, int], add: bool) -> None:
        x, dx, dy, gradient, bias = places
        weight = run.parameter(operation.parameters["weight"])
        wide, deep, tokens = operation.wide, operation.deep, run.shard_tokens
        debug_product(run, (dy, wide, 1), (weight, 1, deep), (run.tokens, deep, wide), dx, 0, add=add)
        shard, sizes = (tokens * wide, tokens * deep, run.set_stride), (wide, deep, tokens)
        debug_product(run, (dy, 1, wide), (x, 1, deep), sizes, gradient, 0, add=True, shards=run.shards, shard=shard)
        if bias:
            run.launch(
                linear_unit(run),
                "k_debug_bias_gradient",
                "PiiPq",
                (ceiling(wide, THREADS), run.shards),
                (THREADS,),
                *(dy, tokens, wide, bias, run.set_stride),
            )


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
