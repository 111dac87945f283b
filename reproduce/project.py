"""Where things are in a project folder."""

from dataclasses import dataclass
from pathlib import Path

from artifacts import Store
from reproduce.configuration import RunOptions
from reproduce.errors import ReproduceError
from reproduce.outputs import write_text

PIPELINE = "dvc.yaml"


@dataclass(frozen=True)
class Project:
    """The folder that holds dvc.yaml."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> "Project":
        """The project that the working folder is in."""
        here = (start or Path.cwd()).absolute()
        for folder in (here, *here.parents):
            if (folder / PIPELINE).is_file():
                return cls(folder)
        raise ReproduceError(
            f"expected {PIPELINE} in {here} or a folder above, found none: change to the project's folder"
        )

    @property
    def pipeline(self) -> Path:
        return self.root / PIPELINE

    @property
    def lock(self) -> Path:
        return self.root / "dvc.lock"

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def experiments(self) -> Path:
        return self.root / "experiments"

    @property
    def raw(self) -> Path:
        return self.root / "data" / "raw"

    @property
    def dataset(self) -> Path:
        return self.root / "data" / "dataset"

    @property
    def outputs(self) -> Path:
        return self.root / "run"

    def private(self) -> Path:
        """The folder of what this program keeps for itself, made if need be; Git is told not to look into it."""
        folder = self.root / ".samebits"
        folder.mkdir(exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            write_text(ignore, "*\n")
        return folder

    def store_path(self, run: RunOptions) -> Path:
        return self.root / Path(run.store).expanduser()

    def store(self, run: RunOptions, read_only: bool = False) -> Store:
        """The store that `run.store` names. Raises ReproduceError if there is a file in its place."""
        path = self.store_path(run)
        if blocking := next((place for place in (path, *path.parents) if place.is_file()), None):
            raise ReproduceError(f"run.store: expected a folder, found the file {blocking}: name a folder")
        self.private()
        return Store(path, read_only=read_only)
