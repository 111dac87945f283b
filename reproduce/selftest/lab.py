"""A small real run in a folder of its own, and copies of it to spoil."""

import contextlib
import io
import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from artifacts import (
    Record,
    Store,
    load_bundle,
    read_record,
    record_bundles,
    save_bundle,
    write_digests,
    write_record,
)
from data_pipeline import Dataset, open_dataset
from engine.trainer import Trainer
from reproduce.committing import commit
from reproduce.configuration import Configuration, check
from reproduce.outputs import shortest, write_bytes, write_json
from reproduce.project import Project
from reproduce.stages import evaluate_stage, fetch_stage, plan_stage, prepare_stage, train_stage
from reproduce.state import Identity
from reproduce.verification import Request, verify
from reproduce.verification.lock import folder_md5
from reproduce.workbench import Workbench, workbench_over

SETTINGS: Mapping[str, Any] = {
    "tier": "portable",
    "data": {
        "sources": [{"kind": "file", "paths": ["corpus/*.txt"]}],
        "cleaning": [],
        "tokenizer": {"kind": "characters"},
        "validation_permille": 50,
    },
    "model": {
        "vocab": 48,
        "context": 16,
        "d_model": 16,
        "heads": 2,
        "layers": 1,
        "hidden": 32,
        "activation": "gelu",
        "dropout": 0.1,
        "linear_bias": True,
        "norm_parameters": True,
        "tied": True,
        "init_std": 0.02,
        "attention": "stored",
    },
    "train": {
        "steps": 12,
        "batch": 4,
        "shards": 2,
        "seed": 1337,
        "learning_rate": 2e-3,
        "final_learning_rate": 2e-4,
        "warmup_steps": 2,
        "beta1": 0.9,
        "beta2": 0.99,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "decayed": ["matrix"],
        # Below every gradient norm of this run, so that the threshold matters at every step.
        "clip_norm": 0.25,
    },
    "evaluation": {"every_steps": 4},
    "sampling": {"every_steps": 0, "prompt": "The", "tokens": 20, "temperature": 0.8, "top_k": 40, "seed": 1},
    "run": {
        "device": "cpu",
        "threads": 1,
        "recompute": 0,
        "save_every_steps": 5,
        "store": ".samebits/store",
        "progress": "none",
    },
}
TEXT = "".join(
    f"The quick brown fox {n} jumps over the lazy dog, and then it rests a while ({n * 7919 % 1000}).\n"
    for n in range(120)
)

_T = TypeVar("_T")
Settings = Mapping[str, Mapping[str, Any] | str]


def settings_with(changes: Settings) -> dict[str, Any]:
    """SETTINGS with `changes` over them, section by section."""
    whole: dict[str, Any] = {**SETTINGS}
    for section, values in changes.items():
        whole[section] = values if isinstance(values, str) else {**SETTINGS[section], **values}
    return whole


@dataclass(frozen=True)
class Lab:
    """A project whose run is finished and committed as `record`."""

    project: Project
    configuration: Configuration
    record: str

    @property
    def store(self) -> Store:
        return self.project.store(self.configuration.run)

    def read(self) -> Record:
        return read_record(self.store, self.record)

    def bundles(self) -> dict[int, str]:
        return record_bundles(self.store, self.record)

    def dataset(self) -> Dataset:
        return open_dataset(self.project.dataset)

    def identity(self) -> Identity:
        record = self.read()
        return Identity(record.configuration, record.dataset, record.tokenizer)

    def copy(self, root: Path) -> "Lab":
        """The same in another folder, to be spoiled."""
        shutil.copytree(self.project.root, root, symlinks=True)
        return Lab(Project(root), self.configuration, self.record)

    def verify(self, record: str | None = None, **asked: Any) -> dict[str, Any]:
        """What `reproduce verify --json` says, and its exit code as `code`."""
        code, said = quietly(
            lambda: verify(self.project, self.configuration.run, record or self.record, Request(**asked, as_json=True))
        )
        return {**json.loads(said), "code": code}

    def forge(self, **changes: Any) -> str:
        """A record like the true one but for `changes`; its hash."""
        forged = Record.model_validate({**self.read().model_dump(), **changes})
        return write_record(self.store, forged, {})

    def forge_final(self, change: Callable[[dict[str, npt.NDArray[Any]]], None]) -> str:
        """A record whose final bundle `change` was done to."""
        final = load_bundle(self.store, self.read().final_bundle)
        change(final.tensors)
        return self.forge(final_bundle=save_bundle(self.store, final.tensors, final.state))

    def forge_run(self, run: "Deviation") -> str:
        """A record that claims to be this one's run, of a training that deviated from it; its hash."""
        configuration = self.configuration
        if run.settings:
            configuration = check(settings_with(run.settings), "the deviation")
        with workbench_over(configuration, run.dataset or self.dataset()) as workbench:
            return _train_otherwise(self, workbench, run)


@dataclass(frozen=True)
class Deviation:
    """How a training deviates from what its record claims.

    settings: of the configuration. dataset: other data. batches: what feeds it, given what should. around_step: takes
    the trainer and the step (from 1) and does the step.
    """

    settings: Settings | None = None
    dataset: Dataset | None = None
    batches: Callable[[Any], Any] | None = None
    around_step: Callable[[Trainer, int], None] | None = None


def _train_otherwise(lab: Lab, workbench: Workbench, run: Deviation) -> str:
    trainer, store, identity = workbench.trainer, lab.store, lab.identity()
    if run.batches is not None:
        trainer.batches = run.batches(trainer.batches)
    steps = lab.read().steps
    kept = sorted(lab.bundles())
    bundles: dict[int, str] = {}
    validation: dict[str, float] = {}
    trainer.initialise()
    for step in itertools.count():
        if step % 4 == 0 and step < steps:
            validation[str(step)] = workbench.evaluate()
        if step in kept:
            bundles[step] = save_bundle(store, trainer.state(), identity.state(step))
        if step == steps:
            break
        if run.around_step is None:
            trainer.train_step()
        else:
            run.around_step(trainer, step + 1)
    final = trainer.state()
    losses = final["history/loss"]
    record = lab.read()
    forged = record.model_copy(
        update={
            "first_bundle": bundles[0],
            "final_bundle": bundles[steps],
            "digests": write_digests(store, [bytes(row) for row in final["history/digest"]]),
            "results": {
                **record.results,
                "first_loss": float(shortest(losses[0])),
                "last_loss": float(shortest(losses[-1])),
                "validation": validation,
                "validation_loss": workbench.evaluate(),
            },
        }
    )
    return write_record(store, forged, bundles)


def make_lab(root: Path, changes: Settings | None = None, text: str = TEXT) -> Lab:
    """Trains in the new folder `root`, through the stages of the pipeline but without DVC."""
    settings = settings_with(changes or {})
    configuration = check(settings, "the configuration of the self-test")
    (root / "corpus").mkdir(parents=True)
    write_bytes(root / "corpus" / "text.txt", text.encode("utf-8"))
    write_bytes(root / "dvc.yaml", b"# The self-test runs the stages itself.\n")
    write_json(root / "params.yaml", settings)  # JSON is YAML
    project = Project(root)

    def run() -> str:
        for stage in (fetch_stage, prepare_stage, plan_stage, train_stage, evaluate_stage):
            stage(project, configuration)
        write_json(project.lock, {"schema": "2.0", "stages": lock_of(project, configuration)})
        return commit(project, configuration)

    record, _ = quietly(run)
    return Lab(project, configuration, record)


def lock_of(project: Project, configuration: Configuration) -> dict[str, Any]:
    """What DVC would have written about the stages, as far as verification looks at it."""
    identity = configuration.identity()
    raw = {"path": "data/raw", "md5": folder_md5(project.raw)}
    dataset = {"path": "data/dataset", "md5": folder_md5(project.dataset)}

    def stage(keys: list[str], deps: list[Any], outs: list[Any]) -> dict[str, Any]:
        return {"params": {"params.yaml": {key: identity[key] for key in keys}}, "deps": deps, "outs": outs}

    decides = ["data", "evaluation", "model", "sampling", "tier", "train"]
    return {
        "fetch": stage(["data"], [], [raw]),
        "prepare": stage(["data"], [raw], [dataset]),
        "plan": stage(["model", "tier", "train"], [dataset], []),
        "train": stage(decides, [dataset], []),
        "evaluate": stage(decides, [dataset], []),
    }


def quietly(action: Callable[[], _T]) -> tuple[_T, str]:
    """What an action returns and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = action()
    return result, out.getvalue()


def bits(array: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The same fp32 memory as whole numbers, to flip bits in."""
    return array.reshape(-1).view(np.uint32)
