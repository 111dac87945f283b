"""The MLP's products beside its activation on compute capability 9.0 (activation_hopper_mixed.cu)."""

from dataclasses import dataclass

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.run import ceiling
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import BEFORE_MAPS, matrix_map

ROWS, COLUMNS, DEPTH, BOX = 128, 128, 64, 64  # as in activation_hopper_mixed.cu: of a tile, a stage, a box
PAIRED = 2  # tiles of a cluster, one above the other
SUM_ROWS = 64  # that a part of the bias's gradient is the sum of
THREADS = 640
SPARE = 1024  # bytes: tiles are moved to a multiple of it


@dataclass(frozen=True)
class Form:
    """Stages of the depth under way, tiles for whose results there is room, and whether these are two tensors."""

    stages: int
    tiles: int
    both: bool = False

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * 2 * DEPTH * (ROWS + COLUMNS) + (1 + self.both) * self.tiles * 2 * ROWS * COLUMNS + SPARE


# The fastest of those tried on an H200 (docs/prod.md); which it is moves no bit.
DEEP, SHALLOW, FORWARD = Form(5, 1), Form(4, 2), Form(5, 1, both=True)
LEAST_DEEP = 512


def form_of(width: int) -> Form:
    return DEEP if width >= LEAST_DEEP else SHALLOW


def kernel_unit(dtype: str, relu: bool, bias: bool, form: Form) -> Unit:
    """The kernel of one activation, forward where the form has both results, with or without a bias."""
    macros = {"HALF_BF16": int(dtype == "bfloat16"), "RELU": int(relu), "BIAS": int(bias), "BACK": int(not form.both)}
    return Unit("activation_hopper_mixed", macros | {"STAGES": form.stages, "TILES": form.tiles})


class HopperActivation:
    """On one stream."""

    def __init__(self, launch: Launcher, dtype: str) -> None:
        self._launch = launch
        self._dtype = dtype

    def forward(
        self, sizes: tuple[int, int, int], x: int, weight: int, bias: int, before: int, after: int, relu: bool
    ) -> None:
        """before [tokens, hidden] = x [tokens, width] times weight [hidden, width] transposed, plus bias [hidden] where
        it is not 0, and after = the activation of it, for `sizes` = tokens, width, hidden, the latter two multiples
        of 8."""
        self._run(FORWARD, sizes, x, weight, (before, after), relu, bias, 0)

    def backward(
        self, sizes: tuple[int, int, int], dy: int, weight: int, before: int, dbefore: int, relu: bool, parts: int
    ) -> None:
        """dbefore [tokens, hidden] = (dy [tokens, width] times weight [width, hidden]) times the activation's
        derivative at `before`, for `sizes` = tokens, width, hidden, the latter two multiples of 8. Where `parts` is not
        0, fp32 parts [tokens / SUM_ROWS, hidden] are the sums of SUM_ROWS tokens each."""
        self._run(form_of(sizes[1]), sizes, dy, weight, (before, dbefore), relu, 0, parts)

    def _run(
        self,
        form: Form,
        sizes: tuple[int, int, int],
        left: int,
        weight: int,
        results: tuple[int, int],
        relu: bool,
        bias: int,
        parts: int,
    ) -> None:
        tokens, width, hidden = sizes
        if form.both:
            shape, box = (hidden, width), (COLUMNS // PAIRED, DEPTH)
        else:
            shape, box = (width, hidden), (DEPTH // PAIRED, BOX)
        maps = (
            matrix_map(left, self._dtype, (1, tokens, width), width, (ROWS, DEPTH)),
            matrix_map(weight, self._dtype, (1, *shape), shape[1], box),
            *(matrix_map(x, self._dtype, (1, tokens, hidden), hidden, (BOX, BOX)) for x in results),
        )
        clusters = ceiling(tokens, PAIRED * ROWS) * ceiling(hidden, COLUMNS)
        self._launch(
            kernel_unit(self._dtype, relu, bool(bias or parts), form),
            "k_activation_product",
            BEFORE_MAPS + 4 * "128s" + "PPiii",
            (PAIRED * min(self._launch.card.processors // PAIRED, clusters),),
            (THREADS,),
            *maps,
            *(bias, parts, tokens, width, hidden),
            shared=form.shared,
        )
