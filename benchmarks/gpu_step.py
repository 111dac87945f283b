"""Training speed and memory on a CUDA card. Prints one JSON line for each experiment.

    python benchmarks/gpu_step.py [--steps N] [--seconds S] [--batch B] [--shards S] [--dropout P] [--precision bf16]
        [--profile] EXPERIMENT...

The tier is `portable`, or `prod` where a precision is given.

A step is timed from token numbers on the host to the outcome on the host; given is the median of at least N, and of as
many as take S seconds. `--profile` times every kernel launch of one step on its own (events around each launch, so gaps
are not counted) and lists the sums by kernel.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from running import run
from timing import durations

from engine.backends.cuda.backend import CudaBackend
from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.flash import Flash
from engine.backends.cuda.mixed.products import Products
from engine.numerics.types import Words
from engine.schedule import step_values
from engine.spec import ModelSpec, Tier, TrainSpec
from engine.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, help="instead of the experiment's")
    parser.add_argument("--shards", type=int, help="instead of the experiment's")
    parser.add_argument("--dropout", type=float, help="instead of the experiment's")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp8"), help="of the tier prod; without it, portable")


def make_trainer(name: str, arguments: argparse.Namespace) -> Trainer:
    """A trainer of an experiment on random tokens, changed as the options say."""
    model, train = load(name)
    for option in ("batch", "shards"):
        if getattr(arguments, option):
            train = train.model_copy(update={option: getattr(arguments, option)})
    if arguments.dropout is not None:
        model = model.model_copy(update={"dropout": arguments.dropout})
    tier: Tier = "prod" if arguments.precision else "portable"
    train = train.model_copy(update={"precision": arguments.precision})
    return Trainer(model, train, tier, RandomBatches(model.vocab), threads=1, device="cuda")


def started(name: str, arguments: argparse.Namespace) -> tuple[Trainer, CudaBackend, Callable[[], None]]:
    """A trainer that has done three steps, its backend, and one step more, of the same batch every time."""
    trainer = make_trainer(name, arguments)
    trainer.initialise()
    backend = trainer.backend
    assert isinstance(backend, CudaBackend)
    batches = np.zeros((2, trainer.train.batch, trainer.model.context), np.int32)
    trainer.batches.fill(0, *batches)
    values = step_values(trainer.train, 3)

    def step() -> None:
        backend.train_step(0, batches[0], batches[1], values)

    for _ in range(3):
        step()
    return trainer, backend, step


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    card = Card()
    before = card.free_memory()
    trainer, backend, step = started(name, arguments)
    model, train = trainer.model, trainer.train
    used = before - card.free_memory()
    times = durations(step, arguments.steps, arguments.seconds)
    seconds = statistics.median(times)
    parameters = sum(int(np.prod(p.shape)) for p in trainer.program.parameters)
    tokens = train.batch * model.context
    operations = tokens * (6 * parameters + 12 * model.layers * model.d_model * model.context)
    result: dict[str, Any] = {
        "experiment": name,
        "tier": trainer.plan.tier,
        "precision": arguments.precision,
        "dropout": model.dropout,
        "batch": train.batch,
        "shards": train.shards,
        "shards_at_once": backend.layout.shards_at_once(train.shards),
        "parameters": parameters,
        "timed_steps": len(times),
        "step_ms": round(seconds * 1e3, 3),
        "fastest_ms": round(min(times) * 1e3, 3),
        "tokens_s": int(tokens / seconds),
        "tflops": round(operations / seconds / 1e12, 2),
        "planned_gib": round(trainer.plan.arena_bytes / 2**30, 4),
        "used_gib": round(used / 2**30, 4),
    }
    if arguments.profile:
        result["kernels_ms"] = kernel_times(backend)
    trainer.close()
    return result


def queue_step(backend: CudaBackend, each: Callable[[str, Callable[[], None]], None]) -> None:
    """Queue a step with `each` (name, call) in the place of every launch. A call queues it on the stream that is
    current then."""
    launch, fill = Launcher.__call__, Launcher.fill
    library = (Products.multiply, Flash.forward, Flash.backward)
    here = backend.launcher
    Launcher.__call__ = lambda self, unit, name, *a, **k: each(  # type: ignore[method-assign]
        name, lambda: launch(self, unit, name, *a, **k)
    )
    Launcher.fill = lambda self, *a: each("fill", lambda: fill(self, *a))  # type: ignore[method-assign]
    Products.multiply = lambda self, stream, sizes, *a, **k: each(  # type: ignore[method-assign]
        f"product {sizes}", lambda: library[0](self, here.current, sizes, *a, **k)
    )
    Flash.forward = lambda *a: each("attention forward", lambda: library[1](*a))  # type: ignore[method-assign]
    Flash.backward = lambda *a: each("attention backward", lambda: library[2](*a))  # type: ignore[method-assign]
    try:
        backend._queue_step()
    finally:
        Launcher.__call__, Launcher.fill = launch, fill  # type: ignore[method-assign]
        Products.multiply, Flash.forward, Flash.backward = library  # type: ignore[method-assign]
    here.synchronise()


def kernel_times(backend: CudaBackend) -> dict[str, list[float]]:
    """Milliseconds and launches of each kernel over one step."""
    events: list[tuple[str, Any, Any]] = []
    driver = backend.card.driver

    def timed(name: str, call: Callable[[], None]) -> None:
        first, last = driver.Event(), driver.Event()
        first.record(backend.launcher._current)
        call()
        last.record(backend.launcher._current)
        events.append((name, first, last))

    queue_step(backend, timed)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, first, last in events:
        sums[name][0] += last.time_since(first)
        sums[name][1] += 1
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return {name: [round(ms, 3), count] for name, (ms, count) in ordered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--steps", type=int, default=20, help="timed steps at least; 20 if not given")
    parser.add_argument("--seconds", type=float, default=2, help="timed seconds at least; 2 if not given")
    add_options(parser)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.experiments:
        print(json.dumps(measure(name, arguments)), flush=True)


if __name__ == "__main__":
    run(main)
