"""Embedding: exactly its definition, and within half a unit per token of the float64 reference."""

import numpy as np
import pytest

from engine.operations.base import Sizes
from engine.operations.embed import Embed
from engine.reference import embed
from tests.engine import exact
from tests.engine.bench import Bench, normals, same_bits, within
from tests.engine.bounds import SLACK, TINY, U

# (batch, context, width, vocabulary, positions)
SHAPES = [(1, 1, 1, 1, 1), (2, 13, 5, 7, 13), (3, 9, 33, 100, 20), (1, 70, 17, 3, 70)]


def bench_of(shape: tuple[int, ...], probability: float, threads: int = 1) -> Bench:
    batch, context, width, vocab, positions = shape
    operation = Embed(
        name="embed",
        index=0,
        inputs={"ids": "ids"},
        outputs={"y": "y"},
        parameters={"token": "token", "position": "position"},
        vocab=vocab,
        width=width,
        probability=probability,
        site=0,
    )
    ids = np.random.default_rng(shape).integers(0, vocab, (batch, context)).astype(np.int32)
    return Bench(
        operation,
        {"ids": ids},
        {"token": normals(1, vocab, width), "position": normals(2, positions, width)},
        sizes=Sizes(batch=batch, context=context, threads=threads),
        training=True,
        first_row=2,
    )


@pytest.mark.parametrize("probability", [0.0, 0.2])
@pytest.mark.parametrize("shape", SHAPES)
def test_embed(shape: tuple[int, ...], probability: float) -> None:
    bench = bench_of(shape, probability)
    batch, context, width, vocab, positions = shape
    ids, token, position = bench.tensors["ids"], *bench.parameters.values()
    first = 2 * context * width
    keep = exact.mask32(bench.seed, bench.step, 0, (batch, context, width), probability, first=first)
    y = bench.forward()["y"]
    same_bits(y, exact.dropped(token[ids] + position[:context], keep))
    keep64 = None if keep is None else np.where(keep > 0, 1 / (1 - probability), 0.0)
    token64, position64 = token.astype(np.float64), position.astype(np.float64)
    true = embed.reference_forward(ids, token64, position64, keep64)
    within(y, true, 3 * U * np.abs(true) * SLACK + TINY)  # sum, factor, product

    dy = normals(3, batch, context, width)
    dy[0, 0, 0] *= 1000  # one exponent per column, so this one widens the unit of all its tokens
    bench.backward({"y": dy})
    dtoken, dposition = bench.parameter_gradients.values()
    etoken, eposition = exact.embed_backward(ids, exact.dropped(dy, keep), vocab, positions)
    same_bits(dtoken, etoken)
    same_bits(dposition, eposition)
    ttoken, tposition = embed.reference_backward(ids, token64, position64, keep64, dy.astype(np.float64))
    # Per element of the sum: half a unit of max|column| * 2**-29, and the two roundings of a mask.
    rows = np.abs(dy).astype(np.float64) * (1 if keep64 is None else keep64)
    half_unit = np.max(rows, axis=(0, 1)) * 2.0**-30
    for found, wanted, index in (
        (dtoken, ttoken, ids),
        (dposition, tposition, np.broadcast_to(np.arange(context), ids.shape)),
    ):
        moved = np.zeros(found.shape)
        np.add.at(moved, index, half_unit + (2 * U if probability else 0) * rows)
        within(found, wanted, moved * SLACK + U * np.abs(wanted) * SLACK + TINY)


def test_gradients_add_to_what_is_there() -> None:
    """As a tied head needs, which has added its part before."""
    bench = bench_of((3, 9, 33, 100, 20), 0.2)
    bench.forward()
    dy = normals(3, 3, 9, 33)
    bench.backward({"y": dy})
    once = {role: g.copy() for role, g in bench.parameter_gradients.items()}
    bench.backward({"y": dy})
    for role, g in bench.parameter_gradients.items():
        same_bits(g, once[role] + once[role])


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_move_bits(threads: int) -> None:
    results = []
    for count in (1, threads):
        bench = bench_of((3, 9, 100, 11, 20), 0.2, count)
        y = bench.forward()["y"]
        bench.backward({"y": normals(3, 3, 9, 100)})
        results.append([y, *bench.parameter_gradients.values()])
        bench.team.close()
    for one, many in zip(*results, strict=True):
        same_bits(many, one)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_sets_the_flag(value: float) -> None:
    bench = bench_of((2, 13, 5, 7, 13), 0.0)
    bench.forward()
    dy = normals(3, 2, 13, 5)
    dy[1, 12, 4] = value
    bench.backward({"y": dy})
    assert bench.flags.tolist() == [1]
