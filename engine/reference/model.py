"""A whole pre-norm GPT (Radford et al. 2019): loss and all parameter gradients of a batch.

Written as the model is drawn, without the program that the engine derives: names of parameters,
shapes and the order of dropout sites (embedding, then per block attention weights, attention
branch, MLP branch) are what they share.
"""

from dataclasses import dataclass, field

import numpy as np

from engine.numerics.types import Doubles, Words
from engine.reference import activation, attention, embed, layernorm, linear, loss, residual_add
from engine.reference.dropout import keep_mask
from engine.spec import ModelSpec

Parameters = dict[str, Doubles]


@dataclass
class Masks:
    """Where masks come from: `seed` and 0-based `step`; `training` False switches dropout off."""

    seed: int
    step: int
    training: bool

    def of(self, spec: ModelSpec, site: int, shape: tuple[int, ...]) -> Doubles | None:
        probability = spec.dropout if self.training else 0.0
        return keep_mask(self.seed, self.step, site, shape, probability)


@dataclass
class _Pass:
    """One forward pass; the tensors that backward needs, by name."""

    spec: ModelSpec
    parameters: Parameters
    masks: Masks
    kept: Parameters = field(default_factory=dict)

    def linear(self, name: str, x: Doubles, weight: str | None = None) -> Doubles:
        self.kept[name] = x
        w = self.parameters[weight or f"{name}.weight"]
        return linear.reference_forward(x, w, self.parameters.get(f"{name}.bias"))

    def norm(self, name: str, x: Doubles) -> Doubles:
        self.kept[name] = x
        gain, bias = (self.parameters.get(f"{name}.{role}") for role in ("gain", "bias"))
        return layernorm.reference_forward(x, gain, bias)

    def block(self, number: int, x: Doubles) -> Doubles:
        name, site = f"block{number}", 1 + 3 * number
        b, t, _ = x.shape
        qkv = self.linear(f"{name}.attn_qkv", self.norm(f"{name}.norm1", x))
        self.kept[f"{name}.attn"] = qkv
        keep = self.masks.of(self.spec, site, (b, self.spec.heads, t, t))
        y = attention.reference_forward(qkv, self.spec.heads, keep)
        y = self.linear(f"{name}.attn_out", y)
        x = residual_add.reference_forward(x, y, self.masks.of(self.spec, site + 1, y.shape))
        y = self.linear(f"{name}.mlp_up", self.norm(f"{name}.norm2", x))
        self.kept[f"{name}.mlp_act"] = y
        y = self.linear(f"{name}.mlp_down", activation.reference_forward(y, self.spec.activation))
        return residual_add.reference_forward(x, y, self.masks.of(self.spec, site + 2, y.shape))

    def logits(self, ids: Words) -> Doubles:
        token, position = (self.parameters[f"embed.{role}"] for role in ("token", "position"))
        keep = self.masks.of(self.spec, 0, (*ids.shape, self.spec.d_model))
        x = embed.reference_forward(ids, token, position, keep)
        for number in range(self.spec.layers):
            x = self.block(number, x)
        return self.linear("head", self.norm("norm", x), self.head_weight)

    @property
    def head_weight(self) -> str:
        return "embed.token" if self.spec.tied else "head.weight"

    def linear_back(self, name: str, dy: Doubles, into: Parameters, weight: str = "") -> Doubles:
        weight = weight or f"{name}.weight"
        dx, dw, db = linear.reference_backward(self.kept[name], self.parameters[weight], dy)
        into[weight] = into.get(weight, 0.0) + dw
        if f"{name}.bias" in self.parameters:
            into[f"{name}.bias"] = db
        return dx

    def norm_back(self, name: str, dy: Doubles, into: Parameters) -> Doubles:
        gain = self.parameters.get(f"{name}.gain")
        dx, dgain, dbias = layernorm.reference_backward(self.kept[name], gain, dy)
        if gain is not None:
            into[f"{name}.gain"], into[f"{name}.bias"] = dgain, dbias
        return dx

    def block_back(self, number: int, dx: Doubles, into: Parameters) -> Doubles:
        name, site = f"block{number}", 1 + 3 * number
        b, t, _ = dx.shape
        spec = self.spec
        dx, dy = residual_add.reference_backward(dx, self.masks.of(spec, site + 2, dx.shape))
        dy = self.linear_back(f"{name}.mlp_down", dy, into)
        dy = activation.reference_backward(self.kept[f"{name}.mlp_act"], spec.activation, dy)
        dy = self.linear_back(f"{name}.mlp_up", dy, into)
        dx = dx + self.norm_back(f"{name}.norm2", dy, into)
        dx, dy = residual_add.reference_backward(dx, self.masks.of(spec, site + 1, dx.shape))
        dy = self.linear_back(f"{name}.attn_out", dy, into)
        keep = self.masks.of(spec, site, (b, spec.heads, t, t))
        dy = attention.reference_backward(self.kept[f"{name}.attn"], spec.heads, keep, dy)
        dy = self.linear_back(f"{name}.attn_qkv", dy, into)
        return dx + self.norm_back(f"{name}.norm1", dy, into)

    def gradients(self, ids: Words, dlogits: Doubles) -> Parameters:
        into: Parameters = {}
        dx = self.norm_back("norm", self.linear_back("head", dlogits, into, self.head_weight), into)
        for number in reversed(range(self.spec.layers)):
            dx = self.block_back(number, dx, into)
        token, position = (self.parameters[f"embed.{role}"] for role in ("token", "position"))
        keep = self.masks.of(self.spec, 0, dx.shape)
        dtoken, dposition = embed.reference_backward(ids, token, position, keep, dx)
        into["embed.token"] = into.get("embed.token", 0.0) + dtoken
        into["embed.position"] = dposition
        return into


def reference_logits(spec: ModelSpec, parameters: Parameters, ids: Words, masks: Masks) -> Doubles:
    """Logits [B, T, V]; parameters are float64 arrays by name."""
    return _Pass(spec, parameters, masks).logits(ids)


def reference_gradients(
    spec: ModelSpec, parameters: Parameters, ids: Words, targets: Words, masks: Masks
) -> tuple[float, Parameters]:
    """Mean loss in nats per token of a whole batch, and its gradient by every parameter."""
    run = _Pass(spec, parameters, masks)
    logits = run.logits(ids)
    mean = float(np.mean(loss.reference_forward(logits, targets)))
    return mean, run.gradients(ids, loss.reference_backward(logits, targets, 1 / targets.size))
