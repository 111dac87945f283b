"""What a run keeps beside its bundles: its configuration, where it came from, what was seen on the way.

Observations (losses on held-out text, samples) are functions of the state at their step, so they can be written before
the bundle of that step, and an interrupted run ends with the same ones as an uninterrupted.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from artifacts import Run
from artifacts.canonical import JSON
from reproduce.errors import CorruptOutput


class Session(BaseModel):
    """One process that worked on a run: from when to when, and from which step to which. `ended` is None while it
    works, and stays None if it was killed."""

    model_config = ConfigDict(strict=True, extra="forbid")

    started: str
    ended: str | None
    first_step: int
    last_step: int


class Fork(BaseModel):
    """Where a forked run begins: at the state of another run's bundle after `step` steps. `changes`: of configuration,
    for people."""

    model_config = ConfigDict(strict=True, extra="forbid")

    bundle: str
    step: int
    changes: list[str]


class Lineage(BaseModel):
    """The JSON that artifacts keeps as a run's lineage. `fork` is None for a run from initial weights."""

    model_config = ConfigDict(strict=True, extra="forbid")

    configuration: dict[str, Any]
    dataset: str
    tokenizer: str
    sources: dict[str, str]
    sessions: list[Session] = Field(default_factory=list)
    validation: dict[str, float] = Field(default_factory=dict)
    samples: dict[str, str] = Field(default_factory=dict)
    fork: Fork | None = None

    @property
    def first_step(self) -> int:
        """Steps that were done before the run began."""
        return 0 if self.fork is None else self.fork.step

    @classmethod
    def read(cls, value: JSON, run_id: str) -> "Lineage | None":
        """The lineage of a run; None if the run has just been made."""
        if value is None:
            return None
        try:
            return cls.model_validate(value)
        except ValueError as error:
            raise CorruptOutput(
                f"lineage of run {run_id} cannot be understood: {error}. `reproduce fsck` lists what else is damaged"
            ) from error

    def write(self, run: Run) -> None:
        run.set_lineage(self.model_dump(mode="json"))

    def validation_by_step(self) -> Mapping[int, float]:
        return dict(sorted((int(step), loss) for step, loss in self.validation.items()))

    def samples_by_step(self) -> Mapping[int, str]:
        return dict(sorted((int(step), text) for step, text in self.samples.items()))
