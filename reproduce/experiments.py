"""Named configurations in experiments/."""

import difflib
import subprocess
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
    """Copy an experiment to params.yaml, once it is known to be sound. What nothing else has a copy of is kept."""
    path = experiment_path(project, name)
    load_configuration(path)
    _keep(project)
    outputs.write_bytes(project.params, path.read_bytes())
    say(f"params.yaml is now experiments/{name}.yaml; `dvc repro` runs it")


def _keep(project: Project) -> None:
    """Copies params.yaml to params.yaml.before if it is neither an experiment's nor the committed one."""
    params = project.params
    if not params.is_file():
        return
    present = params.read_bytes()
    copies = (path.read_bytes() for path in project.experiments.glob("*.yaml"))
    if present in copies or present == _committed(params):
        return
    before = params.with_name(f"{params.name}.before")
    outputs.write_bytes(before, present)
    say(f"params.yaml was edited: it is kept as {before.name}")


def _committed(path: Path) -> bytes | None:
    """A file as Git has it in HEAD; None where there is no Git, no repository or no such file."""
    try:
        done = subprocess.run(
            ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"], capture_output=True, check=False
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
