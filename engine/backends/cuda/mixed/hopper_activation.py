"""The MLP's way back through its activation on compute capability 9.0, in one kernel (activation_hopper_mixed.cu)."""

from dataclasses import dataclass

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.run import ceiling
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import BEFORE_MAPS, matrix_map

ROWS, COLUMNS, DEPTH, BOX = 128, 128, 64, 64  # as in activation_hopper_mixed.cu: of a tile, a stage, a box
PAIRED = 2  # tiles of a cluster, one above the other
SUM_ROWS = 64
THREADS = 640
SPARE = 1024  # bytes: tiles are moved to a multiple of it


@dataclass(frozen=True)
class Form:
    """Stages of the depth under way, and tiles for whose part of the activation's input there is room."""

    stages: int
    tiles: int

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * 2 * DEPTH * (ROWS + COLUMNS) + self.tiles * 2 * ROWS * COLUMNS + SPARE


# The fastest of those tried on an H200 (docs/prod.md); which it is moves no bit.
DEEP, SHALLOW = Form(5, 1), Form(4, 2)
LEAST_DEEP = 512


def form_of(width: int) -> Form:
    return DEEP if width >= LEAST_DEEP else SHALLOW


def kernel_unit(dtype: str, relu: bool, sums: bool, form: Form) -> Unit:
    """The kernel of one activation, with or without sums for a bias."""
    macros = {"HALF_BF16": int(dtype == "bfloat16"), "RELU": int(relu), "SUMS": int(sums)}
    return Unit("activation_hopper_mixed", macros | {"STAGES": form.stages, "TILES": form.tiles})


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
        form = form_of(width)
        maps = (
            matrix_map(dy, self._dtype, (1, tokens, width), width, (ROWS, DEPTH)),
            matrix_map(weight, self._dtype, (1, width, hidden), hidden, (DEPTH // PAIRED, BOX)),
            *(matrix_map(x, self._dtype, (1, tokens, hidden), hidden, (BOX, BOX)) for x in (before, dbefore)),
        )
        clusters = ceiling(tokens, PAIRED * ROWS) * ceiling(hidden, COLUMNS)
        self._launch(
            kernel_unit(self._dtype, relu, parts != 0, form),
            "k_sloped_product",
            BEFORE_MAPS + 4 * "128s" + "Piii",
            (PAIRED * min(self._launch.card.processors // PAIRED, clusters),),
            (THREADS,),
            *maps,
            *(parts, tokens, width, hidden),
            shared=form.shared,
        )
