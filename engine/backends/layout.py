"""What a backend asks of the planner: how much of the batch it takes at once, and the buffers its kernels need."""

from typing import Protocol

from engine.operations.base import BufferType, Operation, Sizes
from engine.placement import ALIGNMENT
from engine.program import BackwardStep, Program


class Layout(Protocol):
    """Sizes of one run and buffers beside the program's own tensors. None of it moves a bit."""

    threads: int
    saves_in_arena: bool  # whether the copy that is saved stands in the arena
    alignment: int  # of every buffer, in bytes

    def lingers(self, step: BackwardStep) -> int:
        """Steps of the backward half that a buffer stays after its last use in this one."""
        ...

    def waits(self, step: BackwardStep) -> bool:
        """Whether all work beside is over before this step."""
        ...

    def shards_at_once(self, shards: int) -> int: ...
    def gradient_sets(self, shards: int) -> int: ...
    def tensor_type(self, name: str, type: BufferType) -> BufferType:
        """How a tensor of this program type is stored in the forward half."""
        ...

    def kept_tensors(self, step: BackwardStep) -> list[str]:
        """Tensors of the forward half that a step of the backward half reads again."""
        ...

    def derived(self, operation: Operation, tier: str) -> dict[str, BufferType]: ...
    def forward_work(self, operation: Operation, sizes: Sizes, tier: str) -> dict[str, BufferType]: ...
    def backward_work(self, operation: Operation, sizes: Sizes, tier: str) -> dict[str, BufferType]: ...
    def lasting(self, program: Program, elements: int) -> dict[str, BufferType]: ...


class CpuLayout:
    """One shard at a time, and what the operations name themselves."""

    saves_in_arena = True
    alignment = ALIGNMENT

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def lingers(self, step: BackwardStep) -> int:
        return 0

    def waits(self, step: BackwardStep) -> bool:
        return True

    def shards_at_once(self, shards: int) -> int:
        return 1

    def gradient_sets(self, shards: int) -> int:
        """Sets that the binary tree over shards needs: ceil(log2 S) + 1."""
        return (shards - 1).bit_length() + 1

    def tensor_type(self, name: str, type: BufferType) -> BufferType:
        return type

    def kept_tensors(self, step: BackwardStep) -> list[str]:
        return step.kept_tensors()

    def derived(self, operation: Operation, tier: str) -> dict[str, BufferType]:
        return operation.derived(tier)

    def forward_work(self, operation: Operation, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return operation.forward_work(sizes, tier)

    def backward_work(self, operation: Operation, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return operation.backward_work(sizes, tier)

    def lasting(self, program: Program, elements: int) -> dict[str, BufferType]:
        """Buffers of the optimizer and of the step as a whole: small, and kept outside the arena here."""
        return {}
