"""Token plus learned position embedding, with dropout on the sum.

Forward   y[b, t] = (token[ids[b, t]] + position[t]) * keep * 1/(1-p)
Backward  dtoken[v] += sum of dy over the tokens with id v,  dposition[t] += sum of dy over the rows b

Both sums are integer sums over tokens (numerics/sums.py) with one exponent per column over the logical shard. Masks
dy in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from engine.errors import SpecError
from engine.numerics.bits import float32_of_bits
from engine.numerics.fixed_point import INFINITY_BITS, magnitude_bits, power_of_two
from engine.numerics.jit import kernel
from engine.numerics.sums import float_of_sum, sum_exponent, sum_integer
from engine.numerics.types import Doubles, Floats, Longs, Scalar, Words
from engine.operations.base import BufferType, Execution, Operation, Sizes, TensorType
from engine.operations.dropout import dropout_tasks


@kernel
def k_embed_fwd(
    ids: Words, context: Scalar, token: Floats, position: Floats, first: Scalar, last: Scalar, y: Floats
) -> None:
    """ids [M], token [V, d], position [context, d], y [M, d]."""
    for t in range(first, last):
        row = ids[t]
        place = t % context
        out, a, b = y[t], token[row], position[place]
        for c in range(out.size):
            out[c] = a[c] + b[c]


@kernel
def k_sort_tokens(ids: Words, starts: Words, order: Words) -> None:
    """order [M] = places of the tokens, ascending by id and then by place; starts [V]: scratch."""
    starts[:] = 0
    for t in range(ids.size):
        starts[ids[t]] += 1
    end = ids.size
    for v in range(starts.size - 1, -1, -1):
        end -= starts[v]
        starts[v] = end
    for t in range(ids.size):
        order[starts[ids[t]]] = t
        starts[ids[t]] += 1


@kernel
def k_embed_bwd(
    ids: Words,
    order: Words,
    context: Scalar,
    dy: Floats,
    first: Scalar,
    last: Scalar,
    dtoken: Floats,
    dposition: Floats,
    tops: Words,
    sums: Longs,
    factors: Doubles,
    flag: Longs,
    slot: Scalar,
) -> None:
    """Columns first..last of dtoken [V, d] and dposition [context, d]; tops [d], sums [2, d], factors [d]: scratch."""
    tokens = dy.shape[0]
    width = last - first
    dy = dy[:, first:last]
    tops, sums, factors = tops[first:last], sums[:, first:last], factors[first:last]
    dtoken, dposition = dtoken[:, first:last], dposition[:, first:last]
    total = sums[0]
    tops[:] = 0
    for t in range(tokens):
        row = dy[t]
        for c in range(width):
            tops[c] = max(tops[c], magnitude_bits(row[c]))
    for c in range(width):
        if tops[c] >= INFINITY_BITS:
            flag[slot] = 1
            tops[c] = 0
        sums[1, c] = sum_exponent(float32_of_bits(tops[c]))
        factors[c] = power_of_two(sums[1, c])
        sums[0, c] = 0
    for place in range(tokens):
        t = order[place]
        row = dy[t]
        for c in range(width):
            total[c] += sum_integer(row[c], factors[c])
        if place + 1 == tokens or ids[order[place + 1]] != ids[t]:
            for c in range(width):
                dtoken[ids[t], c] += float_of_sum(total[c], sums[1, c])
                total[c] = 0
    for p in range(context):
        for t in range(p, tokens, context):
            row = dy[t]
            for c in range(width):
                total[c] += sum_integer(row[c], factors[c])
        for c in range(width):
            dposition[p, c] += float_of_sum(total[c], sums[1, c])
            total[c] = 0


@dataclass(frozen=True, kw_only=True)
class Embed(Operation):
    """Input ids int32 [B, T], output y [B, T, width]. Parameters token [vocab, width], position [context, width]."""

    vocab: int
    width: int
    probability: float
    site: int

    kind: ClassVar[str] = "embed"
    kept: ClassVar[frozenset[str]] = frozenset({"ids"})
    constant: ClassVar[frozenset[str]] = frozenset({"ids"})

    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        ids = types["ids"]
        if len(ids.shape) != 2 or ids.dtype != "int32":
            raise SpecError(f"{self.name} expects token numbers [B, T] int32, found {ids}")
        return {"y": TensorType((*ids.shape, self.width))}

    def backward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return {
            "starts": BufferType((self.vocab,), "int32"),
            "order": BufferType((sizes.batch * sizes.context,), "int32"),
            "tops": BufferType((self.width,), "int32"),
            "sums": BufferType((2, self.width), "int64"),
            "factors": BufferType((self.width,), "float64"),
        }

    def forward(self, run: Execution) -> None:
        ids = run.tensor(self.inputs["ids"])
        y = run.tensor(self.outputs["y"]).reshape(-1, self.width)
        token, position = (run.parameter(self.parameters[r]) for r in ("token", "position"))
        arguments = (ids.reshape(-1), ids.shape[1], token, position)
        run.team.run([(k_embed_fwd, (*arguments, a, b, y)) for a, b in run.team.ranges(len(y))])
        if run.training and self.probability:
            flat = y.reshape(-1)
            run.team.run(dropout_tasks(run, self.probability, self.site, flat))

    def backward(self, run: Execution) -> None:
        ids = run.tensor(self.inputs["ids"])
        dy = run.gradient(self.outputs["y"])
        if run.training and self.probability:
            flat = dy.reshape(-1)
            run.team.run(dropout_tasks(run, self.probability, self.site, flat))
        order, *work = (run.work(self.name, r) for r in ("order", "tops", "sums", "factors"))
        k_sort_tokens(ids.reshape(-1), run.work(self.name, "starts"), order)
        gradients = [run.parameter_gradient(self.parameters[r]) for r in ("token", "position")]
        run.team.run(
            [
                (
                    k_embed_bwd,
                    (ids.reshape(-1), order, ids.shape[1], dy.reshape(-1, self.width), a, b)
                    + (*gradients, *work, run.flags, self.index),
                )
                for a, b in run.team.ranges(self.width, 16)
            ]
        )
