"""Attention on the card, in tiles of the definition's 64 queries by 64 keys; no score ever reaches global memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from engine.backends.cuda.card import Card
from engine.backends.cuda.compiler import HOPPER
from engine.backends.cuda.run import MASK, THREADS, Run, ceiling, padded
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.twin import Twin
from engine.errors import PlanRefused
from engine.operations.attention import Attention
from engine.operations.base import BufferType, Sizes

TILE = 64
BLOCK = 128
QUANTISED = "PiiPPPPPiiii"
SIZES = "iiiiiiqf4x"
NOTHING = 12 * (0,)
# Rows of what stands beside a tile, as in attention.cu.
KEY_FACTOR, VALUE_FACTOR, KEY_FOLD = range(3)
QUERY_FACTOR, DOUT_FACTOR, QUERY_FOLD, DOUT_FOLD = range(4)
FORWARD_ROWS, KEY_ROWS, QUERY_ROWS = 2, 3, 7
NO_ROW = -1
# Shared memory beside tiles: for each stage dropout's mask and what stands beside a tile; what the driver takes.
FIXED_STAGE = TILE * TILE + 4 * QUERY_ROWS * TILE
FIXED_SHARED = 2048
TILE_ALIGNMENT = 512  # of tiles in shared memory, where warpgroup instructions read them
# Up to these exponents a tensor is usual: the scales of a product fit into two fp32 factors.
USUAL = {"q": 60, "k": 60, "v": 30, "do": 100}


def head_padded(operation: Attention) -> int:
    return padded(operation.width, 32)


@dataclass(frozen=True)
class Shape:
    """How the kernels of one padded head width use shared memory, as macros of attention.cu."""

    stages: int  # tiles of a loop at once
    columns: int  # whether column planes are copied too

    def bytes(self, wide: int) -> dict[str, int]:
        """Shared memory that each kernel asks for."""
        row, column = TILE * wide, TILE * wide * self.columns
        return {
            "k_attn_fwd": 2 * row + self.stages * (2 * row + 2 * column),
            "k_attn_bwd_queries": 4 * row + self.stages * (4 * row + 2 * column),
            "k_attn_bwd_keys": 4 * row + self.stages * (4 * row + 4 * column) + 4 * TILE * TILE,
        }

    def macros(self, wide: int, capability: int) -> dict[str, int]:
        warpgroup = int(capability == HOPPER and bool(self.columns))
        return {"DP": wide, "STAGES": self.stages, "COLUMNS": self.columns, "WARPGROUP": warpgroup}

    def most_bytes(self, wide: int) -> int:
        """That a block of any kernel takes in all."""
        return max(self.bytes(wide).values()) + self.stages * FIXED_STAGE + FIXED_SHARED


def shape_within(wide: int, limit: int) -> Shape | None:
    """The fastest that fits into `limit` bytes of a block's shared memory."""
    shapes = [Shape(2, 1), Shape(1, 1)] if wide <= 64 else [Shape(2, 0)]
    return next((shape for shape in [*shapes, SMALLEST] if shape.most_bytes(wide) <= limit), None)


SMALLEST = Shape(1, 0)


class AttentionTwin(Twin[Attention]):
    def _planes(self, operation: Attention, sizes: Sizes) -> BufferType:
        heads = sizes.batch * operation.heads
        return BufferType((2, heads, padded(sizes.context, TILE), head_padded(operation)), "int8")

    def _per_token(self, operation: Attention, sizes: Sizes) -> BufferType:
        return BufferType((sizes.batch * operation.heads, padded(sizes.context, TILE)), "int32")

    def _beside(self, operation: Attention, sizes: Sizes, rows: int) -> BufferType:
        """Numbers that stand beside each tile of tokens."""
        return BufferType((sizes.batch * operation.heads, ceiling(sizes.context, TILE), rows, TILE), "float32")

    def check(self, operation: Attention, card: Card) -> None:
        wide = head_padded(operation)
        if not shape_within(wide, card.shared_limit):
            raise PlanRefused(
                f"heads of width {operation.width} need {SMALLEST.most_bytes(wide) / 1024:.0f} KiB of shared memory "
                f"in a block, {card.name} has {card.shared_limit / 1024:.0f} KiB: use more heads, or set run.device "
                "to cpu"
            )

    def forward_work(self, operation: Attention, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        planes = {role: self._planes(operation, sizes) for role in ("q", "k", "v_columns")}
        exponents = {role: self._per_token(operation, sizes) for role in ("sq", "sk", "sv")}
        return planes | exponents | {"side": self._beside(operation, sizes, FORWARD_ROWS)}

    def zeroed(self, operation: Attention, tier: str, shards: int) -> dict[str, BufferType]:
        one = BufferType((1,), "int32")
        return {"forward_unusual": one, "backward_unusual": one}

    def backward_work(self, operation: Attention, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        roles = ("q", "k", "v", "do", "q_columns", "k_columns", "do_columns")
        work = {role: self._planes(operation, sizes) for role in roles}
        tiles = BufferType((sizes.batch * operation.heads, ceiling(sizes.context, TILE)), "int32")
        work |= {role: self._per_token(operation, sizes) for role in ("sq", "sk", "sv", "sdo")}
        work |= {role: tiles for role in ("least_q", "least_k", "least_do")}
        return work | {
            "query_side": self._beside(operation, sizes, QUERY_ROWS),
            "key_side": self._beside(operation, sizes, KEY_ROWS),
        }

    def _shape(self, run: Run, operation: Attention) -> Shape:
        shape = shape_within(head_padded(operation), run.launch.card.shared_limit)
        if shape is None:
            raise AssertionError("check was not called")
        return shape

    def _unit(self, run: Run, operation: Attention) -> Unit:
        macros = self._shape(run, operation).macros(head_padded(operation), run.launch.card.capability)
        return Unit("attention", macros)

    def _shared(self, run: Run, operation: Attention) -> dict[str, int]:
        """Dynamic shared memory of each kernel, with what its tiles' alignment may take."""
        kernels = self._shape(run, operation).bytes(head_padded(operation))
        return {name: size + TILE_ALIGNMENT for name, size in kernels.items()}

    def _quantise(
        self,
        run: Run,
        operation: Attention,
        tensors: Sequence[tuple[int, ...]],
        numbers: tuple[int, int, int],
        unusual: int,
    ) -> None:
        """Up to four tensors, each as struct Quantised; numbers: y, maxima and normalisers if the fourth is dout."""
        sizes = run.sizes
        count = len(tensors)
        tensors = (*tensors, *(4 - count) * [NOTHING])
        run.launch(
            self._unit(run, operation),
            "k_attn_quantise",
            f"{4 * QUANTISED}PPPiiiiPP",
            (ceiling(sizes.context, TILE), sizes.batch * operation.heads, count),
            (THREADS,),
            *(value for tensor in tensors for value in tensor),
            *numbers,
            *(operation.heads, operation.width, sizes.context, padded(sizes.context, TILE)),
            *(unusual, run.flag(operation)),
        )

    def _sizes(self, run: Run, operation: Attention) -> tuple[int | float, ...]:
        sizes = run.sizes
        scale = float(np.float32(1.0 / sqrt(operation.width)))
        numbers = (sizes.batch, operation.heads, operation.width, sizes.context, padded(sizes.context, TILE))
        return (*numbers, operation.context, run.first_row, scale)

    def forward(self, run: Run, operation: Attention) -> None:
        qkv, sizes = run.tensor(operation.inputs["qkv"]), run.sizes
        unusual = run.zeroed(operation, "forward_unusual")
        inner, heads = operation.heads * operation.width, sizes.batch * operation.heads
        w = {role: run.work(operation, role) for role in self.forward_work(operation, sizes, run.tier)}
        side = (w["side"], FORWARD_ROWS)
        self._quantise(
            run,
            operation,
            [
                (qkv, 3 * inner, 0, w["q"], 0, w["sq"], 0, *side, NO_ROW, NO_ROW, USUAL["q"]),
                (qkv, 3 * inner, inner, w["k"], 0, w["sk"], 0, *side, KEY_FACTOR, NO_ROW, USUAL["k"]),
                (qkv, 3 * inner, 2 * inner, 0, w["v_columns"], w["sv"], 0, *side, VALUE_FACTOR, NO_ROW, USUAL["v"]),
            ],
            (0, 0, 0),
            unusual,
        )
        unit = self._unit(run, operation)
        run.launch(
            unit,
            "k_attn_fwd",
            f"10P{SIZES}{MASK}PPP",
            (ceiling(sizes.context, TILE), heads),
            (BLOCK,),
            *(w[role] for role in ("q", "k", "v_columns", "sq", "sk", "sv", "side")),
            *(run.tensor(operation.outputs[r]) for r in ("y", "maxima", "normalisers")),
            *self._sizes(run, operation),
            *run.mask(operation.probability, operation.site),
            *(run.values, unusual, run.flag(operation)),
            shared=self._shared(run, operation)["k_attn_fwd"],
        )

    def backward(self, run: Run, operation: Attention) -> None:
        qkv, sizes = run.tensor(operation.inputs["qkv"]), run.sizes
        unusual = run.zeroed(operation, "backward_unusual")
        dqkv, dout = run.gradient(operation.inputs["qkv"]), run.gradient(operation.outputs["y"])
        inner, heads = operation.heads * operation.width, sizes.batch * operation.heads
        w = {role: run.work(operation, role) for role in self.backward_work(operation, sizes, run.tier, run.shards)}
        queries, keys = (w["query_side"], QUERY_ROWS), (w["key_side"], KEY_ROWS)
        planes = {n: (w[n], w[f"{n}_columns"], w[f"s{n}"], w[f"least_{n}"]) for n in ("q", "k", "do")}
        self._quantise(
            run,
            operation,
            [
                (qkv, 3 * inner, 0, *planes["q"], *queries, QUERY_FACTOR, QUERY_FOLD, USUAL["q"]),
                (qkv, 3 * inner, inner, *planes["k"], *keys, KEY_FACTOR, KEY_FOLD, USUAL["k"]),
                (qkv, 3 * inner, 2 * inner, w["v"], 0, w["sv"], 0, *keys, VALUE_FACTOR, NO_ROW, USUAL["v"]),
                (dout, inner, 0, *planes["do"], *queries, DOUT_FACTOR, DOUT_FOLD, USUAL["do"]),
            ],
            tuple(run.tensor(operation.outputs[r]) for r in ("y", "maxima", "normalisers")),  # type: ignore[arg-type]
            unusual,
        )
        roles = ["q", "k", "v", "do", "q_columns", "k_columns", "do_columns", "sq", "sk", "sv", "sdo"]
        roles += ["least_q", "least_k", "least_do", "query_side", "key_side"]
        arguments = (
            *(w[role] for role in roles),
            dqkv,
            *self._sizes(run, operation),
            *run.mask(operation.probability, operation.site),
            *(run.values, unusual, run.flag(operation)),
        )
        unit = self._unit(run, operation)
        shared = self._shared(run, operation)
        grid = (ceiling(sizes.context, TILE), heads)
        for name, threads in (("k_attn_bwd_queries", BLOCK), ("k_attn_bwd_keys", 2 * BLOCK)):
            run.launch(unit, name, f"17P{SIZES}{MASK}PPP", grid, (threads,), *arguments, shared=shared[name])
