"""LayerNorm over the last axis (Ba, Kiros & Hinton 2016), with or without gain and bias.

Forward   mean = sum(x)/d, var = sum((x - mean)^2)/d, rstd = 1/sqrt(var + 1e-5), n = (x - mean)*rstd, y = n*gain + bias
Backward  g = dy*gain;  dx = rstd * ((g - sum(g)/d) - n*(sum(g*n)/d))
          dgain[c] += sum over t of dy*n,  dbias[c] += sum over t of dy   (integer sums over tokens, numerics/sums.py)

Row sums are ordered sums over 32 lanes. mean and rstd are kept for the backward pass. dx adds where the tensor already
has a gradient; dgain and dbias always add.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engine.errors import SpecError
from engine.numerics.bits import float32_of_bits
from engine.numerics.fixed_point import INFINITY_BITS, magnitude_bits, power_of_two
from engine.numerics.jit import kernel
from engine.numerics.sums import SUM_LANES, float_of_sum, lanes_total, sum_exponent, sum_integer
from engine.numerics.types import Floats, Longs, Scalar, Words
from engine.operations.base import BufferType, Execution, Operation, Sizes, TensorType
from engine.threads import Task

EPSILON = np.float32(1e-5)
NOTHING: Floats = np.empty(0, np.float32)  # stands for absent parameters


@kernel
def k_layernorm_fwd(
    x: Floats,
    gain: Floats,
    bias: Floats,
    first: Scalar,
    last: Scalar,
    y: Floats,
    mean: Floats,
    rstd: Floats,
    lanes: Floats,
) -> None:
    """x, y [M, d]; gain, bias [d] or empty; mean, rstd [M]; lanes: scratch [32]."""
    d = x.shape[1]
    for t in range(first, last):
        lanes[:] = np.float32(0.0)
        for start in range(0, d, SUM_LANES):
            for j in range(min(SUM_LANES, d - start)):
                lanes[j] += x[t, start + j]
        m = lanes_total(lanes) / np.float32(d)
        lanes[:] = np.float32(0.0)
        for start in range(0, d, SUM_LANES):
            for j in range(min(SUM_LANES, d - start)):
                e = x[t, start + j] - m
                lanes[j] += e * e
        variance = lanes_total(lanes) / np.float32(d)
        r = np.float32(1.0) / np.sqrt(variance + EPSILON)
        mean[t] = m
        rstd[t] = r
        if gain.size:
            for c in range(d):
                y[t, c] = (x[t, c] - m) * r * gain[c] + bias[c]
        else:
            for c in range(d):
                y[t, c] = (x[t, c] - m) * r


@kernel
def k_layernorm_bwd(
    x: Floats,
    gain: Floats,
    mean: Floats,
    rstd: Floats,
    dy: Floats,
    first: Scalar,
    last: Scalar,
    dx: Floats,
    add: Scalar,
    row: Floats,
    lanes: Floats,
    lanes_n: Floats,
) -> None:
    """dx [M, d] from dy; row [d], lanes and lanes_n [32]: scratch."""
    d = x.shape[1]
    width = np.float32(d)
    for t in range(first, last):
        m = mean[t]
        r = rstd[t]
        if gain.size:
            for c in range(d):
                row[c] = dy[t, c] * gain[c]
        else:
            for c in range(d):
                row[c] = dy[t, c]
        lanes[:] = np.float32(0.0)
        lanes_n[:] = np.float32(0.0)
        for start in range(0, d, SUM_LANES):
            for j in range(min(SUM_LANES, d - start)):
                g = row[start + j]
                lanes[j] += g
                lanes_n[j] += g * ((x[t, start + j] - m) * r)
        average = lanes_total(lanes) / width
        average_n = lanes_total(lanes_n) / width
        if add:
            for c in range(d):
                dx[t, c] += r * ((row[c] - average) - (x[t, c] - m) * r * average_n)
        else:
            for c in range(d):
                dx[t, c] = r * ((row[c] - average) - (x[t, c] - m) * r * average_n)


@kernel
def k_layernorm_bwd_parameters(
    x: Floats,
    mean: Floats,
    rstd: Floats,
    dy: Floats,
    first: Scalar,
    last: Scalar,
    dgain: Floats,
    dbias: Floats,
    tops: Words,
    sums: Longs,
    flag: Longs,
    slot: Scalar,
) -> None:
    """Columns first..last of dgain and dbias [d]; tops int32 and sums int64 [4, d]: scratch."""
    tokens = x.shape[0]
    tops[0:2, first:last] = 0
    sums[0:2, first:last] = 0
    for t in range(tokens):
        m = mean[t]
        r = rstd[t]
        for c in range(first, last):
            tops[0, c] = max(tops[0, c], magnitude_bits(dy[t, c] * ((x[t, c] - m) * r)))
            tops[1, c] = max(tops[1, c], magnitude_bits(dy[t, c]))
    for c in range(first, last):
        for i in range(2):
            if tops[i, c] >= INFINITY_BITS:
                flag[slot] = 1
                tops[i, c] = 0
            # Rows 2 and 3 of sums hold the exponents.
            sums[2 + i, c] = sum_exponent(float32_of_bits(tops[i, c]))
    for t in range(tokens):
        m = mean[t]
        r = rstd[t]
        for c in range(first, last):
            product = dy[t, c] * ((x[t, c] - m) * r)
            sums[0, c] += sum_integer(product, power_of_two(sums[2, c]))
            sums[1, c] += sum_integer(dy[t, c], power_of_two(sums[3, c]))
    for c in range(first, last):
        dgain[c] += float_of_sum(sums[0, c], sums[2, c])
        dbias[c] += float_of_sum(sums[1, c], sums[3, c])


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Operation):
    """Input x, outputs y and the statistics mean, rstd. Parameters: gain, bias (both or neither)."""

    width: int

    kind: ClassVar[str] = "layernorm"
    kept: ClassVar[frozenset[str]] = frozenset({"x", "mean", "rstd"})
    constant: ClassVar[frozenset[str]] = frozenset({"mean", "rstd"})

    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        x = types["x"]
        if len(x.shape) != 3:
            raise SpecError(f"{self.name} expects [B, T, width], found {x} from {self.inputs['x']}")
        return {"y": x, "mean": TensorType(x.shape[:-1]), "rstd": TensorType(x.shape[:-1])}

    def forward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return {"lanes": BufferType((sizes.threads, 2, SUM_LANES), "float32")}

    def backward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return self.forward_work(sizes, tier) | {
            "row": BufferType((sizes.threads, self.width), "float32"),
            "tops": BufferType((2, self.width), "int32"),
            "sums": BufferType((4, self.width), "int64"),
        }

    def _gain(self, run: Execution) -> tuple[Floats, Floats]:
        if not self.parameters:
            return NOTHING, NOTHING
        return run.parameter(self.parameters["gain"]), run.parameter(self.parameters["bias"])

    def forward(self, run: Execution) -> None:
        x = run.tensor(self.inputs["x"]).reshape(-1, self.width)
        y = run.tensor(self.outputs["y"]).reshape(-1, self.width)
        mean, rstd = (run.tensor(self.outputs[r]).reshape(-1) for r in ("mean", "rstd"))
        lanes = run.work(self.name, "lanes")
        run.team.run(
            [
                (k_layernorm_fwd, (x, *self._gain(run), a, b, y, mean, rstd, lanes[i, 0]))
                for i, (a, b) in enumerate(run.team.ranges(len(x)))
            ]
        )

    def backward(self, run: Execution) -> None:
        x = run.tensor(self.inputs["x"]).reshape(-1, self.width)
        dx = run.gradient(self.inputs["x"]).reshape(-1, self.width)
        dy = run.gradient(self.outputs["y"]).reshape(-1, self.width)
        mean, rstd = (run.tensor(self.outputs[r]).reshape(-1) for r in ("mean", "rstd"))
        lanes, row = run.work(self.name, "lanes"), run.work(self.name, "row")
        add = run.accumulates(self.name, "x")
        tasks: list[Task] = [
            (
                k_layernorm_bwd,
                (x, self._gain(run)[0], mean, rstd, dy, a, b, dx, add)
                + (row[i], lanes[i, 0], lanes[i, 1]),
            )
            for i, (a, b) in enumerate(run.team.ranges(len(x)))
        ]
        if self.parameters:
            dgain, dbias = (run.parameter_gradient(self.parameters[r]) for r in ("gain", "bias"))
            work = (run.work(self.name, "tops"), run.work(self.name, "sums"), run.flags, self.index)
            tasks += [
                (k_layernorm_bwd_parameters, (x, mean, rstd, dy, a, b, dgain, dbias, *work))
                for a, b in run.team.ranges(self.width, 16)
            ]
        run.team.run(tasks)
