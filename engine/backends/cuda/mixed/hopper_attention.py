"""Attention by our own kernels on compute capability 9.0 (attention_hopper_mixed.cu): all rows of a call at once.

Dropout is a function of the place in the batch, 16 bits for each pair of a query and a key.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from engine.backends.cuda.compiler import HOPPER
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.flash import OWN_KERNELS, Heads, Places
from engine.backends.cuda.run import MASK, MaskArguments, ceiling, padded
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.tensor_maps import BEFORE_MAPS, heads_map

TILE = 64  # as in attention_hopper_mixed.cu
CACHED = 16 << 20  # bytes of keys and values that should stay in the card's cache
ARGUMENTS = f"PPPiiiiif{MASK}4x"  # struct Attention, whole in eight bytes
SPARE = 1024  # bytes: tiles are moved to a multiple of it
SHORT_TILES, SHORT_WIDTH, SHORT_GROUPS = 4, 32, 2  # of a head that one block takes in the backward pass, at most


@dataclass(frozen=True)
class Form:
    """How one kernel takes its work: warpgroups of a block, blocks that share a processor, tiles under way, and whether
    blocks stay and take item after item, with a warpgroup more that copies."""

    groups: int
    blocks: int
    stages: int
    stays: bool = False


@dataclass(frozen=True)
class Shape:
    """The forms of the kernels of one padded width of a head."""

    forward: Form
    queries: Form
    keys: Form


# The fastest of those tried on an H200 (docs/prod.md).
SHAPES = {
    32: Shape(Form(1, 4, 4), Form(1, 4, 4), Form(1, 3, 4)),
    64: Shape(Form(2, 2, 4), Form(1, 3, 3), Form(2, 1, 5, stays=True)),
    128: Shape(Form(2, 1, 4), Form(2, 1, 4), Form(2, 1, 4)),
}


def serves(capability: int) -> bool:
    """Whether these kernels serve on a card, for all that the tier prod takes there; else cuDNN does."""
    return capability == HOPPER


def decision_mask(probability: float, site: int) -> MaskArguments:
    """Site, threshold of 16 bits, and the factor of what is kept: the probability is rounded to 1/65536."""
    threshold = min(round(probability * 65536), 65535)
    return site, threshold, float(np.float32(65536 / (65536 - threshold)))


def padded_width(width: int) -> int:
    return next(wide for wide in SHAPES if wide >= width)


def numbers_bytes(heads: Heads, rows: int) -> int:
    """What the backward pass keeps of queries, but for short heads: two fp32 numbers each, and a count."""
    return 8 * rows * heads.heads * padded(heads.context, TILE) + 4


def kernels_unit(dtype: str, wide: int, dropout: bool) -> Unit:
    """The kernels of one padded width."""
    shape = SHAPES[wide]
    macros = {
        "HALF_BF16": int(dtype == "bfloat16"),
        "DP": wide,
        "DROPOUT": int(dropout),
    }
    for name, form in (("FORWARD", shape.forward), ("QUERY", shape.queries), ("KEY", shape.keys)):
        macros |= {f"{name}_GROUPS": form.groups, f"{name}_BLOCKS": form.blocks, f"{name}_STAGES": form.stages}
    return Unit("attention_hopper_mixed", macros | {"KEYS_STAY": int(shape.keys.stays)})


def is_short(heads: Heads) -> bool:
    """Whether one block takes a whole head in the backward pass."""
    return padded_width(heads.width) <= SHORT_WIDTH and heads.context <= SHORT_TILES * TILE


class HopperAttention:
    """Attention on one stream."""

    name = OWN_KERNELS

    def __init__(self, launch: Launcher, dtype: str) -> None:
        self._launch = launch
        self._dtype = dtype

    def forward(self, heads: Heads, rows: int, places: Places) -> None:
        """Write y [rows, T, d] and stats [rows, heads, T] fp32."""
        wide = padded_width(heads.width)
        form = SHAPES[wide].forward
        tile = 2 * TILE * wide
        size = 2 * tile * form.stages + tile * form.groups + SPARE
        tiles = ceiling(heads.context, form.groups * TILE)
        self._run("k_attention_forward", tiles, form.groups, size, heads, rows, places)

    def backward(self, heads: Heads, rows: int, places: Places) -> None:
        """Write dqkv [rows, T, 3 d]."""
        wide = padded_width(heads.width)
        shape, tile = SHAPES[wide], 2 * TILE * wide
        if is_short(heads):
            scores, parked = 2 * TILE * TILE, 2 * tile
            size = 4 * SHORT_TILES * tile + SHORT_GROUPS * (scores + parked) + SPARE
            self._run("k_attention_short", 1, SHORT_GROUPS, size, heads, rows, places, padded(heads.context, TILE))
            return
        for name, form, lefts, beside in (
            ("k_attention_queries", shape.queries, 3, 0),
            ("k_attention_keys", shape.keys, 2, SPARE),
        ):
            size = (2 * tile + beside) * form.stages + (1 + form.stays) * lefts * tile * form.groups + SPARE
            tiles = ceiling(heads.context, form.groups * TILE)
            self._run(name, tiles, form.groups + form.stays, size, heads, rows, places, stay=form.blocks * form.stays)

    def _run(
        self,
        name: str,
        tiles: int,
        groups: int,
        shared: int,
        heads: Heads,
        rows: int,
        places: Places,
        box: int = TILE,
        stay: int = 0,
    ) -> None:
        """A block for each of a head's `tiles`, or so many on each processor that `stay`, reading boxes of so many
        tokens."""
        wide, every = padded_width(heads.width), rows * heads.heads
        # As many heads at once as the cache holds, in parts of about the same size.
        parts = ceiling(every, max(1, CACHED // (4 * heads.context * heads.width)))
        self._launch(
            kernels_unit(self._dtype, wide, places.mask[1] > 0),
            name,
            BEFORE_MAPS + 4 * "128s" + ARGUMENTS,
            (min(tiles * every, stay * self._launch.card.processors) if stay else tiles * every,),
            (128 * groups,),
            *self._maps(heads, rows, places, box),
            *(places.stats, places.workspace, places.values),
            *(heads.heads, heads.context, rows, places.first_row, ceiling(every, parts)),
            1.0 / sqrt(heads.width),
            *places.mask,
            shared=shared,
        )

    def _maps(self, heads: Heads, rows: int, places: Places, tokens: int) -> list[bytes]:
        """Of qkv, y, dy and dqkv; those that the backward pass reads in boxes of so many tokens."""
        width = min(padded_width(heads.width), 64)
        return [
            heads_map(address, self._dtype, (rows, heads.context, tensors * heads.heads, heads.width), (box, width))
            if address
            else bytes(128)
            for address, tensors, box in (
                (places.qkv, 3, tokens),
                (places.y, 1, tokens),
                (places.dy, 1, tokens),
                (places.dqkv, 3, TILE),
            )
        ]
