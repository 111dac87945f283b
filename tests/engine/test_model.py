"""Whole models: bit for bit the second implementation, close to the float64 reference, and PyTorch if there."""

from typing import Any

import numpy as np
import pytest

from engine.reference.model import Masks, reference_gradients, reference_logits
from engine.trainer import Trainer
from tests.engine.bench import same_bits
from tests.engine.exact_training import ExactTraining
from tests.engine.training import make_trainer

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "untied relu without biases": (
        {"tied": False, "activation": "relu", "linear_bias": False, "norm_parameters": False},
        {"shards": 1, "clip_norm": 0.0, "decayed": ["matrix", "embedding", "bias", "norm"]},
    ),
    "one wide head, one layer, long": (
        {"context": 70, "d_model": 40, "heads": 1, "layers": 1, "hidden": 37, "vocab": 35, "attention": "stored"},
        {"batch": 2, "shards": 2, "beta1": 0.0, "warmup_steps": 0},
    ),
    "five shards, no dropout": ({"dropout": 0.0, "layers": 1}, {"batch": 5, "shards": 5, "weight_decay": 0.0}),
    "least": (
        {"vocab": 1, "context": 1, "d_model": 1, "heads": 1, "layers": 1, "hidden": 1, "dropout": 0.5},
        {"batch": 1, "shards": 1},
    ),
}


@pytest.fixture(params=list(VARIANTS), name="trainer")
def _trainer(request: pytest.FixtureRequest) -> Trainer:
    model, train = VARIANTS[request.param]
    return make_trainer(model, train)


def batch_of(trainer: Trainer, step: int) -> tuple[Any, Any]:
    shape = (trainer.train.batch, trainer.model.context)
    inputs, targets = np.empty(shape, np.int32), np.empty(shape, np.int32)
    trainer.batches.fill(step, inputs, targets)
    return inputs, targets


def test_training_is_its_definition_bit_for_bit(trainer: Trainer) -> None:
    """Loss, and weights and moments through the step digest, over three steps with dropout, clipping and shards."""
    other = ExactTraining(trainer.model, trainer.train, dict(trainer.backend.parameters))
    for step in range(3):
        loss, digest = other.train_step(*batch_of(trainer, step))
        result = trainer.train_step()
        assert result.loss == loss
        for name, w in trainer.backend.parameters.items():
            same_bits(w, other.weights[name])
        assert result.digest == digest


# A quantised product errs by about 2e-4 of its size (test_fixed_point.py), and each gradient is a chain of such
# products and of fp32 operations; errors of independent signs grow like the root of the chain's length.
GRADIENT_ERROR = 3e-3
LOSS_ERROR = 3e-4
LOGIT_ERROR = 1e-3


def test_gradients_are_near_the_reference(trainer: Trainer) -> None:
    ids, targets = batch_of(trainer, 0)
    parameters = {name: w.astype(np.float64) for name, w in trainer.backend.parameters.items()}
    masks = Masks(trainer.train.seed, 0, True)
    loss, expected = reference_gradients(trainer.model, parameters, ids, targets, masks)
    held, total = trainer.backend.run_shards(0, ids, targets)
    assert total * 2.0**-30 / ids.size == pytest.approx(loss, rel=LOSS_ERROR, abs=1e-12)
    found = trainer.backend.parameter_gradients[held]
    assert found.keys() == expected.keys()
    whole = np.sqrt(sum(float(np.sum(g**2)) for g in expected.values()))
    for name, g in found.items():
        # Some gradients vanish in theory (a bias of keys shifts all scores alike): those only beside the whole.
        scale = max(float(np.linalg.norm(expected[name])), 0.01 * whole, 1e-12)
        assert np.linalg.norm(g - expected[name]) <= GRADIENT_ERROR * scale, name


def test_logits_are_near_the_reference(trainer: Trainer) -> None:
    ids, _ = batch_of(trainer, 0)
    rows = trainer.plan.sizes.batch
    parameters = {name: w.astype(np.float64) for name, w in trainer.backend.parameters.items()}
    expected = reference_logits(trainer.model, parameters, ids[:rows], Masks(0, 0, False))
    found = trainer.backend.logits(ids[:rows])
    assert np.linalg.norm(found - expected) <= LOGIT_ERROR * np.linalg.norm(expected) + 1e-12


def test_against_pytorch() -> None:
    """An oracle that shares no author with the reference: the same small GPT out of torch's own pieces."""
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    trainer = make_trainer({"dropout": 0.0})
    model = trainer.model
    ids, targets = batch_of(trainer, 0)
    w = {name: torch.tensor(x.astype(np.float64), requires_grad=True) for name, x in trainer.backend.parameters.items()}
    d, heads, t = model.d_model, model.heads, model.context

    def norm(name: str, x: Any) -> Any:
        return f.layer_norm(x, (d,), w[f"{name}.gain"], w[f"{name}.bias"], eps=1e-5)

    def linear(name: str, x: Any) -> Any:
        return f.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["embed.token"][torch.tensor(ids).long()] + w["embed.position"]
    for number in range(model.layers):
        name = f"block{number}"
        qkv = linear(f"{name}.attn_qkv", norm(f"{name}.norm1", x)).split(d, dim=2)
        q, k, v = (z.view(len(ids), t, heads, d // heads).transpose(1, 2) for z in qkv)
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(f"{name}.attn_out", y.transpose(1, 2).reshape(len(ids), t, d))
        hidden = f.gelu(linear(f"{name}.mlp_up", norm(f"{name}.norm2", x)), approximate="tanh")
        x = x + linear(f"{name}.mlp_down", hidden)
    logits = norm("norm", x) @ w["embed.token"].T
    loss = f.cross_entropy(logits.view(-1, model.vocab), torch.tensor(targets).long().view(-1))
    loss.backward()
    rows = trainer.plan.sizes.batch
    expected = logits[:rows].detach().numpy()
    found = trainer.backend.logits(ids[:rows])
    assert np.linalg.norm(found - expected) <= LOGIT_ERROR * np.linalg.norm(expected)
    held, total = trainer.backend.run_shards(0, ids, targets)
    assert total * 2.0**-30 / ids.size == pytest.approx(float(loss.detach()), rel=LOSS_ERROR)
    whole = float(torch.sqrt(sum((z.grad**2).sum() for z in w.values())))
    for name, g in trainer.backend.parameter_gradients[held].items():
        true = w[name].grad.numpy()
        scale = max(float(np.linalg.norm(true)), 0.01 * whole)
        assert np.linalg.norm(g - true) <= GRADIENT_ERROR * scale, name
