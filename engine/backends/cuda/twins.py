"""Which CUDA half belongs to which operation."""

from typing import Any

from engine.backends.cuda.attention import AttentionTwin
from engine.backends.cuda.elementwise import (
    ActivationTwin,
    EmbedTwin,
    LayerNormTwin,
    LossTwin,
    ResidualTwin,
)
from engine.backends.cuda.linear import LinearTwin
from engine.backends.cuda.neighbours import Fusion, Neighbours
from engine.backends.cuda.twin import Twin
from engine.operations.activation import Activation
from engine.operations.attention import Attention
from engine.operations.base import Operation
from engine.operations.embed import Embed
from engine.operations.layernorm import LayerNorm
from engine.operations.linear import Linear
from engine.operations.loss import Loss
from engine.operations.residual_add import ResidualAdd
from engine.program import Program


def twin_of(program: Program, operation: Operation, fusion: Fusion) -> Twin[Any]:
    """The CUDA half of an operation of this program."""
    name = operation.name
    if isinstance(operation, Linear):
        return LinearTwin(fusion.of.get(name, Neighbours()), operation.parameters["weight"] in embedded(program))
    if isinstance(operation, Attention):
        return AttentionTwin()
    if isinstance(operation, LayerNorm):
        return LayerNormTwin(fusion.takes_output.get(name))
    if isinstance(operation, Embed):
        return EmbedTwin(program.spec.vocab, program.spec.tied)
    if isinstance(operation, Loss):
        return LossTwin(program.spec.vocab, fusion.gives_output.get(name))
    if isinstance(operation, Activation | ResidualAdd):
        width = program.tensors[operation.outputs["y"]].shape[-1]
        if not isinstance(width, int):
            raise AssertionError(f"{operation.name}: the last axis of {operation.outputs['y']} is {width}")
        made_by = fusion.gives_output.get(name)
        if isinstance(operation, ResidualAdd):
            return ResidualTwin(width, made_by)
        return ActivationTwin(width, made_by, fusion.takes_output.get(name))
    raise AssertionError(f"{operation.kind} has no CUDA half")


def embedded(program: Program) -> set[str]:
    """Parameters of the embedding."""
    return {p for o in program.operations if isinstance(o, Embed) for p in o.parameters.values()}
