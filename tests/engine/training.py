"""Small models, recipes and data for tests of whole training steps."""

from typing import Any

import numpy as np

from engine.numerics.types import Words
from engine.spec import ModelSpec, TrainSpec
from engine.trainer import Trainer

MODEL: dict[str, Any] = {
    "vocab": 13,
    "context": 10,
    "d_model": 12,
    "heads": 3,
    "layers": 2,
    "hidden": 20,
    "activation": "gelu",
    "dropout": 0.1,
    "linear_bias": True,
    "norm_parameters": True,
    "tied": True,
    "init_std": 0.3,
    "attention": "tiled",
}
TRAIN: dict[str, Any] = {
    "steps": 6,
    "batch": 6,
    "shards": 3,
    "seed": 17,
    "learning_rate": 1e-2,
    "final_learning_rate": 1e-3,
    "warmup_steps": 2,
    "beta1": 0.9,
    "beta2": 0.99,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "decayed": ["matrix"],
    "clip_norm": 1.0,
}


def model_spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**(MODEL | changes))


def train_spec(**changes: Any) -> TrainSpec:
    return TrainSpec(**(TRAIN | changes))


class Tokens:
    """Random tokens: batches by step and held-out windows, made beforehand so that filling allocates nothing."""

    def __init__(self, model: ModelSpec, rows: int, steps: int = 8) -> None:
        generator = np.random.default_rng(23)
        shape = (steps, rows, model.context + 1)
        self.tokens = generator.integers(0, model.vocab, shape).astype(np.int32)
        self.count = rows

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        inputs[:] = self.tokens[step, : len(inputs), :-1]
        targets[:] = self.tokens[step, : len(inputs), 1:]


class Windows:
    """Held-out windows: rows of one step of Tokens."""

    def __init__(self, tokens: Tokens, count: int) -> None:
        self.rows = tokens.tokens[-1]
        self.count = count

    def fill(self, first: int, inputs: Words, targets: Words) -> None:
        inputs[:] = self.rows[first : first + len(inputs), :-1]
        targets[:] = self.rows[first : first + len(inputs), 1:]


def make_trainer(
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    *,
    tier: Any = "portable",
    threads: int = 1,
    recompute: int = 0,
) -> Trainer:
    """An initialised trainer; biases and gains get random values too, so that their parts of a gradient show."""
    spec, recipe = model_spec(**(model or {})), train_spec(**(train or {}))
    tokens = Tokens(spec, recipe.batch)
    trainer = Trainer(spec, recipe, tier, tokens, threads=threads, recompute=recompute)
    trainer.initialise()
    generator = np.random.default_rng(29)
    for name, w in trainer.backend.parameters.items():
        if name.endswith((".bias", ".gain")):
            w += generator.normal(size=w.shape).astype(np.float32) * np.float32(0.2)
    trainer.backend.weights_changed()
    return trainer


def digests(trainer: Trainer, steps: int) -> list[bytes]:
    return [trainer.train_step().digest for _ in range(steps)]
