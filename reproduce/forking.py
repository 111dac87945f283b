"""Forks: new runs that begin at the state of another run, with a changed configuration."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from artifacts import Store, list_runs, load_bundle, sources_digest
from artifacts.bundle import load_manifest
from data_pipeline import open_dataset
from reproduce.committing import commit_run, lock_entries
from reproduce.configuration import Configuration, apply_override, check, differences
from reproduce.display import say
from reproduce.errors import Changed, ConfigurationError, Inconclusive
from reproduce.history import configuration_of, find_bundle
from reproduce.lineage import Fork, Lineage
from reproduce.normative import normative_sources
from reproduce.outputs import shortest
from reproduce.planning.devices import find_device
from reproduce.planning.report import require_memory
from reproduce.prepared import require_made
from reproduce.project import Project
from reproduce.training import Finished, train
from reproduce.workbench import identity_of, open_workbench

MAY_CHANGE = ("train", "evaluation", "sampling", "model.dropout")
DATA_STAGES = ("fetch", "prepare")


def fork(project: Project, present: Configuration, bundle: str | None, overrides: Sequence[str]) -> str:
    """Trains a fork of the run that `bundle` (by default the present run's last) is of, and commits it; returns the
    hash of its record. The outputs of the pipeline in run/ stay as they are. Raises as `train`."""
    store = project.store(present.run)
    parent = last_bundle(project, present, store) if bundle is None else find_bundle(store, bundle)
    before = configuration_of(store, parent, present)
    after = changed(before, overrides)
    state = load_manifest(store, parent).state
    require_made(project.dataset)
    if (here := open_dataset(project.dataset).hash) != state["dataset"]:
        raise ConfigurationError(
            f"bundle {parent} was made with dataset {state['dataset']}, {project.dataset} is {here}: a fork goes on "
            "with the same data; `dvc repro prepare` under its configuration makes it"
        )
    step = state["step"]
    assert isinstance(step, int)
    if after.train.steps <= step:
        raise ConfigurationError(
            f"bundle {parent} is at step {step}, and the fork would end at train.steps={after.train.steps}: "
            f"give more steps, such as -S train.steps={2 * max(step, 1)}"
        )
    # Before a run is begun: what this machine cannot train shall leave none.
    require_memory(after, find_device(after.run.device))
    changes = differences(before.identity(), after.identity())
    for line in changes:
        say(f"fork: {line}")
    finished = train(project, after, fork=Fork(bundle=parent, step=step, changes=changes))
    results, lock = _results(project, after, finished), _lock(project, parent, step)
    return commit_run(project, after, finished.run_id, finished.final_bundle, results, lock)[0]


def changed(before: Configuration, overrides: Sequence[str]) -> Configuration:
    """A configuration with `-S` overrides. Raises ConfigurationError if nothing changes, or too much."""
    value: dict[str, Any] = before.model_dump(mode="json")
    for text in overrides:
        apply_override(value, text)
    after = check(value, "the fork's configuration")
    changes = differences(before.identity(), after.identity())
    if not changes:
        raise ConfigurationError(
            "--fork: nothing would change, so the fork would be the same run: say what changes, such as "
            "-S train.steps=2000, or resume without --fork"
        )
    if fixed := [line for line in changes if not line.startswith(MAY_CHANGE)]:
        listed = "\n".join(f"  {line}" for line in fixed)
        raise ConfigurationError(
            f"--fork: the state would not fit such a change:\n{listed}\nA fork may change {', '.join(MAY_CHANGE)}"
        )
    return after


def require_run(project: Project, present: Configuration) -> None:
    """Raises Changed if there are runs to go on with, but none of the present configuration."""
    store = project.store(present.run)
    if any(info.bundles for info in list_runs(store)):
        last_bundle(project, present, store)


def last_bundle(project: Project, present: Configuration, store: Store) -> str:
    """The newest bundle of the run of the present configuration. Raises Changed if there is no such run, listing how
    the nearest one differs."""
    require_made(project.dataset)
    dataset = open_dataset(project.dataset)
    identity = identity_of(present, dataset)
    wanted = identity.run_id(sources_digest(normative_sources()))
    nearest: list[str] | None = None
    where = newest = ""
    for info in list_runs(store):
        lineage = Lineage.read(info.lineage, info.run_id)
        if info.run_id == wanted and info.bundles:
            return info.bundles[max(info.bundles)]
        if lineage is None or not info.bundles:
            continue
        found = _apart(lineage, dict(identity.configuration), dataset.hash)
        if nearest is None or len(found) < len(nearest):
            nearest, newest = found, info.bundles[max(info.bundles)][:12]
            where = f"run {info.run_id[:12]}, at bundle {newest}"
    if nearest is None:
        raise Inconclusive(f"there is no run in {store.path} to go on from: `dvc repro` begins one")
    listed = "\n".join(f"  {line}" for line in nearest)
    remedies = "Undo these changes to go on with it, or begin a new run with `reproduce train`"
    if all(line.startswith((*MAY_CHANGE, "source ")) for line in nearest):
        remedies += f", or make a fork of it: `reproduce resume {newest} --fork -S KEY=VALUE`"
    raise Changed(
        f"there is no run of the present configuration, data and sources to go on from. The nearest is {where}:\n"
        f"{listed}\n{remedies}"
    )


def _apart(lineage: Lineage, configuration: dict[str, Any], dataset: str) -> list[str]:
    found = differences(lineage.configuration, configuration)
    if lineage.dataset != dataset:
        found.append(f"dataset: was {lineage.dataset}, is {dataset}")
    here = normative_sources()
    sources = sorted(path for path in {*here, *lineage.sources} if here.get(path) != lineage.sources.get(path))
    return found + [f"source {path}: changed" for path in sources]


def _results(project: Project, configuration: Configuration, finished: Finished) -> dict[str, Any]:
    store = project.store(configuration.run)
    final = load_bundle(store, finished.final_bundle)
    with open_workbench(configuration, project.dataset) as workbench:
        workbench.load(final, f"bundle {finished.final_bundle}")
        loss = workbench.evaluate()
    losses = final.tensors["history/loss"]
    done = finished.steps - finished.lineage.first_step
    say(f"validation loss {loss:.4f} nats per token")
    return {
        "first_loss": float(shortest(np.float32(losses[0]))),
        "last_loss": float(shortest(np.float32(losses[-1]))),
        "steps": finished.steps,
        "tokens": done * configuration.train.batch * configuration.model.context,
        "validation": {str(step): value for step, value in finished.lineage.validation_by_step().items()},
        "validation_loss": loss,
    }


def _lock(project: Project, parent: str, step: int) -> dict[str, Any]:
    """What stands for the stages: those that made the data, and the fork."""
    before = lock_entries(project)
    return {**{name: before[name] for name in DATA_STAGES}, "fork": {"bundle": parent, "step": step}}
