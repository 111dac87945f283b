"""The stages of dvc.yaml. Each reads what the stages before it wrote and writes its own outputs."""

from collections.abc import Callable
from typing import Any

import numpy as np

from artifacts import load_bundle, read_folder, sources_digest, write_folder
from data_pipeline import fetch, prepare
from reproduce import outputs
from reproduce.committing import commit
from reproduce.configuration import Configuration
from reproduce.display import counted, say
from reproduce.planning.devices import find_device
from reproduce.planning.report import portable_summary, require_memory
from reproduce.planning.sizes import size
from reproduce.prepared import open_prepared, require_made
from reproduce.project import Project
from reproduce.training import Finished, train
from reproduce.workbench import check_dataset, workbench_over

REMEDY = "run `dvc repro`"


def fetch_stage(project: Project, configuration: Configuration) -> None:
    """Sources to data/raw."""
    manifest = fetch(configuration.data, project.raw, project.root)
    length = sum(document.size for document in manifest.documents)
    say(f"fetched {counted(len(manifest.documents), 'document')}, {counted(length, 'byte')}")


def prepare_stage(project: Project, configuration: Configuration) -> None:
    """data/raw to tokens and a tokenizer in data/dataset."""
    require_made(project.raw)
    manifest = prepare(configuration.data, project.raw, project.dataset)
    kinds = manifest.tokenizer.size
    say(
        f"prepared {manifest.train.tokens:,} tokens to train on and {manifest.validation.tokens:,} held out, "
        f"a vocabulary of {kinds}: model.vocab must be at least {kinds}"
    )


def plan_stage(project: Project, configuration: Configuration) -> None:
    """Refuses what does not fit the data or this machine; what is written is the same on every machine."""
    check_dataset(configuration, open_prepared(project.dataset, configuration.data))
    found = require_memory(configuration, find_device(configuration.run.device))
    outputs.write_json(project.outputs / "plan.json", portable_summary(configuration))
    say(
        f"{found.parameter_count:,} parameters; {size(found.peak)} of memory; {found.work.steps:,} steps of "
        f"{found.work.tokens:,} tokens. `reproduce plan` itemises this"
    )


def train_stage(project: Project, configuration: Configuration, start: str | None = None) -> None:
    """Trains, then writes what the run comes to: a pointer to its bundles, its losses, its samples, its model."""
    write_training_outputs(project, configuration, train(project, configuration, start))


def write_training_outputs(project: Project, configuration: Configuration, finished: Finished) -> None:
    """The outputs of the stage `train`, as functions of the finished run."""
    folder = project.outputs
    store = project.store(configuration.run)
    losses = load_bundle(store, finished.final_bundle).tensors["history/loss"]
    bundle = folder / "bundle"
    outputs.remove(bundle)
    write_folder(store, finished.final_bundle, bundle)
    outputs.write_table(folder / "plots" / "training.csv", ("step", "loss"), enumerate(losses.astype(np.float32), 1))
    outputs.write_text(folder / "samples.txt", _samples(finished))
    outputs.write_json(
        folder / "training.json",
        {
            "first_loss": _number(losses[0]),
            "last_loss": _number(losses[-1]),
            "steps": finished.steps,
            "tokens": finished.steps * configuration.train.batch * configuration.model.context,
        },
    )
    identity = finished.identity
    outputs.write_json(
        folder / "run.json",
        {
            "configuration": identity.configuration_hash,
            "dataset": identity.dataset,
            "final_bundle": finished.final_bundle,
            "first_bundle": finished.first_bundle,
            "run": finished.run_id,
            "sources_digest": sources_digest(finished.sources),
            "specification": identity.specification,
            "steps": finished.steps,
            "tokenizer": identity.tokenizer,
            "validation": {str(k): v for k, v in finished.lineage.validation_by_step().items()},
        },
    )
    say(f"final bundle {finished.final_bundle}")


def evaluate_stage(project: Project, configuration: Configuration) -> None:
    """The final bundle on held-out text, and a sample of what it writes."""
    folder = project.outputs
    run = outputs.read_json(folder / "run.json", REMEDY)
    final: str = run["final_bundle"]
    with workbench_over(configuration, open_prepared(project.dataset, configuration.data)) as workbench:
        workbench.load(read_folder(folder / "bundle", final), f"bundle {final}")
        loss = workbench.evaluate()
        text = workbench.sample(configuration.sampling)
    steps = configuration.train.steps
    curve = [*((int(step), float(value)) for step, value in run["validation"].items()), (steps, loss)]
    outputs.write_table(folder / "plots" / "validation.csv", ("step", "loss"), sorted(curve))
    outputs.write_text(folder / "sample.txt", _ending(text))
    outputs.write_json(folder / "metrics.json", {"validation_loss": loss})
    say(f"validation loss {loss:.4f} nats per token\n{text}")


def commit_stage(project: Project, configuration: Configuration) -> None:
    """The record of the run."""
    say(f"record {commit(project, configuration)}")


STAGES: dict[str, Callable[[Project, Configuration], None]] = {
    "fetch": fetch_stage,
    "prepare": prepare_stage,
    "plan": plan_stage,
    "train": train_stage,
    "evaluate": evaluate_stage,
    "commit": commit_stage,
}


def _samples(finished: Finished) -> str:
    return "".join(f"== step {step}\n{_ending(text)}\n" for step, text in finished.lineage.samples_by_step().items())


def _ending(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _number(value: Any) -> float:
    """An fp32 as the shortest decimal that reads back the same."""
    return float(outputs.shortest(np.float32(value)))
