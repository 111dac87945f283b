"""Cross-entropy of the next token, one loss per token.

Forward   m = max(l), S = sum(exp(l - m)), loss = log(S) - (l[target] - m)
Backward  dl[v] = (exp(l[v] - m)/S - [v = target]) / tokens in the whole batch;  dl takes the place of l

S is an ordered sum over 32 lanes. m and S are kept for the backward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engine.errors import SpecError
from engine.numerics.elementary import exp32, log32
from engine.numerics.jit import kernel
from engine.numerics.sums import SUM_LANES, lanes_total
from engine.numerics.types import Floats, Scalar, Words
from engine.operations.base import BufferType, Execution, Operation, Sizes, TensorType


@kernel
def k_loss_fwd(
    logits: Floats,
    targets: Words,
    first: Scalar,
    last: Scalar,
    losses: Floats,
    maxima: Floats,
    sums: Floats,
    lanes: Floats,
) -> None:
    """logits [M, V], targets [M]; losses, maxima, sums [M]; lanes: scratch [32]."""
    width = logits.shape[1]
    for t in range(first, last):
        row = logits[t]
        m = row[0]
        for v in range(width):
            m = max(m, row[v])
        lanes[:] = np.float32(0.0)
        for start in range(0, width, SUM_LANES):
            piece = row[start : min(start + SUM_LANES, width)]
            for j in range(piece.size):
                lanes[j] += exp32(piece[j] - m)
        total = lanes_total(lanes)
        maxima[t] = m
        sums[t] = total
        losses[t] = log32(total) - (logits[t, targets[t]] - m)


@kernel
def k_loss_bwd(
    logits: Floats,
    targets: Words,
    maxima: Floats,
    sums: Floats,
    scale: Scalar,
    first: Scalar,
    last: Scalar,
) -> None:
    """logits [M, V] become their gradient; scale = fp32(1 / tokens in the whole batch)."""
    width = logits.shape[1]
    for t in range(first, last):
        m = maxima[t]
        total = sums[t]
        target = targets[t]
        wanted = exp32(logits[t, target] - m) / total - np.float32(1.0)
        row = logits[t]
        for v in range(width):
            row[v] = exp32(row[v] - m) / total * scale
        row[target] = wanted * scale


@dataclass(frozen=True, kw_only=True)
class Loss(Operation):
    """Inputs logits [B, T, V] and targets int32 [B, T]; outputs losses, maxima, sums [B, T]."""

    kind: ClassVar[str] = "loss"
    kept: ClassVar[frozenset[str]] = frozenset({"logits", "targets", "maxima", "sums"})
    constant: ClassVar[frozenset[str]] = frozenset({"targets", "maxima", "sums"})
    gradient_over_input: ClassVar[str | None] = "logits"  # their last use

    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        logits, targets = types["logits"], types["targets"]
        if logits.shape[:-1] != targets.shape:
            raise SpecError(f"{self.name}: logits are {logits}, targets {targets}: all but the last axis must agree")
        return {role: TensorType(targets.shape) for role in ("losses", "maxima", "sums")}

    def forward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return {"lanes": BufferType((sizes.threads, SUM_LANES), "float32")}

    def forward(self, run: Execution) -> None:
        logits = run.tensor(self.inputs["logits"])
        logits = logits.reshape(-1, logits.shape[-1])
        targets = run.tensor(self.inputs["targets"]).reshape(-1)
        out = [run.tensor(self.outputs[r]).reshape(-1) for r in ("losses", "maxima", "sums")]
        lanes = run.work(self.name, "lanes")
        run.team.run(
            [
                (k_loss_fwd, (logits, targets, a, b, *out, lanes[i]))
                for i, (a, b) in enumerate(run.team.ranges(len(logits)))
            ]
        )

    def backward(self, run: Execution) -> None:
        logits = run.gradient(self.inputs["logits"])
        logits = logits.reshape(-1, logits.shape[-1])
        targets = run.tensor(self.inputs["targets"]).reshape(-1)
        maxima, sums = (run.tensor(self.outputs[r]).reshape(-1) for r in ("maxima", "sums"))
        run.team.run(
            [
                (k_loss_bwd, (logits, targets, maxima, sums, run.loss_scale, a, b))
                for a, b in run.team.ranges(len(logits))
            ]
        )
