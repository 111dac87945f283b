"""The MLP's way back through its activation on compute capability 9.0, in one kernel (activation_hopper_mixed.cu)."""

from dataclasses import dataclass

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.run import ceiling
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import BEFORE_MAPS, matrix_map

ROWS, COLUMNS, DEPTH, BOX = 128, 128, 64, 64  # as in activation_hopper_mixed.cu: of a tile, a stage, a box
SUM_ROWS = 64
THREADS = 640
SPARE = 1024  # bytes: tiles are moved to a multiple of it


@dataclass(frozen=True)
class Form:
    """Neighbouring tiles that a cluster takes, stages under way, and tiles for whose activation's input there is room."""

    down: int
    right: int
    stages: int
    tiles: int


FORM = Form(2, 1, 5, 1)


def kernel_unit(dtype: str, relu: bool, sums: bool) -> Unit:
    """The kernel of one activation, with or without sums for a bias."""
    macros = {"HALF_BF16": int(dtype == "bfloat16"), "RELU": int(relu), "SUMS": int(sums)}
    macros |= {"CLUSTER_ROWS": FORM.down, "CLUSTER_COLUMNS": FORM.right, "STAGES": FORM.stages, "TILES": FORM.tiles}
    return Unit("activation_hopper_mixed", macros)


class HopperActivation:
    """On one stream."""

    def __init__(self, launch: Launcher, dtype: str) -> None:
        self._launch = launch
        self._dtype = dtype

    def backward(
        self, sizes: tuple[int, int, int], dy: int, weight: int, before: int, dbefore: int, relu: bool, parts: int
    ) -> None:
        """dbefore [tokens, hidden] = (dy [tokens, width] times weight [width, hidden]) times the activation's
        derivative at `before`, for `sizes` = tokens, width, hidden, the latter two multiples of 8. Where `parts` is not
        0, fp32 parts [tokens / SUM_ROWS, hidden] are the sums of SUM_ROWS tokens each."""
        tokens, width, hidden = sizes
        form, card = FORM, self._launch.card
        maps = (
            matrix_map(dy, self._dtype, (1, tokens, width), width, (ROWS // form.right, DEPTH)),
            matrix_map(weight, self._dtype, (1, width, hidden), hidden, (DEPTH // form.down, BOX)),
            *(matrix_map(x, self._dtype, (1, tokens, hidden), hidden, (BOX, BOX)) for x in (before, dbefore)),
        )
        tiles = ceiling(tokens, form.down * ROWS) * ceiling(hidden, form.right * COLUMNS)
        cluster = form.down * form.right
        stage = 2 * DEPTH * (ROWS + COLUMNS)
        self._launch(
            kernel_unit(self._dtype, relu, parts != 0),
            "k_sloped_product",
            BEFORE_MAPS + 4 * "128s" + "Piii",
            (cluster * min(card.processors // cluster, tiles),),
            (THREADS,),
            *maps,
            *(parts, tokens, width, hidden),
            shared=stage * form.stages + 2 * ROWS * COLUMNS * form.tiles + SPARE,
        )
