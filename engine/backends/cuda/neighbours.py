"""What a linear layer takes over from the operations around it, so that fewer tensors are written and read back.

x may arrive as int8 planes, made in the kernel of the operation before; its fp32 form then never exists, and what the
weight's gradient needs of it is computed again. The residual sum after a linear layer is done where the product is
written, and its dropout where dy is quantised; an activation or the loss after it hands dy over as planes.
"""

from collections import defaultdict
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
    maker: dict[str, Operation] = {}
    for operation in program.operations:
        for name in operation.inputs.values():
            users[name].append(operation)
        for name in operation.outputs.values():
            maker[name] = operation
    accumulates = {step.operation.name: step.accumulates for step in program.backward}
    fusion = no_fusion()
    for linear in (o for o in program.operations if isinstance(o, Linear)):
        x, y = linear.inputs["x"], linear.outputs["y"]
        before = maker[x] if len(users[x]) == 1 else None
        after = users[y][0] if len(users[y]) == 1 else None
        if not (
            (isinstance(before, LayerNorm) and linear.deep % 4 == 0 and linear.deep <= NORM_WIDTH)
            or (isinstance(before, Activation) and linear.deep % 4 == 0 and linear.deep <= BLOCK_DEPTH)
        ):
            before = None
        if not (
            (isinstance(after, Loss) and linear.wide % 4 == 0)
            or (isinstance(after, Activation) and linear.wide % 4 == 0 and linear.wide <= BLOCK_DEPTH)
            or (
                isinstance(after, ResidualAdd)
                and linear.wide % 4 == 0
                and linear.wide <= BLOCK_DEPTH
                and after.inputs["branch"] == y
                and "x" not in accumulates[after.name]
            )
        ):
            after = None
        assert before is None or isinstance(before, LayerNorm | Activation)
        assert after is None or isinstance(after, ResidualAdd | Activation | Loss)
        fusion.of[linear.name] = Neighbours(before, after)
        if before:
            fusion.takes_output[before.name] = linear
        if after:
            fusion.gives_output[after.name] = linear
    return fusion


def planes(rows: int, depth: int, shards: int = 1) -> BufferType:
    return BufferType((shards, 2, rows, padded(depth, STEP)), "int8")


def planes_with_exponents(rows: int, depth: int) -> BufferType:
    """Planes of a tensor, then one exponent per row."""
    return BufferType((rows, 2 * padded(depth, STEP) + 4), "int8")
