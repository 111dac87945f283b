"""From the common program to that of the tier `prod`: tensors of 16 bits, and neighbours joined."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.backends.cuda.mixed.hopper_norm import serves_width
from engine.backends.cuda.mixed.operations import Classifier, FlashAttention, Mlp, ResidualNorm
from engine.errors import SpecError
from engine.operations.activation import Activation
from engine.operations.attention import Attention
from engine.operations.base import Operation, TensorType
from engine.operations.layernorm import LayerNorm
from engine.operations.linear import Linear
from engine.operations.loss import Loss
from engine.operations.residual_add import ResidualAdd
from engine.program import Program, derive_backward
from engine.spec import HALF_DTYPES, ModelSpec, Precision

VOCABULARY_MULTIPLE = 64  # columns of the logits: tensor cores want whole lines
WIDTH_MULTIPLE = 8  # elements of 16 bytes, what the libraries' fast kernels and ours load at once
EIGHT_BIT_MULTIPLE = 16  # elements of 16 bytes in the precision fp8
WIDEST_HEAD = 128


def check_widths(spec: ModelSpec, precision: Precision) -> None:
    """Raise SpecError where the libraries have no fast product or attention for a width."""
    for name, width in (
        ("model.d_model", spec.d_model),
        ("model.hidden", spec.hidden),
        ("the head's width d_model/heads", spec.head_width),
    ):
        if width % WIDTH_MULTIPLE:
            raise SpecError(f"tier prod needs {name} to be a multiple of {WIDTH_MULTIPLE}, found {width}")
    if precision == "fp8":
        for name, width in (("model.d_model", spec.d_model), ("model.hidden", spec.hidden)):
            if width % EIGHT_BIT_MULTIPLE:
                raise SpecError(f"precision fp8 needs {name} to be a multiple of {EIGHT_BIT_MULTIPLE}, found {width}")
    if spec.head_width > WIDEST_HEAD:
        raise SpecError(f"tier prod needs heads at most {WIDEST_HEAD} wide, found {spec.head_width}: use more heads")
    if spec.d_model > 8192:
        raise SpecError(f"tier prod needs model.d_model of at most 8192, found {spec.d_model}")


@dataclass
class _Cursor:
    """Walks over operations."""

    operations: Sequence[Operation]
    at: int = 0

    def take(self) -> Operation:
        self.at += 1
        return self.operations[self.at - 1]

    def next_is(self, *kinds: type[Operation]) -> bool:
        following = self.operations[self.at : self.at + len(kinds)]
        return len(following) == len(kinds) and all(isinstance(o, k) for o, k in zip(following, kinds, strict=True))


def mixed_program(program: Program, precision: Precision, recompute: int = 0, own: bool = False) -> Program:
    """The same model, parameters and places of random numbers; raises SpecError where widths do not suit.

    own: whether our own kernels serve, which take some products together with the LayerNorm after them.

    The product at the end of a branch is computed with the residual sum: by our own kernel where it has room for whole
    rows, else by the library, which can add where there is no dropout in between.
    """
    spec = program.spec
    check_widths(spec, precision)
    half = HALF_DTYPES[precision]
    own_sum = own and serves_width(spec.d_model)
    tensors = {name: _narrow(type, half) for name, type in program.tensors.items()}
    joined: list[Operation] = []
    cursor = _Cursor(program.operations)
    while cursor.at < len(program.operations):
        operation = cursor.take()
        if isinstance(operation, Linear) and cursor.next_is(Activation, Linear):
            activation, down = cursor.take(), cursor.take()
            operation = _mlp(operation, activation, down)
        elif isinstance(operation, ResidualAdd) and cursor.next_is(LayerNorm):
            with_product = precision != "fp8" and (own_sum or operation.probability == 0)
            operation = _residual_norm(operation, cursor.take(), joined[-1], with_product)
        elif isinstance(operation, Attention):
            operation = _attention(operation, tensors)
        elif isinstance(operation, Loss):
            operation = _classifier(operation, spec.vocab, tensors, half)
        joined.append(replace(operation, index=len(joined)))
    operations = tuple(joined)
    groups = [f"block{number}." for number in range(recompute)]
    return Program(operations, derive_backward(operations, groups), tensors, program.parameters, spec)


def _narrow(type: TensorType, half: str) -> TensorType:
    """Activations have 16 bits; token numbers and statistics of rows stay as they are."""
    wide = type.dtype == "float32" and len(type.shape) == 3 and type.shape[:2] == ("B", "T")
    return TensorType(type.shape, half) if wide else type


def _mlp(up: Linear, activation: Operation, down: Operation) -> Mlp:
    assert isinstance(activation, Activation) and isinstance(down, Linear)
    parameters = {"up": up.parameters["weight"], "down": down.parameters["weight"]}
    for role, linear in (("up_bias", up), ("down_bias", down)):
        if "bias" in linear.parameters:
            parameters[role] = linear.parameters["bias"]
    return Mlp(
        name=up.name.replace("mlp_up", "mlp"),
        index=0,
        inputs=up.inputs,
        outputs={"before": up.outputs["y"], "after": activation.outputs["y"], "y": down.outputs["y"]},
        parameters=parameters,
        width=up.deep,
        hidden=up.wide,
        function=activation.function,
    )


def _residual_norm(residual: ResidualAdd, norm: Operation, before: Operation, with_product: bool) -> ResidualNorm:
    assert isinstance(norm, LayerNorm)
    operand = {"operand": before.outputs["after"] if isinstance(before, Mlp) else before.inputs["x"]}
    bias = before.parameters.get("down_bias") or before.parameters.get("bias")
    return ResidualNorm(
        name=residual.name,
        index=0,
        inputs={**residual.inputs, **(operand if with_product else {})},
        outputs={"sum": residual.outputs["y"], **norm.outputs},
        parameters=norm.parameters,
        width=norm.width,
        probability=residual.probability,
        site=residual.site,
        branch_bias=bias,
    )


def _attention(attention: Attention, tensors: dict[str, TensorType]) -> FlashAttention:
    stats = f"{attention.name}.stats"
    tensors[stats] = TensorType(("B", attention.heads, "T"))
    return FlashAttention(
        name=attention.name,
        index=0,
        inputs=attention.inputs,
        outputs={"y": attention.outputs["y"], "stats": stats},
        heads=attention.heads,
        width=attention.width,
        probability=attention.probability,
        site=attention.site,
    )


def _classifier(loss: Loss, vocab: int, tensors: dict[str, TensorType], half: str) -> Classifier:
    padded = -(-vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    tensors[loss.inputs["logits"]] = TensorType(("B", "T", padded), half)
    return Classifier(
        name=loss.name,
        index=0,
        inputs=loss.inputs,
        outputs={"losses": loss.outputs["losses"]},
        vocab=vocab,
        padded=padded,
    )
