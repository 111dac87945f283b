"""The float64 references against central finite differences, each gradient in random directions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.numerics.types import Doubles
from engine.reference import (
    activation,
    attention,
    dropout,
    embed,
    layernorm,
    linear,
    loss,
    optimizer,
    residual_add,
)
from engine.reference.model import Masks, reference_gradients, reference_logits
from engine.spec import ModelSpec

STEP = 1e-5
# Central differences err by STEP^2 times a third derivative, and by 1e-16/STEP of cancellation.
TOLERANCE = 1e-7


def random(*shape: int, seed: int = 0) -> Doubles:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def check(function: Callable[..., Any], inputs: list[Doubles], gradients: list[Doubles]) -> None:
    """`function(*inputs)` is a scalar; `gradients` are claimed for each input, by element."""
    for number, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        assert gradient.shape == x.shape
        found = np.empty(x.size)
        for i in range(x.size):
            values = []
            for sign in (1, -1):
                moved = x.copy()
                moved.reshape(-1)[i] += sign * STEP
                values.append(function(*inputs[:number], moved, *inputs[number + 1 :]))
            found[i] = (values[0] - values[1]) / (2 * STEP)
        scale = max(1.0, float(np.max(np.abs(gradient))))
        np.testing.assert_allclose(found, gradient.reshape(-1), rtol=0, atol=TOLERANCE * scale)


def test_linear() -> None:
    x, w, b, dy = random(2, 3, 5), random(7, 5), random(7), random(2, 3, 7)
    for bias in (b, None):
        inputs = [x, w] if bias is None else [x, w, bias]

        def scalar(x: Doubles, w: Doubles, b: Doubles | None = None) -> float:
            return float(np.sum(linear.reference_forward(x, w, b) * dy))

        check(scalar, inputs, list(linear.reference_backward(x, w, dy))[: len(inputs)])


@pytest.mark.parametrize("function", ["gelu", "relu"])
def test_activation(function: str) -> None:
    x, dy = 2 * random(40), random(40, seed=1)
    gradient = activation.reference_backward(x, function, dy)
    check(lambda x: np.sum(activation.reference_forward(x, function) * dy), [x], [gradient])


def test_layernorm() -> None:
    x, gain, bias, dy = random(2, 3, 5), random(5), random(5, seed=1), random(2, 3, 5, seed=1)

    def scalar(*inputs: Doubles) -> float:
        gain, bias = inputs[1:] if len(inputs) == 3 else (None, None)
        return float(np.sum(layernorm.reference_forward(inputs[0], gain, bias) * dy))

    check(scalar, [x, gain, bias], list(layernorm.reference_backward(x, gain, dy)))
    check(scalar, [x], [layernorm.reference_backward(x, None, dy)[0]])


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_residual_add(probability: float) -> None:
    x, branch, dy = random(3, 5), random(3, 5, seed=1), random(3, 5, seed=2)
    keep = dropout.keep_mask(1, 2, 3, x.shape, probability)

    def scalar(x: Doubles, branch: Doubles) -> float:
        return float(np.sum(residual_add.reference_forward(x, branch, keep) * dy))

    check(scalar, [x, branch], list(residual_add.reference_backward(dy, keep)))


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_embed(probability: float) -> None:
    ids = np.array([[0, 3, 3], [1, 3, 0]], np.int32)
    token, position, dy = random(5, 4), random(6, 4), random(2, 3, 4)
    keep = dropout.keep_mask(1, 2, 3, dy.shape, probability)

    def scalar(token: Doubles, position: Doubles) -> float:
        return float(np.sum(embed.reference_forward(ids, token, position, keep) * dy))

    check(scalar, [token, position], list(embed.reference_backward(ids, token, position, keep, dy)))


def test_loss() -> None:
    logits, targets = 3 * random(2, 3, 7), np.array([[0, 6, 2], [3, 3, 1]], np.int32)

    def scalar(logits: Doubles) -> float:
        return 0.25 * float(np.sum(loss.reference_forward(logits, targets)))

    check(scalar, [logits], [loss.reference_backward(logits, targets, 0.25)])


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_attention(probability: float) -> None:
    qkv, dy = random(2, 5, 3 * 2 * 3), random(2, 5, 2 * 3)
    keep = dropout.keep_mask(1, 2, 3, (2, 2, 5, 5), probability)

    def scalar(qkv: Doubles) -> float:
        return float(np.sum(attention.reference_forward(qkv, 2, keep) * dy))

    check(scalar, [qkv], [attention.reference_backward(qkv, 2, keep, dy)])


def test_attention_is_causal() -> None:
    qkv = random(1, 6, 3 * 4)
    edited = qkv.copy()
    edited[:, 4:] += 1
    before, after = (attention.reference_forward(x, 2, None) for x in (qkv, edited))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert not np.any(before[:, 4:] == after[:, 4:])


def test_dropout_keeps_about_its_share() -> None:
    keep = dropout.keep_mask(5, 6, 7, (100, 100), 0.25)
    assert keep is not None
    assert set(np.unique(keep)) == {0.0, 1 / 0.75}
    assert abs(np.mean(keep) - 1) < 0.03
    moved = dropout.keep_mask(5, 6, 7, (10,), 0.25, first=313)
    assert moved is not None
    np.testing.assert_array_equal(moved, keep.reshape(-1)[313:323])


def test_clipping() -> None:
    gradients = {"a": np.array([3.0]), "b": np.array([0.0, 4.0])}
    assert optimizer.clipped(gradients, 0.0) == gradients
    assert optimizer.clipped(gradients, 5.0) == gradients
    half = optimizer.clipped(gradients, 2.5)
    np.testing.assert_allclose([half["a"][0], half["b"][1]], [1.5, 2.0])


@pytest.mark.parametrize(
    ("tied", "linear_bias", "norm_parameters", "function", "probability"),
    [
        (True, True, True, "gelu", 0.25),
        (False, False, False, "relu", 0.25),
        (False, True, True, "gelu", 0.0),
    ],
)
def test_whole_model(tied: bool, linear_bias: bool, norm_parameters: bool, function: Any, probability: float) -> None:
    spec = ModelSpec(
        vocab=7,
        context=5,
        d_model=4,
        heads=2,
        layers=2,
        hidden=6,
        activation=function,
        dropout=probability,
        linear_bias=linear_bias,
        norm_parameters=norm_parameters,
        tied=tied,
        init_std=0.02,
        attention="tiled",
    )
    d, h = spec.d_model, spec.hidden
    shapes: dict[str, tuple[int, ...]] = {"embed.token": (7, d), "embed.position": (5, d)}
    for block in ("block0", "block1"):
        for name, wide, deep in (
            ("attn_qkv", 3 * d, d),
            ("attn_out", d, d),
            ("mlp_up", h, d),
            ("mlp_down", d, h),
        ):
            shapes[f"{block}.{name}.weight"] = (wide, deep)
            if linear_bias:
                shapes[f"{block}.{name}.bias"] = (wide,)
    if norm_parameters:
        for norm in ("block0.norm1", "block0.norm2", "block1.norm1", "block1.norm2", "norm"):
            shapes |= {f"{norm}.gain": (d,), f"{norm}.bias": (d,)}
    if not tied:
        shapes["head.weight"] = (7, d)
    generator = np.random.default_rng(3)
    parameters = {name: 0.5 * generator.normal(size=shape) for name, shape in shapes.items()}
    ids, targets = generator.integers(0, 7, (2, 3, 4)).astype(np.int32)
    masks = Masks(seed=8, step=9, training=True)
    mean, gradients = reference_gradients(spec, parameters, ids, targets, masks)
    assert gradients.keys() == parameters.keys()

    def scalar(*values: Doubles) -> float:
        named = dict(zip(parameters, values, strict=True))
        logits = reference_logits(spec, named, ids, masks)
        return float(np.mean(loss.reference_forward(logits, targets)))

    assert scalar(*parameters.values()) == pytest.approx(mean, rel=1e-14)
    check(scalar, list(parameters.values()), [gradients[name] for name in parameters])
