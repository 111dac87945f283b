"""Every kernel that can compute a fixed-point product gives the CPU's bits, whatever is chosen by size."""

from collections.abc import Iterator

import numpy as np
import pytest

from engine.backends.cuda import products
from engine.backends.cuda.card import Card
from tests.cuda.pairs import KINDS, Pair, model, report, train

pytestmark = pytest.mark.gpu

SHAPES = {
    "ragged": (model(context=71, d_model=39, heads=3, hidden=53, vocab=67, tied=False), train(batch=3, shards=1)),
    "even": (model(context=256, d_model=192, heads=3, hidden=640, vocab=516, tied=False), train(batch=2, shards=1)),
    "deep": (model(context=128, d_model=64, heads=1, hidden=1160, vocab=1026, tied=False), train(batch=1, shards=1)),
}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(*SHAPES[request.param], Card())
    yield pair
    pair.close()


@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "sparse"])
@pytest.mark.parametrize("kernel", [*products.TILES, "k_product_hopper"])
def test_every_product_kernel(pair: Pair, kernel: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "k_product_hopper" and pair.card.capability != 90:
        pytest.skip("needs compute capability 9.0")
    monkeypatch.setattr(products, "choose_kernel", lambda *_: kernel)
    rng = np.random.default_rng(11)
    pair.differences.clear()
    pair.set_parameters(lambda shape: KINDS[kind](rng, shape))
    pair.start_step(3, training=True)
    pair.flagged()
    for operation in (o for o in pair.program.operations if o.kind == "linear"):
        for name in (operation.inputs["x"], operation.outputs["y"]):
            shape = pair.program.tensors[name].at(pair.frame.sizes)
            if name == operation.outputs["y"]:
                pair.forward(operation)
                pair.set_gradient(name, KINDS[kind](rng, shape))
            else:
                pair.set_tensor(name, KINDS[kind](rng, shape))
        pair.backward(operation)
    assert not pair.differences, report(pair.differences)
