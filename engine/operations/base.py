"""What every operation is: named inputs, outputs and parameters, a shape rule, and a forward with its backward twin."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal, Protocol

import numpy as np

from engine.numerics.types import Array, Doubles, Floats, Longs
from engine.threads import ThreadTeam

Dimension = int | Literal["B", "T"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The run-time sizes a program is bound to: rows of one shard, tokens in a row, threads."""

    batch: int
    context: int
    threads: int

    def of(self, dimension: Dimension) -> int:
        if isinstance(dimension, int):
            return dimension
        return self.batch if dimension == "B" else self.context


@dataclass(frozen=True)
class TensorType:
    """Shape (numbers, and the symbols B and T) and dtype of a tensor."""

    shape: tuple[Dimension, ...]
    dtype: str = "float32"

    def at(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes.of(d) for d in self.shape)

    def __str__(self) -> str:
        return f"[{', '.join(str(d) for d in self.shape)}] {self.dtype}"


@dataclass(frozen=True)
class BufferType:
    """Shape and dtype of a buffer at known sizes."""

    shape: tuple[int, ...]
    dtype: str  # a name that NumPy knows, or bfloat16

    @property
    def bytes(self) -> int:
        # Python integers: NumPy's would wrap around for a model that is far too large.
        return prod(self.shape) * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)


class Execution(Protocol):
    """What an operation sees while it runs: arrays by name, and the step it runs in."""

    team: ThreadTeam
    sizes: Sizes
    tier: str
    training: bool  # whether dropout acts
    step: int  # 0-based optimizer step, an address of random numbers
    first_row: int  # row of the whole batch at which this shard starts
    seed: int
    loss_scale: np.float32  # 1 / tokens in the whole batch
    flags: Longs  # [operations]: set where a non-finite number was met

    def tensor(self, name: str) -> Array: ...
    def gradient(self, name: str) -> Array: ...
    def parameter(self, name: str) -> Floats: ...
    def parameter_gradient(self, name: str) -> Floats: ...
    def derived(self, operation: str, role: str) -> Array: ...
    def work(self, operation: str, role: str) -> Array: ...
    def accumulates(self, operation: str, role: str) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Operation(ABC):
    """One step of a program. `inputs`, `outputs` and `parameters` map roles to tensor or parameter names."""

    name: str
    index: int  # place in the program, and slot of its non-finite flag
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    parameters: Mapping[str, str] = field(default_factory=dict)

    kind: ClassVar[str]
    # Roles that backward reads again.
    kept: ClassVar[frozenset[str]] = frozenset()
    # Roles without a gradient: token numbers, statistics.
    constant: ClassVar[frozenset[str]] = frozenset()
    # Output role -> input role whose storage the forward pass may take over.
    forward_in_place: ClassVar[Mapping[str, str]] = {}
    # Input role -> output role: the gradient of the input may take over the storage of the output's.
    backward_in_place: ClassVar[Mapping[str, str]] = {}
    # Input role whose gradient may overwrite the input itself, because backward reads it for the last time.
    gradient_over_input: ClassVar[str | None] = None

    @property
    def same_gradient(self) -> Mapping[str, str]:
        """Input role -> an earlier input role whose gradient is the same numbers, so that one storage serves both."""
        return {}

    @abstractmethod
    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        """Types of the outputs by role, from the types of the inputs by role; SpecError where they do not fit."""

    def forward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        """Scratch buffers the forward pass needs."""
        return {}

    def backward_work(self, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        """Scratch buffers the backward pass needs."""
        return {}

    def derived(self, tier: str) -> dict[str, BufferType]:
        """Buffers computed from the parameters once per step, such as quantised weights."""
        return {}

    def prepare(self, run: Execution) -> None:
        """Compute the derived buffers."""

    @abstractmethod
    def forward(self, run: Execution) -> None:
        """Write the outputs."""

    @abstractmethod
    def backward(self, run: Execution) -> None:
        """Write (or add to, where run.accumulates says so) gradients of inputs; add to gradients of parameters."""


__all__ = ["Array", "BufferType", "Doubles", "Execution", "Floats", "Operation", "Sizes", "TensorType"]
