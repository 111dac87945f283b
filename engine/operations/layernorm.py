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
from engine.numerics.types import Doubles, Floats, Longs, Scalar, Words
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
    flag: Longs,
    slot: Scalar,
) -> None:
    """x, y [M, d]; gain, bias [d] or empty; mean, rstd [M]; lanes: scratch [32]. Sets flag[slot] where the variance is
    not finite: its row would come out as zeros, as if nothing had happened."""
    d = x.shape[1]
    for t in range(first, last):
        row, out = x[t], y[t]
        lanes[:] = np.float32(0.0)
        for start in range(0, d, SUM_LANES):
            piece = row[start : min(start + SUM_LANES, d)]
            for j in range(piece.size):
                lanes[j] += piece[j]
        m = lanes_total(lanes) / np.float32(d)
        lanes[:] = np.float32(0.0)
        for start in range(0, d, SUM_LANES):
            piece = row[start : min(start + SUM_LANES, d)]
            for j in range(piece.size):
                e = piece[j] - m
                lanes[j] += e * e
        variance = lanes_total(lanes) / np.float32(d)
        if magnitude_bits(variance) >= INFINITY_BITS:
            flag[slot] = 1
        r = np.float32(1.0) / np.sqrt(variance + EPSILON)
        mean[t] = m
        rstd[t] = r
        if gain.size:
            for c in range(d):
                out[c] = (row[c] - m) * r * gain[c] + bias[c]
        else:
            for c in range(d):
                out[c] = (row[c] - m) * r


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
    g_row: Floats,
    lanes: Floats,
    lanes_n: Floats,
) -> None:
    """dx [M, d] from dy; g_row [d], lanes and lanes_n [32]: scratch."""
    d = x.shape[1]
    width = np.float32(d)
    for t in range(first, last):
        m = mean[t]
        r = rstd[t]
        x_row, dy_row, dx_row = x[t], dy[t], dx[t]
        if gain.size:
            for c in range(d):
                g_row[c] = dy_row[c] * gain[c]
        else:
            for c in range(d):
                g_row[c] = dy_row[c]
        lanes[:] = np.float32(0.0)
        lanes_n[:] = np.float32(0.0)
        for start in range(0, d, SUM_LANES):
            end = min(start + SUM_LANES, d)
            x_piece, g_piece = x_row[start:end], g_row[start:end]
            for j in range(g_piece.size):
                g = g_piece[j]
                lanes[j] += g
                lanes_n[j] += g * ((x_piece[j] - m) * r)
        average = lanes_total(lanes) / width
        average_n = lanes_total(lanes_n) / width
        if add:
            for c in range(d):
                dx_row[c] += r * ((g_row[c] - average) - (x_row[c] - m) * r * average_n)
        else:
            for c in range(d):
                dx_row[c] = r * ((g_row[c] - average) - (x_row[c] - m) * r * average_n)


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
    factors: Doubles,
    flag: Longs,
    slot: Scalar,
) -> None:
    """Columns first..last of dgain and dbias [d]; tops [2, d], sums [4, d], factors [2, d]: scratch."""
    x, dy = x[:, first:last], dy[:, first:last]
    dgain, dbias = dgain[first:last], dbias[first:last]
    top_gain, top_bias = tops[0, first:last], tops[1, first:last]
    factor_gain, factor_bias = factors[0, first:last], factors[1, first:last]
    sum_gain, sum_bias = sums[0, first:last], sums[1, first:last]
    s_gain, s_bias = sums[2, first:last], sums[3, first:last]
    tokens, width = x.shape
    top_gain[:] = 0
    top_bias[:] = 0
    sum_gain[:] = 0
    sum_bias[:] = 0
    for t in range(tokens):
        m, r, x_row, dy_row = mean[t], rstd[t], x[t], dy[t]
        for c in range(width):
            top_gain[c] = max(top_gain[c], magnitude_bits(dy_row[c] * ((x_row[c] - m) * r)))
            top_bias[c] = max(top_bias[c], magnitude_bits(dy_row[c]))
    for c in range(width):
        if top_gain[c] >= INFINITY_BITS or top_bias[c] >= INFINITY_BITS:
            flag[slot] = 1
            top_gain[c] = 0
            top_bias[c] = 0
        s_gain[c] = sum_exponent(float32_of_bits(top_gain[c]))
        s_bias[c] = sum_exponent(float32_of_bits(top_bias[c]))
        factor_gain[c] = power_of_two(s_gain[c])
        factor_bias[c] = power_of_two(s_bias[c])
    for t in range(tokens):
        m, r, x_row, dy_row = mean[t], rstd[t], x[t], dy[t]
        for c in range(width):
            product = dy_row[c] * ((x_row[c] - m) * r)
            sum_gain[c] += sum_integer(product, factor_gain[c])
            sum_bias[c] += sum_integer(dy_row[c], factor_bias[c])
    for c in range(width):
        dgain[c] += float_of_sum(sum_gain[c], s_gain[c])
        dbias[c] += float_of_sum(sum_bias[c], s_bias[c])


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
            "factors": BufferType((2, self.width), "float64"),
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
                (
                    k_layernorm_fwd,
                    (x, *self._gain(run), a, b, y, mean, rstd, lanes[i, 0], run.flags, self.index),
                )
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
                (x, self._gain(run)[0], mean, rstd, dy, a, b, dx, add) + (row[i], lanes[i, 0], lanes[i, 1]),
            )
            for i, (a, b) in enumerate(run.team.ranges(len(x)))
        ]
        if self.parameters:
            dgain, dbias = (run.parameter_gradient(self.parameters[r]) for r in ("gain", "bias"))
            scratch = [run.work(self.name, role) for role in ("tops", "sums", "factors")]
            work = (*scratch, run.flags, self.index)
            tasks += [
                (k_layernorm_bwd_parameters, (x, mean, rstd, dy, a, b, dgain, dbias, *work))
                for a, b in run.team.ranges(self.width, 16)
            ]
        run.team.run(tasks)
