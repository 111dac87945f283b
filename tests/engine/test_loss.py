"""Cross-entropy: exactly its definition, and within the bound of its fp32 roundings.

exp(l - m) errs relatively by x = U*|l - m| + EXP_ERROR, or by EXP_FLUSHED where it is 0
S          by relatively ds = mean of x weighted by the softmax + additions(V)*U + V*EXP_FLUSHED
loss       by ds + error of log + U*|l[target] - m| + U*loss
dl         (p - [hit]) * scale with p relatively off by x + ds + U, then two roundings, and that
           of scale
"""

import numpy as np
import pytest

from engine.operations.base import Sizes
from engine.operations.loss import Loss
from engine.reference import loss
from tests.engine import exact
from tests.engine.bench import Bench, normals, same_bits, within
from tests.engine.bounds import EXP_ERROR, EXP_FLUSHED, LOG_ULP, SLACK, TINY, U, additions

SHAPES = [(1, 1, 1), (2, 13, 5), (1, 7, 32), (3, 5, 33), (2, 3, 300)]


def bench_of(shape: tuple[int, ...], scale: float, threads: int = 1) -> Bench:
    operation = Loss(
        name="loss",
        index=0,
        inputs={"logits": "logits", "targets": "targets"},
        outputs={role: role for role in ("losses", "maxima", "sums")},
    )
    targets = np.random.default_rng(shape).integers(0, shape[2], shape[:2]).astype(np.int32)
    return Bench(
        operation,
        {"logits": normals(1, *shape, scale=scale), "targets": targets},
        sizes=Sizes(batch=shape[0], context=shape[1], threads=threads),
    )


@pytest.mark.parametrize("scale", [1e-3, 2.0, 60.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss(shape: tuple[int, ...], scale: float) -> None:
    bench = bench_of(shape, scale)
    logits, targets = bench.tensors["logits"].copy(), bench.tensors["targets"]
    out = bench.forward()
    for found, expected in zip(out.values(), exact.loss_forward(logits, targets), strict=True):
        same_bits(found, expected)
    l64 = logits.astype(np.float64)
    shifted = l64 - np.max(l64, axis=-1, keepdims=True)
    p = np.exp(shifted) / np.sum(np.exp(shifted), axis=-1, keepdims=True)
    x = U * np.abs(shifted) + EXP_ERROR
    ds = np.sum(p * x, axis=-1) + additions(shape[-1]) * U + shape[-1] * EXP_FLUSHED
    true = loss.reference_forward(l64, targets)
    chosen = np.abs(np.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0])
    log_sum = np.abs(true - chosen)
    within(out["losses"], true, (ds + 2 * U * LOG_ULP * log_sum + U * chosen + U * true) * SLACK + TINY)

    factor = bench.loss_scale
    dlogits = bench.backward({})["logits"]
    same_bits(dlogits, exact.loss_backward(logits, targets, out["maxima"], out["sums"], factor))
    tdlogits = loss.reference_backward(l64, targets, 1 / targets.size)
    dp = p * (x + ds[..., None] + U) + EXP_FLUSHED
    bound = (dp / targets.size + 3 * U * np.abs(tdlogits)) * SLACK + TINY
    within(dlogits, tdlogits, bound)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_move_bits(threads: int) -> None:
    results = []
    for count in (1, threads):
        bench = bench_of((3, 5, 33), 2.0, count)
        results.append([*bench.forward().values(), bench.backward({})["logits"]])
        bench.team.close()
    for one, many in zip(*results, strict=True):
        same_bits(many, one)
