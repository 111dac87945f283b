"""The state of one side after a step: as it was saved, or rebuilt by replaying at most one segment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from artifacts import load_bundle
from artifacts.errors import ArtifactError
from data_pipeline import DataError
from engine.errors import EngineError, NonFinite
from reproduce.configuration import RunOptions, from_identity
from reproduce.diff.sides import Side
from reproduce.errors import ReproduceError
from reproduce.project import Project
from reproduce.verification.datasets import find_dataset
from reproduce.workbench import workbench_over

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class State:
    """origin: `saved`, `replayed` (and its digest is the one that the side has), `replayed otherwise` (it is not: what
    this machine makes of that step is not what the side made of it) or `none`, with the reason in `note`."""

    origin: str
    note: str
    replayed_steps: int = 0
    tensors: Arrays | None = None


def state_after(project: Project, options: RunOptions, side: Side, step: int, say: Callable[[str], None]) -> State:
    """The state of `side` after `step` steps."""
    if step in side.bundles:
        try:
            bundle = side.bundles[step]
            return State("saved", f"bundle {bundle}", 0, load_bundle(side.store, bundle).tensors)
        except ArtifactError as error:
            return State("none", str(error))
    start = max((saved for saved in side.bundles if saved < step), default=None)
    if start is None:
        return State("none", f"no bundle before step {step} is kept")
    try:
        return _replay(project, options, side, start, step, say)
    except (ArtifactError, DataError, EngineError, ReproduceError) as error:
        return State("none", str(error))


def _replay(
    project: Project, options: RunOptions, side: Side, start: int, step: int, say: Callable[[str], None]
) -> State:
    configuration = from_identity(side.identity.configuration, options, side.title)
    dataset = find_dataset(project, configuration.data, side.identity.dataset, say).dataset
    say(f"{side.title}: replaying steps {start + 1} to {step}, from the bundle of step {start}")
    with workbench_over(configuration, dataset) as workbench:
        bundle = side.bundles[start]
        workbench.load(load_bundle(side.store, bundle), f"bundle {bundle}")
        for at in range(start + 1, step + 1):
            try:
                result = workbench.trainer.train_step()
            except NonFinite as error:
                return State("none", str(error), at - start)
            if result.digest != side.digests[at - 1] and at < step:
                return State("none", f"its replay here parts from it at step {at} already", at - start)
        tensors = {name: array.copy() for name, array in workbench.trainer.state().items()}
        if result.digest == side.digests[step - 1]:
            return State("replayed", f"replayed from bundle {bundle} of step {start}", step - start, tensors)
        return State(
            "replayed otherwise",
            f"a replay here of step {step} from bundle {bundle} does not come to the digest that it has",
            step - start,
            tensors,
        )
