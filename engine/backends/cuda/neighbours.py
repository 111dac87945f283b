"""What a linear layer takes over from the operations around it, so that fewer tensors are written and read back.

x may arrive as int8 planes, made in the kernel of the operation before; its fp32 form then never exists, and what the
weight's gradient needs of it is computed again. The residual sum after a linear layer is done where the product is
written, and its dropout where dy is quantised; an activation or the loss after it hands dy over as planes.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from engine.backends.cuda.run import padded
from engine.operations.activation import Activation
from engine.operations.base import BufferType, Operation
from engine.operations.layernorm import LayerNorm
from engine.operations.linear import Linear
from engine.operations.loss import Loss
from engine.operations.residual_add import ResidualAdd
from engine.program import Program

STEP = 128  # planes are padded to a multiple of this depth
NORM_WIDTH = 1024  # up to this width a warp holds a row in registers
BLOCK_DEPTH = 4096  # up to this depth a block holds rows in registers


@dataclass(frozen=True)
class Neighbours:
    """Operations whose work a linear layer shares; None where it does not."""

    before: LayerNorm | Activation | None = None
    after: ResidualAdd | Activation | Loss | None = None


@dataclass(frozen=True)
class Fusion:
    """Neighbours by the name of the linear layer, and that layer by the name of the neighbour."""

    of: dict[str, Neighbours]
    takes_output: dict[str, Linear]  # of LayerNorm or an activation, as planes
    gives_output: dict[str, Linear]  # to a residual sum, an activation or the loss

    def plane_tensors(self) -> dict[str, Linear]:
        """Tensors that exist only as planes with one exponent per row, by name."""
        return {linear.inputs["x"]: linear for linear in self.takes_output.values()}

    def doubled_tensors(self, program: Program) -> set[str]:
        """Maxima of logits whose gradient is quantised without being written: the largest others stand after them."""
        return {o.outputs["maxima"] for o in program.operations if isinstance(o, Loss) and o.name in self.gives_output}


def no_fusion() -> Fusion:
    return Fusion({}, {}, {})


def fuse(program: Program) -> Fusion:
    users: dict[str, list[Operation]] = defaultdict(list)
    makers: dict[str, Operation] = {}
    for operation in program.operations:
        for name in operation.inputs.values():
            users[name].append(operation)
        for name in operation.outputs.values():
            makers[name] = operation
    accumulates = {step.operation.name: step.accumulates for step in program.backward}
    fusion = no_fusion()
    for linear in (o for o in program.operations if isinstance(o, Linear)):
        x, y = linear.inputs["x"], linear.outputs["y"]
        before = _before(makers[x], linear) if len(users[x]) == 1 else None
        after = _after(users[y][0], linear, accumulates) if len(users[y]) == 1 else None
        fusion.of[linear.name] = Neighbours(before, after)
        if before:
            fusion.takes_output[before.name] = linear
        if after:
            fusion.gives_output[after.name] = linear
    return fusion


def _before(maker: Operation, linear: Linear) -> LayerNorm | Activation | None:
    """The operation that makes x, if it can make planes of it."""
    if linear.deep % 4:
        return None
    if isinstance(maker, LayerNorm):
        return maker if linear.deep <= NORM_WIDTH else None
    return maker if isinstance(maker, Activation) and linear.deep <= BLOCK_DEPTH else None


def _after(
    user: Operation, linear: Linear, accumulates: Mapping[str, frozenset[str]]
) -> ResidualAdd | Activation | Loss | None:
    """The operation that uses y, if work can be shared with it."""
    if linear.wide % 4:
        return None
    if isinstance(user, Loss):
        return user
    if linear.wide > BLOCK_DEPTH:
        return None
    if isinstance(user, ResidualAdd):
        # dx must be dy itself: nothing is added to it that the linear layer, which reads dy, would see.
        return user if user.inputs["branch"] == linear.outputs["y"] and "x" not in accumulates[user.name] else None
    return user if isinstance(user, Activation) else None


def planes(rows: int, depth: int, shards: int = 1) -> BufferType:
    return BufferType((shards, 2, rows, padded(depth, STEP)), "int8")


def planes_with_exponents(rows: int, depth: int) -> BufferType:
    """Planes of a tensor, then one exponent per row."""
    return BufferType((rows, 2 * padded(depth, STEP) + 4), "int8")
