"""A small project of its own: the sources of this checkout, a text, a model that trains in seconds, real Git and DVC.

Its sources are those of the checkout, so it takes over the kernels that were compiled for that.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from artifacts import Store, hash_bytes, list_runs
from reproduce import cli
from reproduce.selftest.lab import make_lab

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = ("engine", "data_pipeline", "artifacts", "reproduce", "tools", "experiments", ".dvc")
FILES = ("dvc.yaml", "params.yaml", ".dvcignore", ".gitignore", ".gitattributes", "data/.gitignore", "run/.gitignore")
TEXT = "".join(
    f"The quick brown fox {n} jumps over the lazy dog, and then it rests a while ({n * 7919 % 1000}).\n"
    for n in range(120)
)
MICRO = {
    "data": {
        "sources": [{"kind": "file", "paths": ["corpus/*.txt"]}],
        "cleaning": [],
        "tokenizer": {"kind": "characters"},
        "validation_permille": 50,
    },
    "model": {"vocab": 48, "context": 16, "d_model": 16, "heads": 2, "layers": 1, "hidden": 32, "dropout": 0.1},
    "train": {"steps": 12, "batch": 4, "shards": 2, "warmup_steps": 2},
    "evaluation": {"every_steps": 4},
    "sampling": {"every_steps": 4, "prompt": "The", "tokens": 20},
    "run": {"save_every_steps": 5, "progress": "plain"},
}


def environment(**more: str) -> dict[str, str]:
    """The surroundings of a command: none of this session's own settings of Python and DVC."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DVC_", "PYTEST_", "GIT_"))
    }
    identity = {f"GIT_{who}_{what}": "tests" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return {**kept, **identity, "DVC_NO_ANALYTICS": "1", "PYTHONUTF8": "1", **more}


class Project:
    """The project's folder and what can be done in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.started: list[subprocess.Popen[bytes]] = []

    def write_params(self, changes: Mapping[str, Mapping[str, object]] | None = None) -> None:
        """params.yaml: tiny's with MICRO and `changes` over it."""
        yaml = YAML(typ="safe", pure=True)
        whole = yaml.load((CHECKOUT / "experiments" / "tiny.yaml").read_text(encoding="utf-8"))
        for layer in (MICRO, changes or {}):
            for section, values in layer.items():
                whole[section].update(values) if isinstance(values, Mapping) else whole.update({section: values})
        with (self.root / "params.yaml").open("w", encoding="utf-8", newline="") as out:
            yaml.dump(whole, out)

    def run(self, *words: str, code: int | None = 0, **more: str) -> subprocess.CompletedProcess[str]:
        """A command to its end; `code` is what it has to exit with."""
        done = subprocess.run(
            words,
            cwd=self.root,
            env=environment(**more),
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        )
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def reproduce(self, *words: str, code: int | None = 0, **more: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "reproduce", *words, code=code, **more)

    def call(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """`reproduce` within this process, which spares its start; the sources are those of the checkout."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = cli.main(words)
        assert found == code, f"{words}: {found}\n{out.getvalue()}\n{err.getvalue()}"
        return subprocess.CompletedProcess(words, found, out.getvalue(), err.getvalue())

    def dvc(self, *words: str, code: int | None = 0, **more: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dvc", *words, code=code, **more)

    def git(self, *words: str) -> str:
        return self.run("git", *words).stdout

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """A command that goes on beside the test, with its own process group and its output in a file."""
        log = (self.root.parent / "log").open("wb")
        with log:
            process = subprocess.Popen(
                words, cwd=self.root, env=environment(), stdout=log, stderr=log, start_new_session=True
            )
        self.started.append(process)
        return process

    def end_started(self) -> None:
        """Whatever a failed test has left running."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.started.clear()

    def clean(self) -> None:
        """As after a clone."""
        self.git("reset", "-q", "--hard", "sources")
        self.git("clean", "-q", "-ffdx")

    def start_dvc(self, *words: str) -> subprocess.Popen[bytes]:
        return self.start(sys.executable, "-m", "dvc", *words)

    def start_reproduce(self, *words: str) -> subprocess.Popen[bytes]:
        return self.start(sys.executable, "-m", "reproduce", *words)

    @property
    def log(self) -> str:
        return (self.root.parent / "log").read_text(encoding="utf-8")

    def read(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def store(self) -> Store:
        return Store(self.root / ".samebits" / "store")

    def last_step(self) -> int:
        """The newest step saved by any run; -1 for none."""
        if not (self.root / ".samebits" / "store" / "STORE_FORMAT").exists():
            return -1
        return max((step for run in list_runs(self.store()) for step in run.bundles), default=-1)

    def status(self) -> str:
        """The status of the only run."""
        (run,) = list_runs(self.store())
        return run.status

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 200.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}:\n{self.log}"
            time.sleep(0.02)

    def record(self) -> str:
        return hash_bytes((self.root / "run" / "record.json").read_bytes())


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """The folder that the project lies in; its name has a space and letters outside ASCII."""
    folder = tmp_path_factory.mktemp("prüf stand ")
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture(scope="session")
def committed(place):
    """The project with its sources and a text committed to Git, and nothing else."""
    root = place / "project"
    root.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "tmp", "cache", "config.local")
    for name in SOURCES:
        shutil.copytree(CHECKOUT / name, root / name, ignore=ignored)
    for name in FILES:
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy2(CHECKOUT / name, root / name)
    (root / "corpus").mkdir()
    (root / "corpus" / "fox.txt").write_text(TEXT, encoding="utf-8", newline="")
    project = Project(root)
    project.write_params()
    project.git("init", "-q", "-b", "main")
    project.git("add", "-A")
    project.git("commit", "-q", "-m", "sources")
    project.git("tag", "sources")
    return project


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A finished run without DVC and Git, only to be looked at; `lab.copy(folder)` may be spoiled."""
    return make_lab(tmp_path_factory.mktemp("lab") / "project")


@pytest.fixture
def spoilt(lab, tmp_path):
    """A copy of it."""
    return lab.copy(tmp_path / "spoilt")


@pytest.fixture
def project(committed):
    """The committed project, as clean as a clone."""
    committed.clean()
    yield committed
    committed.end_started()


@pytest.fixture(scope="session")
def finished(place, committed):
    """A copy of the project with its pipeline run once."""
    committed.clean()
    committed.dvc("repro")
    copy = place / "finished"
    shutil.copytree(committed.root, copy, symlinks=True)
    return copy


@pytest.fixture
def prepared(finished, committed):
    """The project with its pipeline run once."""
    shutil.rmtree(committed.root)
    shutil.copytree(finished, committed.root, symlinks=True)
    yield committed
    committed.end_started()
