"""LayerNorm: exactly its definition, and within the bound that its fp32 roundings allow.

With L = additions(d) roundings of an ordered sum plus one of the division by d:
    mean    errs by dm = (L+1)*U * mean|x|;    e = x - m by de = dm + U*|e|
    var     errs by dv = mean(2*|e|*de + de^2) + (L+2)*U * var   (squares, sum, division)
    rstd    errs relatively by dr = dv / (2*(var + eps)) + 3*U   (addition, root, division)
    n = e*r errs by dn = r*de + |n|*(dr + U)
    y       errs by |gain|*dn + U*|n*gain| + U*|y|
and backward with g = dy*gain, each mean over d as above:
    dx = r*((g - avg) - n*avg_n): each factor's error times the others, plus U of every result.
"""

import numpy as np
import pytest

from engine.operations.base import Sizes
from engine.operations.layernorm import LayerNorm
from engine.reference import layernorm
from tests.engine import exact
from tests.engine.bench import Array, Bench, normals, same_bits, within
from tests.engine.bounds import SLACK, TINY, Doubles, U, additions, column_sum_bound

SHAPES = [(1, 1, 1), (2, 3, 5), (1, 7, 32), (2, 13, 33), (1, 9, 96), (3, 11, 100), (1, 2, 520)]


def bench_of(shape: tuple[int, ...], parameters: bool, threads: int = 1) -> Bench:
    batch, context, width = shape
    operation = LayerNorm(
        name="norm",
        index=0,
        inputs={"x": "x"},
        outputs={"y": "y", "mean": "mean", "rstd": "rstd"},
        parameters={"gain": "gain", "bias": "bias"} if parameters else {},
        width=width,
    )
    values = {"gain": 1 + normals(2, width, scale=0.2), "bias": normals(3, width)}
    sizes = Sizes(batch=batch, context=context, threads=threads)
    x = normals(1, *shape, scale=3) + np.float32(2)
    return Bench(operation, {"x": x}, values if parameters else {}, sizes=sizes)


def mean(x: Doubles) -> Doubles:
    return np.mean(x, axis=-1, keepdims=True)


def normalised(x: Doubles) -> tuple[Doubles, Doubles, Doubles, Doubles]:
    """n and rstd, with the errors of n (absolute) and rstd (relative)."""
    n, rstd = layernorm.statistics(x)
    e = np.abs(n) / rstd
    sums = additions(x.shape[-1])
    de = (sums + 1) * U * mean(np.abs(x)) + U * e
    variance = mean(e**2)
    dv = mean(2 * e * de + de**2) + (sums + 2) * U * variance
    dr = dv / (2 * (variance + layernorm.EPSILON)) + 3 * U
    return n, rstd, (rstd * de + np.abs(n) * (dr + U)) * SLACK, dr * SLACK


def backward_bound(x: Doubles, gain: Array, dy: Doubles) -> Doubles:
    n, rstd, dn, dr = normalised(x)
    g = dy * gain
    sums = additions(x.shape[-1])
    dg = U * np.abs(g)
    average, average_n = mean(g), mean(g * n)
    d_average = mean(dg) + (sums + 1) * U * mean(np.abs(g))
    product = np.abs(g * n)
    d_average_n = mean(np.abs(g) * dn + np.abs(n) * dg) + (sums + 2) * U * mean(product)
    left, right = g - average, n * average_n
    d_left = dg + d_average + U * np.abs(left)
    d_right = np.abs(n) * d_average_n + np.abs(average_n) * dn + U * np.abs(right)
    d_inner = d_left + d_right + U * np.abs(left - right)
    bound: Doubles = rstd * (d_inner + np.abs(left - right) * (dr + U)) * SLACK + TINY
    return bound


@pytest.mark.parametrize("parameters", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_layernorm(shape: tuple[int, ...], parameters: bool) -> None:
    bench = bench_of(shape, parameters)
    x, gain, bias = bench.tensors["x"], *(bench.parameters.get(r) for r in ("gain", "bias"))
    out = bench.forward()
    for found, expected in zip(out.values(), exact.layernorm_forward(x, gain, bias), strict=True):
        same_bits(found, expected)
    x64 = x.astype(np.float64)
    g64, b64 = (None if z is None else z.astype(np.float64) for z in (gain, bias))
    true = layernorm.reference_forward(x64, g64, b64)
    n, _, dn, _ = normalised(x64)
    factor = np.ones(shape[-1]) if g64 is None else np.abs(g64)
    within(out["y"], true, factor * dn + (U * np.abs(n) * factor + U * np.abs(true)) * SLACK + TINY)

    dy = normals(4, *shape)
    dx = bench.backward({"y": dy})["x"]
    edx, edgain, edbias = exact.layernorm_backward(x, gain, out["mean"], out["rstd"], dy)
    same_bits(dx, edx)
    dy64 = dy.astype(np.float64)
    tdx, tdgain, tdbias = layernorm.reference_backward(x64, g64, dy64)
    within(dx, tdx, backward_bound(x64, factor if g64 is None else g64, dy64))
    if parameters:
        dgain, dbias = (bench.parameter_gradients[role] for role in ("gain", "bias"))
        same_bits(dgain, edgain)
        same_bits(dbias, edbias)
        tokens = dy.reshape(-1, shape[-1])
        within(dbias, tdbias, column_sum_bound(tokens))
        # The summands dy*n err as n does, and by one rounding.
        moved = np.abs(dy64) * dn + U * np.abs(dy64 * n) * SLACK
        summed = column_sum_bound((np.abs(dy64 * n) + moved).reshape(-1, shape[-1]))
        within(dgain, tdgain, np.sum(moved, axis=(0, 1)) + summed)


def test_backward_adds_to_what_is_there() -> None:
    bench = bench_of((2, 13, 33), True)
    bench.forward()
    dy, before = normals(4, 2, 13, 33), normals(5, 2, 13, 33)
    dx = bench.backward({"y": dy})["x"]
    once = {role: g.copy() for role, g in bench.parameter_gradients.items()}
    same_bits(bench.backward({"y": dy}, {"x": before})["x"], before + dx)
    for role, g in bench.parameter_gradients.items():
        same_bits(g, once[role] + once[role])


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_move_bits(threads: int) -> None:
    results = []
    for count in (1, threads):
        bench = bench_of((2, 13, 100), True, count)
        out = bench.forward()
        dx = bench.backward({"y": normals(4, 2, 13, 100)})["x"]
        results.append([*out.values(), dx, *bench.parameter_gradients.values()])
        bench.team.close()
    for one, many in zip(*results, strict=True):
        same_bits(many, one)


@pytest.mark.parametrize("value", [1e-30, 1e-3, 1e4, 1e15])
def test_extreme_rows(value: float) -> None:
    """Constant rows, and rows far from 1, where the variance may vanish beside epsilon."""
    bench = bench_of((1, 4, 33), True)
    bench.tensors["x"][0, 0] = np.float32(value)
    bench.tensors["x"][0, 1] *= np.float32(value)
    x, gain, bias = bench.tensors["x"], *(bench.parameters[r] for r in ("gain", "bias"))
    out = bench.forward()
    for found, expected in zip(out.values(), exact.layernorm_forward(x, gain, bias), strict=True):
        same_bits(found, expected)
    assert np.isfinite(out["y"]).all() and not bench.flags.any()


@pytest.mark.parametrize("value", [1e20, 3e38, np.inf, np.nan])
def test_a_variance_past_fp32_sets_the_flag(value: float) -> None:
    """1e20 is finite but its square is not: without the flag the row would come out as zeros."""
    bench = bench_of((1, 4, 33), True)
    bench.tensors["x"][0, 2, 7] = np.float32(value)
    bench.forward()
    assert bench.flags.tolist() == [1]


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_sets_the_flag(value: float) -> None:
    bench = bench_of((1, 4, 33), True)
    bench.forward()
    dy = normals(4, 1, 4, 33)
    dy[0, 1, 32] = value
    bench.backward({"y": dy})
    assert bench.flags.tolist() == [1]
