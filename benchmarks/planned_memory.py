"""Planned against measured memory over random configurations. Prints JSON: a line for each, then one for all.

    .venv/bin/python benchmarks/planned_memory.py --count 20 --seed 1
    .venv/bin/python benchmarks/planned_memory.py --device cuda

Each configuration trains in a process of its own that has loaded every kernel it uses on a model of some kilobytes.
What the process takes from there on, at its highest, is compared with the plan's arena:

cpu: the highest resident set (VmHWM) above the resident set before the trainer is made. BLAS (tier debug) has done
large products by then, as it keeps scratch memory of its own, whose size depends on shapes and threads: 20 to 40 MB
with OpenBLAS on two cores.
cuda: the card's free memory before the process starts, less the lowest while it trains. That holds the driver's context
and the kernels too, which no arena can: they are measured by another process that trains the small model
(`fixed`), and arena + fixed is what is planned.

Arenas have at least 50 MB (--least-mb), so that what does not grow with them, such as the interpreter's own objects,
does not rule. From the second step on nothing may be allocated: the resident set and, on the card, its free memory must
stay as they are, but for the interpreter's small objects.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from running import run

from engine.backends.cuda.opening import cuda_plan
from engine.numerics.blas import product
from engine.numerics.types import Words
from engine.plan import Plan, make_plan
from engine.program import build_program
from engine.spec import ModelSpec, TrainSpec
from engine.trainer import Trainer
from reproduce.planning.work import work_of

STEPS = 3
MOST_OPERATIONS = 10**11  # of a step: some seconds on two cores


class SomeBatches:
    """Random tokens, drawn once: a step allocates nothing for them."""

    def __init__(self, vocab: int, shape: tuple[int, int]) -> None:
        self.tokens = np.random.default_rng(0).integers(0, vocab, (2, *shape), np.int32)

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        inputs[...], targets[...] = self.tokens


def drawn(generator: random.Random, device: str) -> dict[str, Any]:
    """One configuration, small enough or too large."""
    pick = generator.choice
    heads = pick([1, 2, 4, 6, 8])
    width = heads * pick([16, 32, 64])
    batch = pick([1, 2, 4, 6, 8, 16, 32])
    layers = generator.randint(1, 12)
    configuration: dict[str, Any] = {
        "model": {
            "vocab": pick([65, 96, 1000, 2305, 8449, 20000]),
            "context": pick([32, 100, 128, 200, 256, 512]),
            "d_model": width,
            "heads": heads,
            "layers": layers,
            "hidden": width * pick([1, 2, 4]),
            "activation": pick(["gelu", "relu"]),
            "dropout": pick([0.0, 0.1]),
            "linear_bias": pick([True, False]),
            "norm_parameters": pick([True, False]),
            "tied": pick([True, False]),
            "init_std": 0.02,
            "attention": pick(["stored", "tiled"]),
        },
        "train": {
            "steps": STEPS,
            "batch": batch,
            "shards": pick([d for d in range(1, batch + 1) if batch % d == 0]),
            "seed": 1,
            "learning_rate": 1e-3,
            "final_learning_rate": 1e-4,
            "warmup_steps": 1,
            "beta1": 0.9,
            "beta2": 0.99,
            "epsilon": 1e-8,
            "weight_decay": 0.1,
            "decayed": ["matrix"],
            "clip_norm": 1.0,
        },
        "tier": pick(["portable", "debug", "prod"] if device == "cuda" else ["portable", "debug"]),
        "threads": pick([1, 2]) if device == "cpu" else 1,
        "recompute": pick([0, generator.randint(0, layers)]),
        "device": device,
    }
    if configuration["tier"] == "prod":
        configuration["train"]["precision"] = pick(["bf16", "fp16", "fp8"])
    return configuration


def planned(configuration: dict[str, Any]) -> tuple[Plan, int]:
    """The plan, and the operations of a step."""
    model, train = ModelSpec(**configuration["model"]), TrainSpec(**configuration["train"])
    program = build_program(model, configuration["recompute"])
    operations = work_of(program, train).operations
    if configuration["device"] == "cuda":
        return cuda_plan(program, train, configuration["tier"])[1], operations
    return make_plan(program, train, configuration["tier"], configuration["threads"]), operations


def suitable(generator: random.Random, device: str, least: int, most: int) -> dict[str, Any]:
    """The first drawn configuration whose arena and work lie within bounds."""
    while True:
        configuration = drawn(generator, device)
        plan, operations = planned(configuration)
        if least <= plan.arena_bytes <= most and operations <= MOST_OPERATIONS:
            return configuration


def smallest(configuration: dict[str, Any]) -> dict[str, Any]:
    """A model of some kilobytes that runs the same kernels."""
    model, train = configuration["model"], configuration["train"]
    head_width = model["d_model"] // model["heads"]
    small = {"vocab": 16, "context": 16, "d_model": head_width, "heads": 1, "hidden": head_width, "layers": 1}
    return {
        **configuration,
        "model": {**model, **small},
        "train": {**train, "batch": min(2, train["shards"]), "shards": min(2, train["shards"])},
        "recompute": min(1, configuration["recompute"]),
    }


# --- in the process of one configuration ---


def trained(configuration: dict[str, Any], after_step: Any) -> int:
    """Train; `after_step` is called after each. Returns the bytes of the arena."""
    model, train = ModelSpec(**configuration["model"]), TrainSpec(**configuration["train"])
    batches = SomeBatches(model.vocab, (train.batch, model.context))
    trainer = Trainer(
        model,
        train,
        configuration["tier"],
        batches,
        threads=configuration["threads"],
        device=configuration["device"],
        recompute=configuration["recompute"],
    )
    trainer.initialise()
    trainer.saved_state()
    for _ in range(STEPS):
        trainer.train_step()
        after_step()
    trainer.saved_state()
    arena = trainer.plan.arena_bytes
    trainer.close()
    return arena


def measured_on_cpu(configuration: dict[str, Any]) -> dict[str, Any]:
    trained(smallest(configuration), lambda: None)
    fill_blas()
    gc.collect()
    process = psutil.Process()
    forget_highest()
    before = process.memory_info().rss
    resident: list[int] = []
    arena = trained(configuration, lambda: resident.append(process.memory_info().rss))
    return {
        "planned": arena,
        "measured": highest() - before,
        "grown_after_first_step": resident[-1] - resident[0],
    }


def fill_blas() -> None:
    """The three products of a large head, after which BLAS has all the scratch memory that it keeps."""
    tokens, width, vocab = 2048, 512, 20000
    x, weight, y = (np.ones(shape, np.float32) for shape in ((tokens, width), (vocab, width), (tokens, vocab)))
    product(x, weight.T, y)
    product(y, weight, x)
    product(y.T, x, weight)


def forget_highest() -> None:
    """Start the kernel's record of the highest resident set anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def highest() -> int:
    """The highest resident set since then, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measured_on_card(configuration: dict[str, Any], free_before: int) -> dict[str, Any]:
    from engine.backends.cuda.card import Card

    card = Card()
    free: list[int] = []
    arena = trained(configuration, lambda: free.append(card.free_memory()))
    return {"arena": arena, "used": free_before - min(free), "grown_after_first_step": free[0] - free[-1]}


# --- in the process that starts them ---


def in_its_own_process(configuration: dict[str, Any], *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", json.dumps(configuration), *more]
    path = filter(None, (str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measured(configuration: dict[str, Any], card: Any) -> dict[str, Any]:
    """planned, measured (bytes), what a step allocates, and on a card what is fixed."""
    if card is None:
        return in_its_own_process(configuration)
    small = in_its_own_process(smallest(configuration), "--free", str(card.free_memory()))
    large = in_its_own_process(configuration, "--free", str(card.free_memory()))
    fixed = small["used"] - small["arena"]
    return {
        "planned": large["arena"] + fixed,
        "arena": large["arena"],
        "fixed": fixed,
        "measured": large["used"],
        "grown_after_first_step": large["grown_after_first_step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least-mb", type=int, default=50, help="smallest arena")
    parser.add_argument("--most-mb", type=int, default=1500, help="largest arena")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--free", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        configuration = json.loads(arguments.one)
        on_card = arguments.free is not None
        result = measured_on_card(configuration, arguments.free) if on_card else measured_on_cpu(configuration)
        sys.stdout.write(json.dumps(result))
        return
    card = None
    if arguments.device == "cuda":
        from engine.backends.cuda.card import Card

        card = Card()  # its own context stays as it is, and is not counted
    generator = random.Random(arguments.seed)
    ratios, grown = [], 0
    for _ in range(arguments.count):
        configuration = suitable(generator, arguments.device, arguments.least_mb * 10**6, arguments.most_mb * 10**6)
        found = measured(configuration, card)
        ratios.append(found["measured"] / found["planned"])
        grown = max(grown, found["grown_after_first_step"])
        say({**found, "ratio": round(ratios[-1], 4), "configuration": configuration})
    say(
        {
            "configurations": len(ratios),
            "largest_difference": round(max(abs(ratio - 1) for ratio in ratios), 4),
            "smallest_ratio": round(min(ratios), 4),
            "largest_ratio": round(max(ratios), 4),
            "most_grown_after_first_step": grown,
        }
    )


def say(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(main)
