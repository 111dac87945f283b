"""Named configurations in experiments/."""

import difflib
from pathlib import Path

from reproduce import outputs
from reproduce.configuration import load_configuration
from reproduce.display import say
from reproduce.errors import ReproduceError
from reproduce.project import Project


def experiment_path(project: Project, name: str) -> Path:
    """The file of an experiment. Raises ReproduceError with the names there are."""
    names = sorted(path.stem for path in project.experiments.glob("*.yaml"))
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(names)}"
        raise ReproduceError(f"no experiment {name!r} in experiments/: {hint}")
    return project.experiments / f"{name}.yaml"


def use_experiment(project: Project, name: str) -> None:
    """Copy an experiment to params.yaml, once it is known to be sound."""
    path = experiment_path(project, name)
    load_configuration(path)
    outputs.write_bytes(project.params, path.read_bytes())
    say(f"params.yaml is now experiments/{name}.yaml; `dvc repro` runs it")
