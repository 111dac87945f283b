"""The linear layer: exactly its definition, and within the product's bound of the float64 reference."""

import numpy as np
import pytest

from engine.operations.base import Sizes
from engine.operations.linear import Linear
from engine.reference import linear
from tests.engine import exact
from tests.engine.bench import Bench, normals, same_bits, within
from tests.engine.bounds import SLACK, TINY, U, product_bound, unit

# (batch, context, K, N): all different, ragged, across tiles of 2, 8, 32 and 64 and depths of 512.
SHAPES = [(1, 1, 1, 1), (1, 7, 5, 3), (2, 13, 33, 70), (1, 65, 96, 31), (3, 9, 520, 40), (1, 530, 17, 35)]


def bench_of(shape: tuple[int, ...], bias: bool, threads: int = 1, tier: str = "portable") -> Bench:
    batch, context, deep, wide = shape
    parameters = {"weight": normals(2, wide, deep, scale=0.3)}
    if bias:
        parameters["bias"] = normals(3, wide)
    operation = Linear(
        name="linear",
        index=0,
        inputs={"x": "x"},
        outputs={"y": "y"},
        parameters={role: role for role in parameters},
        role="mlp_up",
        wide=wide,
        deep=deep,
    )
    sizes = Sizes(batch=batch, context=context, threads=threads)
    return Bench(operation, {"x": normals(1, batch, context, deep)}, parameters, sizes=sizes, tier=tier)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    bench = bench_of(shape, bias)
    x, w, b = bench.tensors["x"], bench.parameters["weight"], bench.parameters.get("bias")
    y = bench.forward()["y"]
    same_bits(y, exact.linear_forward(x, w, b))
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    true = linear.reference_forward(x64, w64, None if b is None else b.astype(np.float64))
    # The product, then one rounding of the sum with the bias.
    bound = product_bound(x, w.T) + (0 if b is None else U * np.abs(true)) * SLACK
    within(y, true, bound)

    dy = normals(4, *y.shape, scale=0.1)
    dx = bench.backward({"y": dy})["x"]
    parts = exact.linear_backward(x, w, dy)
    same_bits(dx, parts[0])
    same_bits(bench.parameter_gradients["weight"], parts[1])
    tdx, tdw, tdb = linear.reference_backward(x64, w64, dy.astype(np.float64))
    within(dx, tdx, product_bound(dy, w))
    rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    within(bench.parameter_gradients["weight"], tdw, product_bound(rows.T, flat))
    if bias:
        same_bits(bench.parameter_gradients["bias"], parts[2])
        # A sum of the product's integers: half a unit per token, then one rounding.
        bound = len(rows) / 2 * unit(rows, 0)[0] * SLACK + U * np.abs(tdb) * SLACK + TINY
        within(bench.parameter_gradients["bias"], tdb, bound)


def test_backward_adds_to_what_is_there() -> None:
    bench = bench_of((2, 13, 33, 70), True)
    y = bench.forward()["y"]
    dy, before = normals(4, *y.shape), normals(5, 2, 13, 33)
    dx = bench.backward({"y": dy})["x"]
    once = {role: g.copy() for role, g in bench.parameter_gradients.items()}
    same_bits(bench.backward({"y": dy}, {"x": before})["x"], before + dx)
    for role, g in bench.parameter_gradients.items():
        same_bits(g, once[role] + once[role])


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_move_bits(threads: int) -> None:
    results = []
    for count in (1, threads):
        bench = bench_of((3, 43, 130, 70), True, count)
        y = bench.forward()["y"]
        dx = bench.backward({"y": normals(4, *y.shape)})["x"]
        results.append([y, dx, *bench.parameter_gradients.values()])
        bench.team.close()
    for one, many in zip(*results, strict=True):
        same_bits(many, one)


@pytest.mark.parametrize("shape", SHAPES)
def test_debug_tier_is_fp32(shape: tuple[int, ...]) -> None:
    """A BLAS sum of n products in any order errs by at most n*U of the sum of their magnitudes."""
    bench = bench_of(shape, True, tier="debug")
    x, w, b = (z.astype(np.float64) for z in (bench.tensors["x"], bench.parameters["weight"], bench.parameters["bias"]))
    y = bench.forward()["y"]
    depth = (x.shape[-1] + 2) * U * SLACK
    within(y, linear.reference_forward(x, w, b), depth * (np.abs(x) @ np.abs(w.T) + np.abs(b)) + TINY)
    dy = normals(4, *y.shape)
    before = normals(5, *x.shape)
    dx = bench.backward({"y": dy}, {"x": before})["x"]
    rows, flat = np.abs(dy.reshape(-1, dy.shape[-1])).astype(np.float64), np.abs(x.reshape(-1, x.shape[-1]))
    tdx, tdw, tdb = linear.reference_backward(x, w, dy.astype(np.float64))
    deep = (dy.shape[-1] + 2) * U * SLACK
    within(dx, before + tdx, deep * (np.abs(dy) @ np.abs(w) + np.abs(before)) + TINY)
    tall = (len(rows) + 2) * U * SLACK
    within(bench.parameter_gradients["weight"], tdw, tall * (rows.T @ flat) + TINY)
    within(bench.parameter_gradients["bias"], tdb, tall * np.sum(rows, axis=0) + TINY)
