"""Distances, and the tolerance that a record declares for them. docs/tolerance.md says what such a claim means."""

import math
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reproduce.errors import CorruptOutput

METHOD = "rounding envelope 1"
Bound = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Tolerance(BaseModel):
    """How far a replay of at most `steps` steps from any of a record's bundles may lie from the record.

    changes         changes of arithmetic that it was measured under
    factor          what the largest distances measured were multiplied by
    windows         [step of a bundle, steps] that were replayed
    loss            bound of |loss - recorded loss| in nats after 1, 2, ... steps
    validation_loss bound of the same for the evaluation
    tensors         bound of the relative distance (Euclidean norms) of each tensor at a bundle
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    method: Literal["rounding envelope 1"]
    changes: list[str]
    factor: Bound
    windows: list[list[int]]
    steps: Annotated[int, Field(ge=1)]
    loss: list[Bound]
    validation_loss: Bound
    tensors: dict[str, Bound]

    @classmethod
    def read(cls, value: Any) -> "Tolerance":
        """From a record. CorruptOutput if it is none."""
        try:
            found = cls.model_validate(value)
        except ValidationError as error:
            raise CorruptOutput(f"the record's tolerance cannot be understood: {error}") from error
        if len(found.loss) != found.steps:
            raise CorruptOutput("the record's tolerance has not one bound of the loss for each step")
        return found

    def loss_bound(self, steps: int) -> float | None:
        """After so many steps from a bundle; None if it says nothing of so many."""
        return self.loss[steps - 1] if steps <= self.steps else None

    def tensor_bound(self, name: str) -> float | None:
        return self.tensors.get(name)

    def evaluation_bound(self) -> float:
        return self.validation_loss


def shown(distance: float) -> float | str:
    """As JSON has it."""
    return distance if math.isfinite(distance) else "not finite"


def away(found: float, expected: float) -> float:
    """Distance of two numbers; not a number if one of them is none."""
    return abs(float(found) - float(expected))


def loss_away(found: np.float32, expected: np.float32) -> float:
    """Distance of two fp32 losses in nats, exactly."""
    return away(float(found), float(expected))


def relative_distance(expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> float:
    """|found - expected| / |expected| in Euclidean norms, in float64; 0 if both are 0."""
    with np.errstate(invalid="ignore"):  # a NaN or an infinity makes the distance one
        a, b = expected.astype(np.float64), found.astype(np.float64)
        norm, distance = math.sqrt(float(np.sum(a * a))), math.sqrt(float(np.sum((b - a) ** 2)))
    if distance == 0.0:
        return 0.0
    return distance / norm if norm else math.inf
