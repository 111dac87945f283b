"""Every operation on the card gives the CPU's bits, forward and backward, on ordinary and on unpleasant numbers."""

from collections.abc import Iterator

import numpy as np
import pytest

from engine.backends.cuda import attention
from engine.backends.cuda.card import Card
from tests.cuda.pairs import KINDS, Pair, model, report, train

pytestmark = pytest.mark.gpu

MODELS = {
    "micro": (model(), train()),
    "ragged": (model(context=71, d_model=39, heads=3, hidden=50, vocab=67, dropout=0.3), train(batch=3, shards=1)),
    "plain": (
        model(context=64, d_model=64, heads=1, hidden=128, vocab=96, dropout=0.0, linear_bias=False,
              norm_parameters=False, tied=False, activation="relu"),
        train(batch=2),
    ),
    "long": (model(context=200, d_model=128, heads=2, hidden=256, vocab=300, dropout=0.1), train(batch=3, shards=1)),
    "broad": (model(context=70, d_model=200, heads=2, hidden=64, vocab=40), train(batch=2)),
}  # fmt: skip


# Attention's products by the instructions that every card has, where this one has better ones.
EVERYWHERE = [(name, True, "everywhere") for name in ("ragged", "long")]
PARAMS = [(name, fused, "best") for name in MODELS for fused in (False, True)] + EVERYWHERE


@pytest.fixture(scope="module", params=PARAMS, ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    name, fused, instructions = request.param
    with pytest.MonkeyPatch.context() as patch:
        if instructions == "everywhere":
            patch.setattr(attention, "HOPPER", None)
        pair = Pair(*MODELS[name], Card(), fused=fused)
        yield pair
        pair.close()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_operation_gives_the_cpus_bits(pair: Pair, kind: str, training: bool) -> None:
    rng = np.random.default_rng(5)
    draw = KINDS[kind]
    pair.differences.clear()
    pair.set_parameters(lambda shape: draw(rng, shape))
    pair.start_step(7, training=training)
    pair.flagged()
    sizes = pair.frame.sizes
    for operation in pair.program.operations:
        for role, name in operation.inputs.items():
            shape = pair.program.tensors[name].at(sizes)
            if name in ("ids", "targets"):
                pair.set_tensor(name, rng.integers(0, pair.model.vocab, shape, dtype=np.int32))
            elif name in pair.absent or pair.shared_with_linear(operation):
                continue  # made by the operation before, in a form of its own
            elif role not in operation.forward_in_place.values() or operation.inputs.get("x") != name:
                pair.set_tensor(name, draw(rng, shape))
        pair.forward(operation)
    for operation in reversed(pair.program.operations) if training else ():
        if operation.kind != "loss" and not pair.gets_gradient(operation):
            name = operation.outputs["y"]
            pair.set_gradient(name, draw(rng, pair.program.tensors[name].at(sizes)))
        for role, name in operation.inputs.items():
            if role not in operation.constant and pair.frame.accumulates(operation.name, role):
                pair.set_gradient(name, draw(rng, pair.program.tensors[name].at(sizes)))
        pair.backward(operation)
    assert not pair.differences, report(pair.differences)
