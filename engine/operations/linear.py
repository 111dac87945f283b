"""`y = x W^T + b`: the linear layers (attn_qkv, attn_out, mlp_up, mlp_down) and the head.

Forward   y[t, n]   = product(x, W^T)[t, n], then + b[n] in fp32
Backward  dx[t, k]  = product(dy, W)[t, k]
          dW[n, k] += product(dy^T, x)[n, k]
          db[n]    += fp32(sum over t of q[t, n] * 2**-s_n), q and s_n those of the columns of dy in dW's product

`product` is the fixed-point product (numerics/fixed_point.py); tokens t run over one logical shard. In the debug tier
it is a float32 BLAS product instead, and db a float32 sum over tokens in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engine.errors import SpecError
from engine.numerics.bits import float32_of_bits
from engine.numerics.blas import product
from engine.numerics.fixed_point import (
    INFINITY_BITS,
    exponent_for,
    integer_of,
    left_word,
    magnitude_bits,
    multiply_block,
    power_of_two,
    right_word,
    row_exponent,
)
from engine.numerics.jit import kernel
from engine.numerics.microkernel import MOST_TILE_ROWS, TILE_COLUMNS, TILE_ROWS
from engine.numerics.types import Array, Doubles, Floats, Longs, Scalar, Words
from engine.operations.base import BufferType, Execution, Operation, Sizes, TensorType
from engine.threads import Task

NOTHING: Floats = np.empty(0, np.float32)  # stands for an absent bias
ROWS_AT_ONCE = 64  # rows quantised together, so that their words stay in the cache; a multiple of TILE_ROWS
PADDING = 16  # words between rows, so that rows do not fall on the same cache set


def ceiling(a: int, b: int) -> int:
    return -(-a // b)


# --- quantising -----------------------------------------------------------------------------------------------------


@kernel
def k_quantise_rows_to_panels(
    w: Floats, first: Scalar, last: Scalar, panels: Words, scales: Doubles, flag: Longs, slot: Scalar
) -> None:
    """Rows of w [N, K] as columns of the right operand: panels [N/32, K, 32], scales[n] = 2**(8 - s_n)."""
    rows, depth = w.shape
    for p in range(first, last):
        for j in range(TILE_COLUMNS):
            n = p * TILE_COLUMNS + j
            if n < rows:
                s = row_exponent(w[n], depth, flag, slot)
                scales[n] = power_of_two(8 - s)
                factor = power_of_two(s)
                for k in range(depth):
                    panels[p, k, j] = right_word(integer_of(w[n, k], factor))
            else:
                for k in range(depth):
                    panels[p, k, j] = 0


@kernel
def k_quantise_columns_to_panels(
    x: Floats,
    first: Scalar,
    last: Scalar,
    panels: Words,
    scales: Doubles,
    factors: Doubles,
    tops: Words,
    flag: Longs,
    slot: Scalar,
) -> None:
    """Columns of x [T, K] as columns of the right operand: panels [K/32, T, 32], scales[k] = 2**(8 - s_k)."""
    depth, columns = x.shape
    for p in range(first, last):
        start = p * TILE_COLUMNS
        width = min(TILE_COLUMNS, columns - start)
        _column_exponents(x, start, width, scales, factors, tops, np.int64(8), flag, slot)
        factor = factors[start : start + width]
        for t in range(depth):
            row, out = x[t, start : start + width], panels[p, t]
            for j in range(width):
                out[j] = right_word(integer_of(row[j], factor[j]))
            for j in range(width, TILE_COLUMNS):
                out[j] = 0


@kernel
def k_quantise_columns_to_left(
    y: Floats,
    first: Scalar,
    last: Scalar,
    left: Words,
    scales: Doubles,
    factors: Doubles,
    tops: Words,
    totals: Longs,
    bias_gradient: Floats,
    flag: Longs,
    slot: Scalar,
) -> None:
    """Columns of y [T, N] as rows of the left operand: left [N/TILE_ROWS, T, TILE_ROWS], scales[n] = 2**-s_n.

    Adds each column's sum to bias_gradient [N] (or nothing, if that is empty): the sum of the same integers.
    """
    depth, columns = y.shape
    for p in range(first, last):
        start = p * TILE_ROWS
        width = min(TILE_ROWS, columns - start)
        _column_exponents(y, start, width, scales, factors, tops, np.int64(0), flag, slot)
        factor, total = factors[start : start + width], totals[start : start + width]
        total[:] = 0
        for t in range(depth):
            row, out = y[t, start : start + width], left[p, t]
            for j in range(width):
                q = integer_of(row[j], factor[j])
                out[j] = left_word(q)
                total[j] += q
            for j in range(width, TILE_ROWS):
                out[j] = 0
        if bias_gradient.size:
            for j in range(width):
                bias_gradient[start + j] += np.float32(np.float64(total[j]) * scales[start + j])


@kernel
def _column_exponents(
    x: Floats,
    start: Scalar,
    width: Scalar,
    scales: Doubles,
    factors: Doubles,
    tops: Words,
    shift: Scalar,
    flag: Longs,
    slot: Scalar,
) -> None:
    """For columns start..start+width of x: factors = 2**s and scales = 2**(shift - s)."""
    tops, factors = tops[start : start + width], factors[start : start + width]
    scales = scales[start : start + width]
    tops[:] = 0
    for t in range(x.shape[0]):
        row = x[t, start : start + width]
        for j in range(width):
            tops[j] = max(tops[j], magnitude_bits(row[j]))
    for j in range(width):
        s = np.int64(0)
        if tops[j] >= INFINITY_BITS:
            flag[slot] = 1
        else:
            s = exponent_for(float32_of_bits(tops[j]))
        factors[j] = power_of_two(s)
        scales[j] = power_of_two(shift - s)


# --- products -------------------------------------------------------------------------------------------------------


@kernel
def k_linear_rows(
    x: Floats,
    first: Scalar,
    last: Scalar,
    panels: Words,
    scales: Doubles,
    bias: Floats,
    out: Floats,
    add: Scalar,
    left: Words,
    row_scales: Doubles,
    tile: Words,
    wide: Doubles,
    flag: Longs,
    slot: Scalar,
) -> None:
    """out[first:last] = product(x, panels) (+ bias), or += where `add`.

    x [M, K]; panels [N/32, K, 32] with scales [N]; bias [N] or empty; out [M, N].
    Scratch: left int32 [ROWS_AT_ONCE, >= K], row_scales [ROWS_AT_ONCE], tile int32 and wide float64 [TILE_ROWS, 32].
    """
    depth = x.shape[1]
    columns = out.shape[1]
    stride = left.shape[1]
    for start in range(first, last, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, last - start)
        for i in range(rows):
            s = row_exponent(x[start + i], depth, flag, slot)
            row_scales[i] = power_of_two(-s)
            factor = power_of_two(s)
            row, words = x[start + i], left[i]
            for k in range(depth):
                words[k] = left_word(integer_of(row[k], factor))
        for p in range(panels.shape[0]):
            column = p * TILE_COLUMNS
            width = min(TILE_COLUMNS, columns - column)
            column_scales = scales[column : column + width]
            column_bias = bias[column : column + width]
            for block in range(0, rows, TILE_ROWS):
                multiply_block(left[block:].ctypes.data, stride, 1, panels[p].ctypes.data, depth, tile, wide)
                for i in range(min(TILE_ROWS, rows - block)):
                    target = out[start + block + i, column : column + width]
                    source, scale = wide[i], row_scales[block + i]
                    if add:
                        for j in range(width):
                            target[j] += np.float32(source[j] * scale * column_scales[j])
                    elif bias.size:
                        for j in range(width):
                            c = np.float32(source[j] * scale * column_scales[j])
                            target[j] = c + column_bias[j]
                    else:
                        for j in range(width):
                            target[j] = np.float32(source[j] * scale * column_scales[j])


@kernel
def k_linear_weight_gradient(
    left: Words,
    left_scales: Doubles,
    panels: Words,
    scales: Doubles,
    first: Scalar,
    last: Scalar,
    gradient: Floats,
    tile: Words,
    wide: Doubles,
) -> None:
    """gradient[n, k] += product(dy^T, x)[n, k] for left blocks first..last.

    left [N/TILE_ROWS, T, TILE_ROWS], panels [K/32, T, 32], gradient [N, K].
    """
    rows, columns = gradient.shape
    depth = panels.shape[1]
    for p in range(panels.shape[0]):
        column = p * TILE_COLUMNS
        width = min(TILE_COLUMNS, columns - column)
        column_scales = scales[column : column + width]
        for b in range(first, last):
            multiply_block(left[b].ctypes.data, 1, TILE_ROWS, panels[p].ctypes.data, depth, tile, wide)
            for i in range(min(TILE_ROWS, rows - b * TILE_ROWS)):
                n = b * TILE_ROWS + i
                target, source = gradient[n, column : column + width], wide[i]
                for j in range(width):
                    target[j] += np.float32(source[j] * left_scales[n] * column_scales[j])


# --- debug tier -----------------------------------------------------------------------------------------------------


@kernel
def k_add_bias(y: Floats, bias: Floats) -> None:
    """y[t, n] += b[n]."""
    for t in range(y.shape[0]):
        for n in range(y.shape[1]):
            y[t, n] += bias[n]


@kernel
def k_bias_gradient(dy: Floats, gradient: Floats) -> None:
    """gradient[n] += dy[0, n] + dy[1, n] + ..., each addition in fp32 and in this order."""
    for t in range(dy.shape[0]):
        for n in range(dy.shape[1]):
            gradient[n] += dy[t, n]


# --- the operation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Linear(Operation):
    """`role`: attn_qkv, attn_out, mlp_up, mlp_down or head. Parameters: weight [N, K], bias [N] (optional)."""

    role: str
    wide: int  # N
    deep: int  # K

    kind: ClassVar[str] = "linear"
    kept: ClassVar[frozenset[str]] = frozenset({"x"})

    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        x = types["x"]
        if x.shape[-1] != self.deep:
            raise SpecError(f"{self.name} expects an input of width {self.deep}, found {x} from {self.inputs['x']}")
        return {"y": TensorType((*x.shape[:-1], self.wide))}

    def derived(self, tier: str) -> dict[str, BufferType]:
        if tier == "debug":
            return {}
        wide, deep = ceiling(self.wide, TILE_COLUMNS), ceiling(self.deep, TILE_COLUMNS)
        return {
            "forward_panels": BufferType((wide, self.deep, TILE_COLUMNS), "int32"),
            "forward_scales": BufferType((self.wide,), "float64"),
            "backward_panels": BufferType((deep, self.wide, TILE_COLUMNS), "int32"),
            "backward_scales": BufferType((self.deep,), "float64"),
            "column_factors": BufferType((self.deep,), "float64"),
            "column_tops": BufferType((self.deep,), "int32"),
        }

    def _rows_work(self, sizes: Sizes, depth: int) -> dict[str, BufferType]:
        return {
            "left": BufferType((sizes.threads, ROWS_AT_ONCE, depth + PADDING), "int32"),
            "row_scales": BufferType((sizes.threads, ROWS_AT_ONCE), "float64"),
            "tile": BufferType((sizes.threads, MOST_TILE_ROWS, TILE_COLUMNS), "int32"),
            "wide": BufferType((sizes.threads, MOST_TILE_ROWS, TILE_COLUMNS), "float64"),
        }

    def forward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return {} if tier == "debug" else self._rows_work(sizes, self.deep)

    def backward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        tokens = sizes.batch * sizes.context
        if tier == "debug":
            return {
                "dx": BufferType((tokens, self.deep), "float32"),
                "dw": BufferType((self.wide, self.deep), "float32"),
            }
        left_rows = ceiling(self.wide, MOST_TILE_ROWS) * MOST_TILE_ROWS
        return self._rows_work(sizes, self.wide) | {
            "dy_left": BufferType((left_rows // TILE_ROWS, tokens, TILE_ROWS), "int32"),
            "dy_scales": BufferType((self.wide,), "float64"),
            "dy_factors": BufferType((self.wide,), "float64"),
            "dy_tops": BufferType((self.wide,), "int32"),
            "dy_totals": BufferType((self.wide,), "int64"),
            "x_panels": BufferType((ceiling(self.deep, TILE_COLUMNS), tokens, TILE_COLUMNS), "int32"),
            "x_scales": BufferType((self.deep,), "float64"),
            "x_factors": BufferType((self.deep,), "float64"),
            "x_tops": BufferType((self.deep,), "int32"),
        }

    def prepare(self, run: Execution) -> None:
        if run.tier == "debug":
            return
        w = run.parameter(self.parameters["weight"])
        d = {role: run.derived(self.name, role) for role in self.derived(run.tier)}
        flags = (run.flags, self.index)
        run.team.run(
            [
                (
                    k_quantise_rows_to_panels,
                    (w, a, b, d["forward_panels"], d["forward_scales"], *flags),
                )
                for a, b in run.team.ranges(ceiling(self.wide, TILE_COLUMNS))
            ]
            + [
                (
                    k_quantise_columns_to_panels,
                    (w, a, b, d["backward_panels"], d["backward_scales"])
                    + (d["column_factors"], d["column_tops"], *flags),
                )
                for a, b in run.team.ranges(ceiling(self.deep, TILE_COLUMNS))
            ]
        )

    def _rows(
        self, run: Execution, x: Floats, panels: Array, scales: Array, bias: Floats, out: Floats, add: bool
    ) -> list[Task]:
        """Tasks of k_linear_rows over all rows of x, each with scratch of its own."""
        left, row_scales, tile, wide = (run.work(self.name, role) for role in ("left", "row_scales", "tile", "wide"))
        return [
            (
                k_linear_rows,
                (x, a, b, panels, scales, bias, out, add)
                + (left[i], row_scales[i], tile[i], wide[i], run.flags, self.index),
            )
            for i, (a, b) in enumerate(run.team.ranges(len(x), TILE_ROWS))
        ]

    def _bias(self, run: Execution) -> Floats:
        return run.parameter(self.parameters["bias"]) if "bias" in self.parameters else NOTHING

    def forward(self, run: Execution) -> None:
        x = run.tensor(self.inputs["x"]).reshape(-1, self.deep)
        y = run.tensor(self.outputs["y"]).reshape(-1, self.wide)
        bias = self._bias(run)
        if run.tier == "debug":
            product(x, run.parameter(self.parameters["weight"]).T, y)
            if bias.size:
                k_add_bias(y, bias)
            return
        panels = run.derived(self.name, "forward_panels")
        scales = run.derived(self.name, "forward_scales")
        run.team.run(self._rows(run, x, panels, scales, bias, y, False))

    def backward(self, run: Execution) -> None:
        x = run.tensor(self.inputs["x"]).reshape(-1, self.deep)
        dx = run.gradient(self.inputs["x"]).reshape(-1, self.deep)
        dy = run.gradient(self.outputs["y"]).reshape(-1, self.wide)
        gradient = run.parameter_gradient(self.parameters["weight"])
        bias_gradient = run.parameter_gradient(self.parameters["bias"]) if "bias" in self.parameters else NOTHING
        add = run.accumulates(self.name, "x")
        if run.tier == "debug":
            self._backward_debug(run, x, dx, dy, gradient, bias_gradient, add)
            return
        w = {role: run.work(self.name, role) for role in self.backward_work(run.sizes, run.tier)}
        flags = (run.flags, self.index)
        panels = run.derived(self.name, "backward_panels")
        scales = run.derived(self.name, "backward_scales")
        blocks = ceiling(self.wide, TILE_ROWS)
        run.team.run(
            self._rows(run, dy, panels, scales, NOTHING, dx, add)
            + [
                (
                    k_quantise_columns_to_left,
                    (dy, a, b, w["dy_left"], w["dy_scales"], w["dy_factors"], w["dy_tops"])
                    + (w["dy_totals"], bias_gradient, *flags),
                )
                for a, b in run.team.ranges(blocks)
            ]
            + [
                (
                    k_quantise_columns_to_panels,
                    (x, a, b, w["x_panels"], w["x_scales"], w["x_factors"], w["x_tops"], *flags),
                )
                for a, b in run.team.ranges(ceiling(self.deep, TILE_COLUMNS))
            ]
        )
        run.team.run(
            [
                (
                    k_linear_weight_gradient,
                    (w["dy_left"], w["dy_scales"], w["x_panels"], w["x_scales"], a, b, gradient)
                    + (w["tile"][i], w["wide"][i]),
                )
                for i, (a, b) in enumerate(run.team.ranges(blocks))
            ]
        )

    def _backward_debug(
        self,
        run: Execution,
        x: Floats,
        dx: Floats,
        dy: Floats,
        gradient: Floats,
        bias_gradient: Floats,
        add: bool,
    ) -> None:
        weight = run.parameter(self.parameters["weight"])
        if add:
            dx += product(dy, weight, run.work(self.name, "dx"))
        else:
            product(dy, weight, dx)
        gradient += product(dy.T, x, run.work(self.name, "dw"))
        if bias_gradient.size:
            k_bias_gradient(dy, bias_gradient)
