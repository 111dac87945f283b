"""Products of linear layers: on integer tensor cores, exact before one rounding; in the tier debug, fp32 in order."""

from dataclasses import dataclass
from typing import Any

from engine.backends.cuda.compiler import HOPPER
from engine.backends.cuda.quantising import Operand
from engine.backends.cuda.run import MASK, NO_MASK, MaskArguments, Run, ceiling
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import BEFORE_MAPS, tensor_map

STAGE_DEPTH = 64  # of the kernels that run on every architecture
INT32_DEPTH = 65536  # up to this depth sums of products fit in int32
EPILOGUE = f"PPPq{MASK}i"  # struct Epilogue of epilogue.cuh
PRODUCT = f"PPPPPqqqiiii{EPILOGUE}"
HOPPER_PRODUCT = f"{BEFORE_MAPS}128s128sPPPqiiii{EPILOGUE}"
HOPPER_SHARED = 3 * 65536 + 1024


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
    if a.padded > INT32_DEPTH:
        return "k_product_deep"
    if card.capability == HOPPER:
        return "k_product_hopper"
    tiles = ceiling(a.rows, 128) * ceiling(b.rows, 128) * shards
    return "k_product_small" if tiles < card.processors // 2 else "k_product_large"


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
