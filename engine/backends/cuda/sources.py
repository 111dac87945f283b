"""The kernels' source text: one `.cu` file beside each operation, shared device code in `engine/numerics/*.cuh`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from engine.numerics import elementary

ENGINE = Path(__file__).resolve().parent.parent.parent
UNITS = {
    "activation": "operations/activation.cu",
    "activation_hopper_mixed": "operations/activation_hopper_mixed.cu",
    "activation_mixed": "operations/activation_mixed.cu",
    "attention": "operations/attention.cu",
    "attention_hopper_mixed": "operations/attention_hopper_mixed.cu",
    "attention_mixed": "operations/attention_mixed.cu",
    "dropout": "operations/dropout.cu",
    "elementary": "numerics/elementary.cu",
    "embed": "operations/embed.cu",
    "embed_mixed": "operations/embed_mixed.cu",
    "layernorm": "operations/layernorm.cu",
    "layernorm_mixed": "operations/layernorm_mixed.cu",
    "linear": "operations/linear.cu",
    "linear_fp8_mixed": "operations/linear_fp8_mixed.cu",
    "linear_mixed": "operations/linear_mixed.cu",
    "linear_quantise": "operations/linear_quantise.cu",
    "loss": "operations/loss.cu",
    "loss_mixed": "operations/loss_mixed.cu",
    "norm_hopper_mixed": "operations/norm_hopper_mixed.cu",
    "residual_add": "operations/residual_add.cu",
    "weight_gradient_mixed": "operations/weight_gradient_mixed.cu",
    "optimizer": "optimizer.cu",
    "optimizer_mixed": "optimizer_mixed.cu",
}


@dataclass(frozen=True)
class Unit:
    """One translation unit: a name from UNITS and the macros it is compiled with."""

    name: str
    macros: Mapping[str, int] = field(default_factory=dict)


@cache
def source(unit: str) -> str:
    return (ENGINE / UNITS[unit]).read_text(encoding="utf-8")


@cache
def headers() -> dict[str, str]:
    """Every header by the name that sources include it with."""
    files = sorted((ENGINE / "numerics").glob("*.cuh"))
    return {f.name: f.read_text(encoding="utf-8") for f in files} | {"constants.cuh": constants()}


def constants() -> str:
    """The constants of elementary.py as exact literals, so that they are written down in one place."""
    lines = ["#pragma once"]
    for name, value in vars(elementary).items():
        if isinstance(value, np.float32) and np.isfinite(value):
            lines.append(f"static constexpr float {name} = {float(value).hex()}f;")
        elif isinstance(value, np.int32):
            lines.append(f"static constexpr int {name} = {int(value)};")
    return "\n".join(lines) + "\n"
