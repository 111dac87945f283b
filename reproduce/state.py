"""What a bundle says beside its tensors, and what a run is named by. Both decide hashes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts import hash_bytes
from artifacts.canonical import JSON, dumps
from engine.backends.base import SCALE, STREAK
from reproduce.errors import Changed, CorruptOutput

RUN_FORMAT = "samebits run 1"


def hash_of(value: Any) -> str:
    """BLAKE3 of the canonical JSON of `value`."""
    return hash_bytes(dumps(value))


@dataclass(frozen=True)
class Identity:
    """Everything that decides the bits of a run, but for the sources.

    configuration: `Configuration.identity()`. dataset, tokenizer: their hashes.
    """

    configuration: Mapping[str, Any]
    dataset: str
    tokenizer: str

    @property
    def specification(self) -> str:
        """Hash of the model's specification."""
        return hash_of(self.configuration["model"])

    @property
    def configuration_hash(self) -> str:
        return hash_of(self.configuration)

    def run_id(self, sources_digest: str, fork: str | None = None) -> str:
        """The name of the run that these sources make of it; `fork` is the bundle that it begins at, if it is one."""
        named = {
            "format": RUN_FORMAT,
            "configuration": self.configuration_hash,
            "dataset": self.dataset,
            "sources": sources_digest,
            "tokenizer": self.tokenizer,
        }
        return hash_of(named if fork is None else {**named, "fork": fork})

    def state(self, step: int) -> dict[str, JSON]:
        """The state of a bundle after `step` steps: where data and random numbers go on, and what it belongs to.

        Both are functions of seed and step. Only fp16 scales the loss; the scale is in the bundle's tensors.
        """
        train = self.configuration["train"]
        scaled = train.get("precision") == "fp16"
        return {
            "configuration": self.configuration_hash,
            "dataset": self.dataset,
            "loss_scaler": [SCALE, STREAK] if scaled else None,
            "random": {"seed": train["seed"], "step": step},
            "sampler": {"position": step * train["batch"], "seed": train["seed"]},
            "specification": self.specification,
            "step": step,
            "tier": self.configuration["tier"],
            "tokenizer": self.tokenizer,
        }

    def check(self, state: Mapping[str, JSON], what: str) -> int:
        """The step of a bundle with this state. Raises Changed if it belongs to something else, CorruptOutput if it
        contradicts itself."""
        step = state.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CorruptOutput(f"{what}: expected a step of 0 or more in its state, found {step!r}")
        expected = self.state(step)
        other = sorted(name for name in {*expected, *state} if expected.get(name, ...) != state.get(name, ...))
        belongs = ("configuration", "dataset", "specification", "tier", "tokenizer")
        if changed := [name for name in other if name in belongs]:
            raise Changed(
                f"{what} belongs to another run: it has another {', '.join(changed)} than what is here now. Take a "
                "bundle of the present run (`reproduce log`), or bring back what it was made with (`reproduce show`)"
            )
        if other:
            raise CorruptOutput(f"{what}: its state contradicts itself or is not complete: {', '.join(other)}")
        return step
