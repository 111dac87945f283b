"""Work of a configuration: counted from the engine's program, not measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from engine.backends.cuda.mixed.operations import FlashAttention, Mlp
from engine.operations.attention import Attention
from engine.operations.base import BufferType, Operation, Sizes
from engine.operations.linear import Linear
from engine.program import Program
from engine.spec import TrainSpec


@dataclass(frozen=True)
class Work:
    """Of one optimizer step, and of `steps`.

    operations: multiplications and additions in matrix products, backward included; what is elementwise is a small part
    beside them and not counted. again: those of them that blocks computed again take. bytes: tensors, parameters and
    optimizer state that the operations read and write, each once for each operation that does: what has to go through
    memory at the least, if no operations are fused.
    """

    tokens: int
    operations: int
    again: int
    bytes: int
    steps: int


def work_of(program: Program, train: TrainSpec) -> Work:
    """The work of training, whatever the number of shards and threads."""
    sizes = Sizes(batch=train.batch, context=program.spec.context, threads=1)
    elements = {p.name: prod(p.shape) for p in program.parameters}
    optimizer = 7 * 4 * sum(elements.values())  # reads w, m, v, g; writes w, m, v
    repeated = [operation for step in program.backward for operation in step.again]
    again = sum(_operations(o, sizes)[0] for o in repeated)
    return Work(
        tokens=train.batch * program.spec.context,
        operations=sum(sum(_operations(o, sizes)) for o in program.operations) + again,
        again=again,
        bytes=sum(sum(_bytes(program, o, sizes, elements)) for o in program.operations)
        + sum(_bytes(program, o, sizes, elements)[0] for o in repeated)
        + optimizer,
        steps=train.steps,
    )


def _operations(operation: Operation, sizes: Sizes) -> tuple[int, int]:
    """Of the forward pass and of the backward pass."""
    if isinstance(operation, Linear):
        product = 2 * sizes.batch * sizes.context * operation.deep * operation.wide
        return product, 2 * product  # the input's gradient and the weight's
    if isinstance(operation, Attention):
        pairs = sizes.batch * operation.heads * sizes.context * (sizes.context + 1) // 2
        product = 2 * pairs * operation.width
        # Scores and sums; gradients of weights, v, q and k, and scores again where they are not stored.
        return 2 * product, (4 if operation.stored else 5) * product
    if isinstance(operation, Mlp):
        product = 4 * sizes.batch * sizes.context * operation.width * operation.hidden
        return product, 2 * product
    if isinstance(operation, FlashAttention):
        pairs = sizes.batch * operation.heads * sizes.context * (sizes.context + 1) // 2
        return 4 * pairs * operation.width, 10 * pairs * operation.width
    return 0, 0


def _bytes(program: Program, operation: Operation, sizes: Sizes, elements: Mapping[str, int]) -> tuple[int, int]:
    """Of the forward pass and of the backward pass. elements: of each parameter."""
    tensors = {**operation.inputs, **operation.outputs}
    size = {
        role: BufferType(program.tensors[name].at(sizes), program.tensors[name].dtype).bytes
        for role, name in tensors.items()
    }
    parameters = 4 * sum(elements[name] for name in operation.parameters.values())
    forward = sum(size.values()) + parameters
    kept = sum(size[role] for role in tensors if role in operation.kept)
    gradients = sum(size[role] for role in tensors if role not in operation.constant)
    # Backward reads parameters, and adds to their gradients.
    return forward, kept + gradients + 3 * parameters
