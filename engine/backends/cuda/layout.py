"""What the card asks of the planner."""

from collections.abc import Mapping

import numpy as np

from engine.backends.cuda.neighbours import fuse, no_fusion, planes_with_exponents
from engine.backends.cuda.quantising import WEIGHT
from engine.backends.cuda.twin import Twin
from engine.backends.cuda.twins import twin_of
from engine.operations.base import BufferType, Operation, Sizes
from engine.operations.linear import Linear
from engine.optimizer import NORM_CHUNK
from engine.program import BackwardStep, Program
from engine.spec import TrainSpec

MOST_SHARDS = 16  # that are taken together, as in sums.cuh
ADAMW_PIECE = 1 << 13  # elements that one block of the optimizer updates
VALUES = np.dtype(
    [
        ("key", "<u4", 2),
        ("step", "<u4"),
        ("loss_scale", "<f4"),
        ("rate", "<f4"),
        ("decay", "<f4"),
        ("correction", "<f4", 2),
    ]
)
OUTCOME = np.dtype([("norm", "<f8"), ("loss_total", "<i8"), ("clip", "<f4"), ("stop", "<i4")])
ALIGNMENT = 64
PIECE = np.dtype([("start", "<i8"), ("parameter", "<i4"), ("decayed", "<i4"), ("first", "<i8"), ("last", "<i8")])


def _one_after_another(types: Mapping[str, BufferType]) -> tuple[dict[str, int], int]:
    """First byte of each in one buffer, and the bytes of all."""
    places, end = {}, 0
    for name, type in types.items():
        places[name] = end
        end += -(-type.bytes // ALIGNMENT) * ALIGNMENT
    return places, end


class CudaLayout:
    """Several shards at a time; the copy that is saved goes to the host."""

    threads = 1
    saves_in_arena = False
    # Bytes. Where rows begin within a line of the card's cache, which has 128, a step takes up to 4 % longer.
    alignment = 1024
    # Shards are taken together up to this many tokens: enough to fill a card, beyond it only memory grows.
    tokens_at_once = 8192
    most_shards = MOST_SHARDS
    piece = ADAMW_PIECE

    def __init__(self, program: Program, train: TrainSpec, tier: str, fused: bool = True) -> None:
        """fused: whether neighbouring operations may share a kernel, which moves no bit."""
        self.program = program
        self.train = train
        self.fusion = fuse(program) if fused and tier == "portable" else no_fusion()
        self._plane_tensors = self.fusion.plane_tensors()
        self._doubled = self.fusion.doubled_tensors(program)
        self.twins: dict[str, Twin[Operation]] = self.twins_of(program)
        self.weights = [o for o in program.operations if isinstance(o, Linear)] if tier == "portable" else []
        # What is copied between host and card in one go, by the buffer that it stands in one after another.
        self.copied = {"inputs": self._inputs(), "results": self._results()}
        self.copied_places = {name: _one_after_another(types) for name, types in self.copied.items()}
        at_once = self.shards_at_once(train.shards)
        self.zero_places, self.zero_bytes = _one_after_another(
            {
                f"{operation.name}/{role}": type
                for operation in program.operations
                for role, type in self.twins[operation.name].zeroed(operation, tier, at_once).items()
            }
        )

    def _inputs(self) -> dict[str, BufferType]:
        """Token numbers of a whole batch with their targets, and the step's numbers."""
        return {
            "batch": BufferType((2, self.train.batch, self.program.spec.context), "int32"),
            "values": BufferType((VALUES.itemsize,), "uint8"),
        }

    def _results(self) -> dict[str, BufferType]:
        """What a step tells the host: zeros before it."""
        parameters = len(self.program.parameters)
        return {
            "outcome": BufferType((OUTCOME.itemsize,), "uint8"),
            "flags": BufferType((2, len(self.program.operations)), "int32"),
            "bad": BufferType((parameters,), "int32"),
            "sums": BufferType((parameters, 3, 2), "uint64"),
        }

    def twins_of(self, program: Program) -> dict[str, Twin[Operation]]:
        """The CUDA half of each operation, by name."""
        return {o.name: twin_of(program, o, self.fusion) for o in program.operations}

    def lingers(self, step: BackwardStep) -> int:
        """A weight's gradient runs beside the steps that follow, up to the linear layer after the next one; the head's,
        whose operands are the largest of all while most activations are still there, beside the next one alone."""
        operation = step.operation
        return 1 if self.program.logits in (*operation.inputs.values(), *operation.outputs.values()) else 5

    def waits(self, step: BackwardStep) -> bool:
        return self.twins[step.operation.name].joins or bool(step.again)

    def shards_at_once(self, shards: int) -> int:
        return self.shards_within(shards, self.tokens_at_once)

    def shards_within(self, shards: int, most_tokens: int) -> int:
        """The largest power of two that divides the shards and keeps to a number of tokens; at least 1."""
        tokens = self.train.batch // shards * self.program.spec.context
        count = 1
        while shards % (2 * count) == 0 and 2 * count * tokens <= most_tokens and 2 * count <= self.most_shards:
            count *= 2
        return count

    def gradient_sets(self, shards: int) -> int:
        """One for each level of the tree over groups of shards: within a group gradients are joined on the way."""
        return max(1, (shards // self.shards_at_once(shards) - 1).bit_length())

    def tensor_type(self, name: str, type: BufferType) -> BufferType:
        if name in self._doubled:
            return BufferType((2, *type.shape), type.dtype)
        if name not in self._plane_tensors:
            return type
        return planes_with_exponents(int(np.prod(type.shape[:-1])), type.shape[-1])

    def kept_tensors(self, step: BackwardStep) -> list[str]:
        """What is only there as planes is computed again, from what the operation that made it keeps."""
        return [name for name in step.kept_tensors() if name not in self._plane_tensors]

    def derived(self, operation: Operation, tier: str) -> dict[str, BufferType]:
        return self.twins[operation.name].derived(operation, tier)

    def forward_work(self, operation: Operation, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return self.twins[operation.name].forward_work(operation, sizes, tier)

    def backward_work(self, operation: Operation, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        shards = self.shards_at_once(self.train.shards)
        return self.twins[operation.name].backward_work(operation, sizes, tier, shards)

    def token_gradients(self) -> dict[str, BufferType]:
        """Of the token embedding, by shard: a tied head writes them, the embedding adds to them at the other end."""
        spec = self.program.spec
        if not spec.tied:
            return {}
        shape = (self.shards_at_once(self.train.shards), spec.vocab, spec.d_model)
        return {"token_gradients": BufferType(shape, "float32")}

    def pieces(self) -> list[tuple[int, int, int]]:
        """(parameter number, first, last element) of every block of the optimizer."""
        return [
            (number, first, min(first + self.piece, size))
            for number, parameter in enumerate(self.program.parameters)
            for size in [int(np.prod(parameter.shape))]
            for first in range(0, size, self.piece)
        ]

    def lasting(self, program: Program, elements: int) -> dict[str, BufferType]:
        """What a step is told and tells, and the optimizer's tables."""
        return {
            **{name: BufferType((size,), "uint8") for name, (_, size) in self.copied_places.items()},
            "zeros": BufferType((self.zero_bytes,), "uint8"),
            "weight_table": BufferType((len(self.weights) * WEIGHT.itemsize,), "uint8"),
            **self.token_gradients(),
            "partial": BufferType((-(-elements // NORM_CHUNK),), "float64"),
            "pieces": BufferType((len(self.pieces()) * PIECE.itemsize,), "uint8"),
        }
