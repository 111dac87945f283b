"""The CUDA half of an operation: its scratch buffers and the kernels it launches."""

from typing import Generic, TypeVar

from engine.backends.cuda.card import Card
from engine.backends.cuda.run import Run
from engine.operations.base import BufferType, Operation, Sizes

Kind = TypeVar("Kind", bound=Operation)


class Twin(Generic[Kind]):
    """What one kind of operation does on the card. The default needs nothing beside the program's tensors."""

    # Whether backward must find finished what an earlier operation's backward left running beside it.
    joins: bool = False
    # Whether it must find read what such work reads and what is overwritten from here on.
    joins_reads: bool = False

    def check(self, operation: Kind, card: Card) -> None:
        """Raise PlanRefused where this card cannot run the operation."""

    def derived(self, operation: Kind, tier: str) -> dict[str, BufferType]:
        return {}

    def forward_work(self, operation: Kind, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return {}

    def backward_work(self, operation: Kind, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        return {}

    def zeroed(self, operation: Kind, tier: str, shards: int) -> dict[str, BufferType]:
        """Small buffers that are zeros before the step and before each group of shards."""
        return {}

    def prepare(self, run: Run, operation: Kind) -> None:
        """Compute the derived buffers."""

    def forward(self, run: Run, operation: Kind) -> None:
        raise NotImplementedError

    def backward(self, run: Run, operation: Kind) -> None:
        raise NotImplementedError
