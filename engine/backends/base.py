"""What the trainer asks of a backend."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.digest import Sums
from engine.numerics.types import Array, Floats, Longs, Words
from engine.program import Program
from engine.schedule import StepValues
from engine.spec import Precision

# State beside weights and moments, of the tier prod: algorithms of the libraries, and in fp16 the loss scale.
CHOICES, SCALE, STREAK = "libraries/choices", "scaler/scale", "scaler/streak"


def extra_names(precision: Precision | None) -> frozenset[str]:
    """Names of the state that a precision has beside weights and moments."""
    if precision is None:
        return frozenset()
    return frozenset({CHOICES, SCALE, STREAK}) if precision == "fp16" else frozenset({CHOICES})


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did. Where anything was not finite, weights and moments are as they were before."""

    loss_total: int  # over all tokens, in units of 2**-30 nats
    norm: float  # of the gradient, before clipping
    flagged: int | None  # first operation that met a number that is not finite, see first_flagged
    bad_gradients: list[str]  # parameters with a gradient that is not finite, where the norm is not
    bad_updates: list[str]  # parameters that the optimizer would have made infinite or NaN


def first_flagged(forward: Longs | Words, backward: Longs | Words) -> int | None:
    """The operation to name, from flags by operation: the first in time that met a number that is not finite.

    What comes after the first is computed from garbage, which need not be the same on every device.
    """
    if forward.any():
        return int(np.flatnonzero(forward)[0])
    if backward.any():
        return int(np.flatnonzero(backward)[-1])
    return None


Meanwhile = Callable[[], None]
"""What the caller would do while a card computes, and a backend that waits for one calls."""


def nothing() -> None:
    """The least that can be done meanwhile."""


class Backend(Protocol):
    """Executes a plan. Flat arrays hold all parameters (weights) or their moments (m, v), as the plan places them."""

    program: Program
    sums: Sums  # [parameters, 3, 2]: the step digest's numbers after the last step

    def train_step(
        self, step: int, ids: Words, targets: Words, values: StepValues, meanwhile: Meanwhile = ...
    ) -> StepOutcome: ...
    def losses(self, ids: Words, targets: Words) -> int: ...
    def logits(self, ids: Words) -> npt.NDArray[np.float32]: ...
    def take_flag(self) -> int | None: ...
    def current_state(self) -> dict[str, Floats]: ...
    def state_to_write(self) -> dict[str, Floats]: ...
    def state_written(self) -> None: ...
    def extra_state(self) -> dict[str, Array]: ...
    def load_extra_state(self, state: Mapping[str, Array], *, elsewhere: bool) -> None: ...
    def pin(self, state: Mapping[str, Array]) -> None: ...
    def copy_for_saving(self) -> dict[str, Floats]: ...
    def views(self, flat: Floats) -> dict[str, Floats]: ...
    def close(self) -> None: ...
