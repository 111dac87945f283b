"""Attention on the card, in tiles of the definition's 64 queries by 64 keys; no score ever reaches global memory."""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from engine.backends.cuda.run import MASK, THREADS, Run, ceiling, padded
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.twin import Twin
from engine.operations.attention import Attention
from engine.operations.base import BufferType, Sizes

TILE = 64
BLOCK = 128
QUANTISED = "PiiPPPPPq"
SIZES = "iiiiiiqf4x"
NOTHING = (0, 0, 0, 0, 0, 0, 0, 0, 0)
# Up to these exponents a tensor is usual: the scales of a product fit into two fp32 factors.
USUAL = {"q": 60, "k": 60, "v": 30, "do": 100}


def head_padded(operation: Attention) -> int:
    return padded(operation.width, 32)


def attention_unit(operation: Attention) -> Unit:
    return Unit("attention", {"DP": head_padded(operation)})


class AttentionTwin(Twin[Attention]):
    def _planes(self, operation: Attention, sizes: Sizes) -> BufferType:
        heads = sizes.batch * operation.heads
        return BufferType((2, heads, padded(sizes.context, TILE), head_padded(operation)), "int8")

    def _per_token(self, operation: Attention, sizes: Sizes, dtype: str) -> BufferType:
        return BufferType((sizes.batch * operation.heads, padded(sizes.context, TILE)), dtype)

    def forward_work(self, operation: Attention, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        planes = {role: self._planes(operation, sizes) for role in ("q", "k", "v_columns")}
        integers = self._per_token(operation, sizes, "int32")
        return planes | {role: integers for role in ("sq", "sk", "sv", "running")}

    def zeroed(self, operation: Attention, tier: str, shards: int) -> dict[str, BufferType]:
        one = BufferType((1,), "int32")
        return {"forward_unusual": one, "backward_unusual": one}

    def backward_work(self, operation: Attention, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        roles = ("q", "k", "v", "do", "q_columns", "k_columns", "do_columns")
        work = {role: self._planes(operation, sizes) for role in roles}
        integers = self._per_token(operation, sizes, "int32")
        floats = self._per_token(operation, sizes, "float32")
        tiles = BufferType((sizes.batch * operation.heads, ceiling(sizes.context, TILE)), "int32")
        work |= {role: integers for role in ("sq", "sk", "sv", "sdo")}
        work |= {role: tiles for role in ("least_q", "least_k", "least_do")}
        return work | {role: floats for role in ("fold_q", "fold_k", "fold_do", "delta")}

    def _quantise(self, run: Run, operation: Attention, tensors: Sequence[tuple[int, ...]], unusual: int) -> None:
        """Each tensor: source, its width, first column, row planes, column planes, exponents, leasts, folds, and the
        largest exponent that is usual."""
        sizes = run.sizes
        count = len(tensors)
        tensors = (*tensors, *(4 - count) * [NOTHING])
        run.launch(
            attention_unit(operation),
            "k_attn_quantise",
            f"{4 * QUANTISED}iiiiPP",
            (ceiling(sizes.context, TILE), sizes.batch * operation.heads, count),
            (THREADS,),
            *(value for tensor in tensors for value in tensor),
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
        self._quantise(
            run,
            operation,
            [
                (qkv, 3 * inner, 0, w["q"], 0, w["sq"], 0, 0, USUAL["q"]),
                (qkv, 3 * inner, inner, w["k"], 0, w["sk"], 0, 0, USUAL["k"]),
                (qkv, 3 * inner, 2 * inner, 0, w["v_columns"], w["sv"], 0, 0, USUAL["v"]),
            ],
            unusual,
        )
        unit, tokens = attention_unit(operation), padded(sizes.context, TILE)
        grid = (ceiling(heads, THREADS // 32),)
        arguments = (w["sv"], heads, tokens, w["running"])
        run.launch(unit, "k_attn_running_least", "PiiP", grid, (THREADS,), *arguments)
        wide = head_padded(operation)
        columns = 2 * wide * (TILE + 16) if wide <= 64 else 0
        run.launch(
            unit,
            "k_attn_fwd",
            f"10P{SIZES}{MASK}PPP",
            (tokens // TILE, heads),
            (BLOCK,),
            *(w[role] for role in ("q", "k", "v_columns", "sq", "sk", "sv", "running")),
            *(run.tensor(operation.outputs[r]) for r in ("y", "maxima", "normalisers")),
            *self._sizes(run, operation),
            *run.mask(operation.probability, operation.site),
            *(run.values, unusual, run.flag(operation)),
            shared=4 * TILE * (wide + 16) + columns,
        )

    def backward(self, run: Run, operation: Attention) -> None:
        qkv, sizes, tokens = run.tensor(operation.inputs["qkv"]), run.sizes, padded(run.sizes.context, TILE)
        unusual = run.zeroed(operation, "backward_unusual")
        dqkv, dout = run.gradient(operation.inputs["qkv"]), run.gradient(operation.outputs["y"])
        inner, heads = operation.heads * operation.width, sizes.batch * operation.heads
        w = {role: run.work(operation, role) for role in self.backward_work(operation, sizes, run.tier, run.shards)}
        sources = (("q", qkv, 3 * inner, 0), ("k", qkv, 3 * inner, inner), ("do", dout, inner, 0))
        self._quantise(
            run,
            operation,
            [
                (source, width, at, w[n], w[f"{n}_columns"], w[f"s{n}"], w[f"least_{n}"], w[f"fold_{n}"], USUAL[n])
                for n, source, width, at in sources
            ]
            + [(qkv, 3 * inner, 2 * inner, w["v"], 0, w["sv"], 0, 0, USUAL["v"])],
            unusual,
        )
        unit, items = attention_unit(operation), run.tokens * operation.heads
        out, maxima, normalisers = (run.tensor(operation.outputs[r]) for r in ("y", "maxima", "normalisers"))
        run.launch(
            unit,
            "k_attn_delta",
            "PPqiiiiP",
            (ceiling(items, THREADS // 32),),
            (THREADS,),
            *(out, dout, items, operation.heads, operation.width, sizes.context, tokens, w["delta"]),
        )
        roles = [*("q", "k", "v", "do", "q_columns", "k_columns", "do_columns", "sq", "sk", "sv", "sdo")]
        roles += [f"{kind}_{tensor}" for kind in ("least", "fold") for tensor in ("q", "k", "do")]
        arguments = (
            *(w[role] for role in roles),
            *(maxima, normalisers, w["delta"], dqkv),
            *self._sizes(run, operation),
            *run.mask(operation.probability, operation.site),
            *(run.values, unusual, run.flag(operation)),
        )
        wide = head_padded(operation)
        rows, columns = 8 * TILE * (wide + 16), 2 * wide * (TILE + 16) if wide <= 64 else 0
        grid = (tokens // TILE, heads)
        for name, shared in (("k_attn_bwd_queries", rows + columns), ("k_attn_bwd_keys", rows + 2 * columns)):
            run.launch(unit, name, f"21P{SIZES}{MASK}PPP", grid, (BLOCK,), *arguments, shared=shared)
