"""Training quality: validation loss of our tiers and of PyTorch on the same data order and initial weights.

    python benchmarks/training_quality.py EXPERIMENT --dataset FOLDER --steps N --batch B --learning-rate R
        [--warmup 100] [--seeds 1 2 3] [--systems portable prod-bf16 ...] [--device cuda|cpu]
    python benchmarks/training_quality.py EXPERIMENT --check

Prints one JSON line for each system and seed (losses in nats per token; the training loss is the mean over the last 50
steps), then for each system its means and how far its validation losses are from PyTorch's with the same seeds. A seed
decides initial weights and the order of the data. Nobody uses dropout; the rate warms up and falls to a tenth.
Validation is the mean over the first windows of the held-out text, whole batches of them, at most 200 windows.
A system that fails says so in its line; the rest goes on, and the exit code is 1.

`--check` compares logits on the CPU, fp32 against fp32, from the same weights: exits 1 where they differ by over 1e-4.
"""

import argparse
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from gpu_step import RandomBatches, load
from numpy.typing import NDArray

from data_pipeline import DataError, Tokens, ValidationWindows, open_dataset, order
from engine.errors import EngineError
from engine.initial import fill_initial
from engine.numerics.types import Words
from engine.program import build_program
from engine.schedule import step_values
from engine.spec import ModelSpec, Precision, TrainSpec
from engine.trainer import Trainer

if TYPE_CHECKING:
    import torch
    from peer_torch import Gpt, Step

OURS: dict[str, Precision | None] = {"portable": None, "prod-bf16": "bf16", "prod-fp16": "fp16", "prod-fp8": "fp8"}
PEERS = {"torch-fp32": "fp32", "torch-bf16": "bf16"}
SYSTEMS = (*OURS, *PEERS)
MOST_WINDOWS = 200
LAST_STEPS = 50
FINAL_RATE = 0.1  # of the highest
LARGEST_DIFFERENCE = 1e-4  # of logits, in --check
Batches = NDArray[np.int32]  # [steps, 2, batch, context]: token numbers and targets


class Prepared:
    """Training batches that are in memory, so that making them costs no system time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        inputs[:], targets[:] = self._batches[step]


class FirstWindows:
    """The first windows of the held-out text: whole batches, so that all systems work in one shape."""

    def __init__(self, windows: ValidationWindows, batch: int) -> None:
        self._windows = windows
        count = min(windows.count, MOST_WINDOWS)
        self.count = count - count % batch if count > batch else count

    def fill(self, first: int, inputs: Words, targets: Words) -> None:
        self._windows.fill(first, inputs, targets)


@dataclass(frozen=True)
class Setting:
    """What all systems have in common."""

    model: ModelSpec
    recipes: dict[int, TrainSpec]  # by seed
    batches: dict[int, Batches]
    windows: FirstWindows
    device: Any  # "cpu" or "cuda"


@dataclass(frozen=True)
class Outcome:
    """Losses in nats per token; seconds of the training steps alone."""

    training_loss: float
    validation_loss: float
    seconds: float


def recipe(train: TrainSpec, arguments: argparse.Namespace, seed: int) -> TrainSpec:
    changes = {
        "steps": arguments.steps,
        "batch": arguments.batch,
        "shards": math.gcd(train.shards, arguments.batch),
        "seed": seed,
        "learning_rate": arguments.learning_rate,
        "final_learning_rate": arguments.learning_rate * FINAL_RATE,
        "warmup_steps": arguments.warmup,
    }
    return TrainSpec(**(train.model_dump() | changes))


def all_batches(tokens: Tokens, context: int, recipes: dict[int, TrainSpec]) -> dict[int, Batches]:
    """The batches of every seed."""
    # Few different rounds make all window numbers: kept, they are made ten times faster, and are the same.
    with patch.object(order, "_round", functools.cache(order._round)):
        found = {}
        for seed, train in recipes.items():
            windows = order.TrainingOrder(tokens, context, train.batch, seed)
            found[seed] = np.zeros((train.steps, 2, train.batch, context), np.int32)
            for step, place in enumerate(found[seed]):
                windows.fill(step, place[0], place[1])
        return found


def train_ours(setting: Setting, seed: int, precision: Precision | None) -> Outcome:
    train = setting.recipes[seed].model_copy(update={"precision": precision})
    trainer = Trainer(
        setting.model,
        train,
        "portable" if precision is None else "prod",
        Prepared(setting.batches[seed]),
        threads=len(os.sched_getaffinity(0)),
        device=setting.device,
    )
    try:
        trainer.initialise()
        start = time.perf_counter()
        for _ in range(train.steps):
            trainer.train_step()
        seconds = time.perf_counter() - start
        return Outcome(float(np.mean(trainer.losses[-LAST_STEPS:])), trainer.evaluate(setting.windows), seconds)
    finally:
        trainer.close()


def peer_name(name: str) -> str:
    """PyTorch's name of one of our parameters: block0.norm1.gain is its blocks.0.norm1.weight."""
    if name.startswith("embed."):
        return f"{name.removeprefix('embed.')}.weight"
    name = name.replace(".gain", ".weight")
    return f"blocks.{name.removeprefix('block')}" if name.startswith("block") else name


def initial_weights(model: ModelSpec, seed: int) -> dict[str, "torch.Tensor"]:
    """What Trainer.initialise starts from, by PyTorch's names. Linear weights are [out, in] in both."""
    import torch

    weights = {}
    for number, parameter in enumerate(build_program(model).parameters):
        array = np.zeros(parameter.shape, np.float32)
        fill_initial(parameter, number, seed, array)
        weights[peer_name(parameter.name)] = torch.from_numpy(array)
    return weights


def decay_groups(model: ModelSpec, train: TrainSpec, peer: "Gpt") -> list[dict[str, Any]]:
    """The peer's parameters as AdamW takes them: those of the decayed kinds, and the others."""
    by_name = dict(peer.named_parameters())
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in build_program(model).parameters:
        groups[parameter.kind in train.decayed].append(by_name.pop(peer_name(parameter.name)))
    if by_name:
        raise AssertionError(f"parameters that are not ours: {sorted(by_name)}")
    decays = {True: train.weight_decay, False: 0.0}
    return [{"params": found, "weight_decay": decays[kind]} for kind, found in groups.items() if found]


class Peer:
    """PyTorch in one precision. The step is recorded once and serves every seed."""

    def __init__(self, setting: Setting, precision: str) -> None:
        from peer_torch import Gpt, be_strict

        be_strict()
        self.setting, self.precision = setting, precision
        self.model = Gpt(setting.model.model_dump()).to(setting.device)
        self.how = "graph" if setting.device == "cuda" else "eager"
        try:
            self.step = self._make_step()
        except RuntimeError as error:
            if self.how == "eager":
                raise
            print(f"the step could not be recorded as a CUDA graph, it runs launch by launch: {error}", file=sys.stderr)
            self.how = "eager"
            self.step = self._make_step()

    def _make_step(self) -> "Step":
        from peer_torch import Step

        train = next(iter(self.setting.recipes.values()))
        return Step(
            self.model,
            decay_groups(self.setting.model, train, self.model),
            (train.batch, self.setting.model.context),
            precision=self.precision,
            how=self.how,
            betas=(train.beta1, train.beta2),
            epsilon=train.epsilon,
            clip_norm=train.clip_norm,
        )

    def train(self, seed: int) -> Outcome:
        import torch

        step, train, device = self.step, self.setting.recipes[seed], self.setting.device
        step.restart(initial_weights(self.setting.model, seed))
        batches = torch.from_numpy(self.setting.batches[seed]).to(device)
        rates = torch.tensor([step_values(train, n).learning_rate for n in range(train.steps)], device=device)
        losses = torch.zeros(train.steps, device=device)
        step.synchronise()
        start = time.perf_counter()
        for number in range(train.steps):
            step.ids.copy_(batches[number, 0])
            step.targets.copy_(batches[number, 1])
            step.set_rate(rates[number])
            step()
            losses[number].copy_(step.loss)
        step.synchronise()
        seconds = time.perf_counter() - start
        training_loss = float(losses[-LAST_STEPS:].double().mean())
        if not math.isfinite(training_loss):
            raise RuntimeError("the training loss is not finite")
        return Outcome(training_loss, self.evaluate(train.batch), seconds)

    def evaluate(self, batch: int) -> float:
        import torch
        from peer_torch import autocast

        windows, context = self.setting.windows, self.setting.model.context
        total = 0.0
        for first in range(0, windows.count, batch):
            arrays = np.zeros((2, min(batch, windows.count - first), context), np.int32)
            windows.fill(first, arrays[0], arrays[1])
            ids, targets = torch.from_numpy(arrays).to(self.setting.device, torch.int64)
            with torch.no_grad(), autocast(self.setting.device, self.precision):
                total += float(self.model(ids, targets)) * arrays[0].size
        return total / (windows.count * context)


def run_system(name: str, setting: Setting) -> Callable[[int], tuple[Outcome, dict[str, str]]]:
    """What trains a system with a seed; the dictionary says more about how."""
    if name in OURS:
        return lambda seed: (train_ours(setting, seed, OURS[name]), {})
    peer = Peer(setting, PEERS[name])
    return lambda seed: (peer.train(seed), {"how": peer.how})


def compare(name: str, found: dict[str, dict[int, Outcome]]) -> dict[str, Any]:
    """Means over seeds, and distances of validation losses from PyTorch's: largest, and the mean with its sign."""
    ours = found[name]
    result: dict[str, Any] = {
        "system": name,
        "seeds": len(ours),
        "mean_validation_loss": round(float(np.mean([o.validation_loss for o in ours.values()])), 6),
        "mean_seconds": round(float(np.mean([o.seconds for o in ours.values()])), 3),
    }
    references = [reference for reference in PEERS if reference != name]
    for reference in references:
        common = sorted(ours.keys() & found.get(reference, {}).keys())
        if common:
            gaps = [ours[seed].validation_loss - found[reference][seed].validation_loss for seed in common]
            result[f"largest_to_{reference}"] = round(max(map(abs, gaps)), 6)
            result[f"mean_to_{reference}"] = round(float(np.mean(gaps)), 6)
    return result


def measure(arguments: argparse.Namespace) -> int:
    model, train = load(arguments.experiment)
    model = model.model_copy(update={"dropout": 0.0})
    recipes = {seed: recipe(train, arguments, seed) for seed in arguments.seeds}
    dataset = open_dataset(arguments.dataset)
    if dataset.tokenizer.size > model.vocab:
        raise DataError(f"the dataset has {dataset.tokenizer.size} kinds of token, the model knows {model.vocab}")
    windows = FirstWindows(ValidationWindows(dataset.validation, model.context), arguments.batch)
    batches = all_batches(dataset.train, model.context, recipes)
    setting = Setting(model, recipes, batches, windows, arguments.device)
    if arguments.device == "cuda" and any(name in PEERS for name in arguments.systems):
        import torch

        torch.cuda.init()  # before ours, so that both use one context
    found: dict[str, dict[int, Outcome]] = {name: {} for name in arguments.systems}
    failed = False
    for name in arguments.systems:
        common = {"experiment": arguments.experiment, "system": name, "device": arguments.device}
        try:
            train_with = run_system(name, setting)
            for seed in arguments.seeds:
                outcome, more = train_with(seed)
                found[name][seed] = outcome
                line = {
                    "seed": seed,
                    "steps": arguments.steps,
                    "batch": arguments.batch,
                    "learning_rate": arguments.learning_rate,
                    "windows": windows.count,
                    "training_loss": round(outcome.training_loss, 6),
                    "validation_loss": round(outcome.validation_loss, 6),
                    "seconds": round(outcome.seconds, 3),
                }
                print(json.dumps(common | line | more), flush=True)
        except (EngineError, RuntimeError, ImportError, OSError) as error:
            failed = True
            print(json.dumps(common | {"error": f"{type(error).__name__}: {error}"}), flush=True)
    for name in arguments.systems:
        if found[name]:
            print(json.dumps({"experiment": arguments.experiment} | compare(name, found)), flush=True)
    return int(failed)


def check(experiment: str) -> int:
    """Logits of both from the same weights, in fp32 on the CPU."""
    import torch
    from peer_torch import Gpt, be_strict

    be_strict()
    model, train = load(experiment)
    model = model.model_copy(update={"dropout": 0.0})
    train = train.model_copy(update={"batch": 1, "shards": 1})
    trainer = Trainer(model, train, "debug", RandomBatches(model.vocab), threads=1)
    trainer.initialise()
    peer = Gpt(model.model_dump())
    for name, weights in initial_weights(model, train.seed).items():
        # Biases and gains that start as zeros and ones would hide a mistaken place.
        weights += 0.02 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(len(name)))
        peer.get_parameter(name).data.copy_(weights)
    flat = trainer.backend.state_to_write()
    for name, view in trainer.backend.views(flat["weights"]).items():
        view[...] = peer.get_parameter(peer_name(name)).detach().numpy()
    trainer.backend.state_written()
    ids = np.random.default_rng(0).integers(0, model.vocab, (1, model.context), np.int32)
    ours = trainer.backend.logits(ids)
    with torch.no_grad():
        theirs = peer.logits(torch.from_numpy(ids).long()).numpy()
    trainer.close()
    difference = float(np.abs(ours - theirs).max())
    size = round(float(np.abs(ours).max()), 3)
    print(json.dumps({"experiment": experiment, "largest_logit": size, "largest_difference": difference}))
    return int(difference > LARGEST_DIFFERENCE)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--dataset", type=Path, help="a folder that the stage `prepare` made")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--warmup", type=int, default=100, help="steps; 100 if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--check", action="store_true", help="only compare logits, on the CPU")
    arguments = parser.parse_args(words)
    if not arguments.check:
        for name in ("dataset", "steps", "batch", "learning_rate"):
            if getattr(arguments, name) is None:
                parser.error(f"expected --{name.replace('_', '-')}")
        if arguments.device == "cpu" and any(OURS.get(name) for name in arguments.systems):
            parser.error("on a CPU the tier prod has no arithmetic of its own: leave prod-* out of --systems")
    return arguments


def main() -> int:
    arguments = parse()
    try:
        return check(arguments.experiment) if arguments.check else measure(arguments)
    except (EngineError, DataError, ValueError, FileNotFoundError) as error:
        print(f"training_quality: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)


if __name__ == "__main__":
    sys.exit(main())
