"""The product at the end of a branch, the residual sum and LayerNorm in one kernel, on compute capability 9.0
(norm_hopper_mixed.cu)."""

from dataclasses import dataclass

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.run import MASK, ceiling
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import BEFORE_MAPS, matrix_map

ROWS, DEPTH = 64, 64  # as in norm_hopper_mixed.cu: of a block, of a stage
PARTS = 2  # in which a stage's weight is copied
THREADS = 288
SPARE = 1024  # bytes: stages are moved to a multiple of it
STAGES = {128: 6, 256: 5, 384: 3}  # of the depth under way, by the widths that there are kernels for


def serves_width(width: int) -> bool:
    """Whether a block holds whole rows of this width."""
    return width in STAGES


def shared(width: int) -> int:
    """Bytes of dynamic shared memory."""
    return STAGES[width] * 2 * DEPTH * (ROWS + width) + SPARE


def kernel_unit(dtype: str, width: int) -> Unit:
    macros = {"HALF_BF16": int(dtype == "bfloat16"), "WIDTH": width, "STAGES": STAGES[width]}
    return Unit("norm_hopper_mixed", macros)


@dataclass(frozen=True)
class Product:
    """left [tokens, depth] times weight [W, depth] transposed, both 16-bit, at these addresses."""

    left: int
    weight: int
    depth: int


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Where the rest stands, as struct Norm. x, sum and y are 16-bit [tokens, W]; branch_bias and LayerNorm's gain and
    bias fp32 [W], 0 where there is none; mean and rstd fp32 [tokens]. dropout: the number of sum's first element, site,
    threshold, factor, address of the step's numbers."""

    x: int
    branch_bias: int
    gain: int
    bias: int
    sum: int
    y: int
    mean: int
    rstd: int
    dropout: tuple[int, int, int, float, int]


class HopperNorm:
    """On one stream, for rows of the widths that serves_width names."""

    def __init__(self, launch: Launcher, dtype: str) -> None:
        self._launch = launch
        self._dtype = dtype

    def __call__(self, sizes: tuple[int, int], product: Product, norm: Norm) -> None:
        """sum = x + dropout(product + branch_bias), y = LayerNorm(sum), mean and rstd its statistics, for `sizes` =
        tokens and W."""
        (tokens, width), depth = sizes, product.depth
        self._launch(
            kernel_unit(self._dtype, width),
            "k_product_norm",
            BEFORE_MAPS + 2 * "128s" + f"iiPPPPPPPPq{MASK}P",
            (ceiling(tokens, ROWS),),
            (THREADS,),
            matrix_map(product.left, self._dtype, (1, tokens, depth), depth, (ROWS, DEPTH)),
            matrix_map(product.weight, self._dtype, (1, width, depth), depth, (width // PARTS, DEPTH)),
            *(tokens, depth, norm.x, norm.branch_bias, norm.gain, norm.bias),
            *(norm.sum, norm.y, norm.mean, norm.rstd, *norm.dropout),
            shared=shared(width),
        )
