"""How fast this machine trains what: measured here, kept in the project's private folder, never copied into results."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from engine.numerics.types import Words
from reproduce import outputs
from reproduce.configuration import Configuration
from reproduce.environment import hardware_class
from reproduce.state import hash_of
from reproduce.workbench import new_trainer

_FILE = "rates.json"
_STEPS = 3


@dataclass(frozen=True)
class Rate:
    """Tokens per second over `steps` optimizer steps."""

    tokens_per_second: float
    steps: int


def read_rate(private: Path, configuration: Configuration) -> Rate | None:
    """The rate that was measured for this configuration on this machine; None if none was."""
    try:
        known = json.loads((private / _FILE).read_bytes())
        entry = known.get(_key(configuration))
        return None if entry is None else Rate(float(entry["tokens_per_second"]), int(entry["steps"]))
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        # A note to oneself: what cannot be read was not measured.
        return None


def measure(private: Path, configuration: Configuration) -> Rate:
    """Train a few steps on random tokens, and remember the rate. Raises PlanRefused."""
    model = configuration.model
    train = configuration.train.model_copy(update={"steps": max(configuration.train.steps, _STEPS + 1)})
    trainer = new_trainer(configuration, train, _Anything(model.vocab))
    try:
        trainer.initialise()
        trainer.train_step()  # compiles
        start = time.perf_counter()
        for _ in range(_STEPS):
            trainer.train_step()
        seconds = time.perf_counter() - start
    finally:
        trainer.close()
    rate = Rate(_STEPS * train.batch * model.context / seconds, _STEPS)
    _remember(private, configuration, rate)
    return rate


def _remember(private: Path, configuration: Configuration, rate: Rate) -> None:
    try:
        known = json.loads((private / _FILE).read_bytes())
    except (OSError, ValueError):
        known = {}
    outputs.write_json(private / _FILE, {**known, _key(configuration): asdict(rate)})


def _key(configuration: Configuration) -> str:
    """What the rate depends on: the work of a step, and the machine."""
    train = configuration.train
    return hash_of(
        {
            "attention": configuration.model.attention,
            "batch": train.batch,
            "device": configuration.run.device,
            "machine": hardware_class(),
            "model": configuration.model.identity(),
            "recompute": configuration.recomputed_blocks,
            "shards": train.shards,
            "threads": configuration.run.thread_count(),
            "tier": configuration.tier,
        }
    )


class _Anything:
    """Batches of tokens that are a function of the step."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        for array, start in ((inputs, step), (targets, step + 1)):
            array[...] = (np.arange(array.size, dtype=np.int64).reshape(array.shape) * 7919 + start) % self.vocab
