"""Training speed on the CPU, beside PyTorch fp32 on the same cores. Prints JSON.

    .venv/bin/python benchmarks/cpu_step.py                                     ours alone
    .venv/bin/python benchmarks/cpu_step.py --peer PYTHON                       PYTHON: an interpreter with PyTorch

Both do whole steps of each experiment (random tokens for the peer, which makes no difference to its speed), in turn,
several rounds; the ratio is taken round by round and its median is what counts. Also measures the memory that a run
takes (resident set, above the level before the arena is allocated) against the plan.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from ruamel.yaml import YAML
from timing import durations

from engine.numerics.types import Words
from engine.spec import ModelSpec, TrainSpec
from engine.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
PEER = Path(__file__).with_name("peer_torch.py")


class RandomBatches:
    """Uniformly random tokens."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        generator = np.random.default_rng(step)
        inputs[:] = generator.integers(0, self.vocab, inputs.shape)
        targets[:] = generator.integers(0, self.vocab, targets.shape)


def load(experiment: str) -> tuple[ModelSpec, TrainSpec]:
    sections = YAML(typ="safe", pure=True).load(ROOT / "experiments" / f"{experiment}.yaml")
    return ModelSpec(**sections["model"]), TrainSpec(**sections["train"])


def warm_up() -> None:
    """Load or compile every kernel, so that the code's own memory is not counted as the run's."""
    model, train = load("tiny")
    model = model.model_copy(update={"context": 8, "d_model": 16, "heads": 2, "layers": 1, "hidden": 16})
    for dropout in (0.0, 0.5):
        trainer = Trainer(
            model.model_copy(update={"dropout": dropout}),
            train.model_copy(update={"batch": 2, "shards": 2}),
            "portable",
            RandomBatches(model.vocab),
            threads=1,
        )
        trainer.initialise()
        trainer.train_step()
        trainer.close()


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def measure_peer(python: str, model: ModelSpec, train: TrainSpec, threads: int, steps: int) -> dict[str, Any]:
    sizes = model.model_dump() | {"batch": train.batch, "threads": threads, "steps": steps}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    output = subprocess.run(
        [python, str(PEER), json.dumps(sizes)], check=True, capture_output=True, env=environment
    ).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def measure(experiment: str, peer: str | None, threads: int, steps: int, rounds: int) -> dict[str, Any]:
    model, train = load(experiment)
    train = train.model_copy(update={"steps": steps * rounds + 1, "warmup_steps": 1})
    before = resident()
    trainer = Trainer(model, train, "portable", RandomBatches(model.vocab), threads=threads)
    trainer.initialise()
    trainer.train_step()
    tokens = train.batch * model.context
    ours: list[float] = []
    theirs: list[float] = []
    version = None
    for _ in range(rounds):
        ours.append(statistics.median(durations(trainer.train_step, steps, 0)))
        if peer:
            result = measure_peer(peer, model, train, threads, steps)
            theirs.append(result["seconds"])
            version = result["version"]
    trainer.saved_state()
    used = resident() - before
    planned = trainer.plan.arena_bytes
    trainer.close()
    report: dict[str, Any] = {
        "experiment": experiment,
        "threads": threads,
        "tokens_per_second": round(tokens / statistics.median(ours)),
        "step_ms": round(statistics.median(ours) * 1e3, 1),
        "memory_mib": {
            "planned": round(planned / 2**20, 1),
            "measured": round(used / 2**20, 1),
            "ratio": round(used / planned, 3),
        },
    }
    if peer:
        report["pytorch"] = {
            "version": version,
            "tokens_per_second": round(tokens / statistics.median(theirs)),
            "ours_over_theirs": round(statistics.median(t / o for t, o in zip(theirs, ours, strict=True)), 3),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiments", nargs="+", default=["tiny", "char-4.8m"])
    parser.add_argument("--peer", help="an interpreter that has PyTorch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=4, help="steps per round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warm_up()
    for experiment in arguments.experiments:
        report = measure(experiment, arguments.peer, arguments.threads, arguments.steps, arguments.rounds)
        json.dump(report, sys.stdout)
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
