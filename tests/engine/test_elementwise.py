"""Activation and residual sum: exactly their definitions, and within the errors of one operation or two."""

import numpy as np
import pytest

from engine.operations.activation import Activation
from engine.operations.base import Sizes
from engine.operations.residual_add import ResidualAdd
from engine.reference import activation, residual_add
from tests.engine import exact
from tests.engine.bench import Bench, normals, same_bits, within
from tests.engine.bounds import SLACK, TINY, U

SHAPES = [(1, 1, 1), (2, 13, 33), (1, 65, 7), (3, 5, 64)]


def activation_of(shape: tuple[int, ...], function: str, threads: int = 1) -> Bench:
    operation = Activation(name="act", index=0, inputs={"x": "x"}, outputs={"y": "y"}, function=function)
    sizes = Sizes(batch=shape[0], context=shape[1], threads=threads)
    x = normals(1, *shape, scale=3)
    x.reshape(-1)[::11] = 0
    return Bench(operation, {"x": x}, sizes=sizes)


@pytest.mark.parametrize("function", ["gelu", "relu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activation(shape: tuple[int, ...], function: str) -> None:
    bench = activation_of(shape, function)
    x = bench.tensors["x"]
    y = bench.forward()["y"]
    same_bits(y, exact.activation_forward(x, function))
    dy = normals(2, *shape)
    dx = bench.backward({"y": dy})["x"]
    same_bits(dx, exact.activation_backward(x, function, dy))
    x64, dy64 = x.astype(np.float64), dy.astype(np.float64)
    true = activation.reference_forward(x64, function)
    tdx = activation.reference_backward(x64, function, dy64)
    if function == "relu":
        same_bits(y.astype(np.float64), true)
        same_bits(dx.astype(np.float64), tdx)
        return
    # Worst errors of gelu32: 3 ulp for x >= 0, else 2^-24; of its derivative 4 ulp or 2^-23.
    within(y, true, 6 * U * np.abs(true) + 2.0**-24)
    slope = activation.reference_backward(x64, function, np.ones_like(x64))
    bound = np.abs(dy64) * (8 * U * np.abs(slope) + 2.0**-23)
    within(dx, tdx, bound + U * np.abs(tdx) * SLACK + TINY)


def residual_of(shape: tuple[int, ...], probability: float, first_row: int = 0, threads: int = 1) -> Bench:
    operation = ResidualAdd(
        name="sum",
        index=0,
        inputs={"x": "x", "branch": "branch"},
        outputs={"y": "y"},
        probability=probability,
        site=6,
    )
    return Bench(
        operation,
        {"x": normals(1, *shape), "branch": normals(2, *shape)},
        sizes=Sizes(batch=shape[0], context=shape[1], threads=threads),
        training=True,
        seed=2**40 + 3,
        step=7,
        first_row=first_row,
    )


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("shape", SHAPES)
def test_residual_add(shape: tuple[int, ...], probability: float) -> None:
    first_row = 5
    bench = residual_of(shape, probability, first_row)
    x, branch = bench.tensors["x"], bench.tensors["branch"]
    first = first_row * shape[1] * shape[2]
    keep = exact.mask32(2**40 + 3, 7, 6, shape, probability, first=first)
    y = bench.forward()["y"]
    same_bits(y, x + exact.dropped(branch, keep))
    dy = normals(3, *shape)
    gradients = bench.backward({"y": dy})
    same_bits(gradients["x"], dy)
    same_bits(gradients["branch"], exact.dropped(dy, keep))
    keep64 = None if keep is None else np.where(keep > 0, 1 / (1 - probability), 0.0)
    x64, branch64 = x.astype(np.float64), branch.astype(np.float64)
    true = residual_add.reference_forward(x64, branch64, keep64)
    # The factor, the product and the sum are rounded once each.
    bound = (2 * U * np.abs(true - x64) + U * np.abs(true)) * SLACK + TINY
    within(y, true, bound)
    before = normals(4, *shape)
    same_bits(bench.backward({"y": dy}, {"x": before})["x"], before + dy)


def test_no_dropout_outside_training() -> None:
    bench = residual_of((2, 13, 33), 0.5)
    bench.training = False
    x, branch = bench.tensors["x"], bench.tensors["branch"]
    same_bits(bench.forward()["y"], x + branch)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_move_bits(threads: int) -> None:
    results = []
    for count in (1, threads):
        benches = residual_of((3, 13, 33), 0.3, 1, count), activation_of((3, 13, 33), "gelu", count)
        dy = normals(3, 3, 13, 33)
        arrays = []
        for bench in benches:
            arrays += [*bench.forward().values(), *bench.backward({"y": dy}).values()]
            bench.team.close()
        results.append(arrays)
    for one, many in zip(*results, strict=True):
        same_bits(many, one)
