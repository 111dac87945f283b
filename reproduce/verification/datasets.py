"""The dataset that a record was made with: found, or built once more, and in either case the same by its hash."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data_pipeline import DataError, Dataset, DataSpec, fetch, open_dataset, prepare
from reproduce.errors import Inconclusive
from reproduce.project import Project


@dataclass(frozen=True)
class Found:
    """An open dataset, its folder, and in words where it came from."""

    dataset: Dataset
    folder: Path
    where: str


def places(project: Project, wanted: str) -> Iterator[tuple[Path, str]]:
    """Where the dataset `wanted` may lie already."""
    yield project.dataset, "data/dataset"
    yield _own(project, wanted) / "dataset", "a capsule or an earlier verification"


def look_for_dataset(project: Project, wanted: str) -> Found | None:
    """The dataset with this hash, every byte of it verified; None if there is none at hand."""
    for folder, where in places(project, wanted):
        with suppress(DataError):
            dataset = open_dataset(folder)
            if dataset.hash == wanted:
                return Found(dataset, folder, where)
    return None


def find_dataset(project: Project, spec: DataSpec, wanted: str, say: Callable[[str], None]) -> Found:
    """The dataset with this hash, built from its sources if need be. Raises Inconclusive, saying what is missing."""
    found = look_for_dataset(project, wanted)
    if found is not None:
        return found
    here = "data/dataset is not the record's" if project.dataset.exists() else "there is no data/dataset"
    say(f"data: {here}; building the record's anew from its sources")
    own = _own(project, wanted)
    try:
        fetch(spec, own / "raw", project.root)
    except DataError as error:
        raise Inconclusive(
            f"the dataset {wanted} is not at hand, and its sources cannot be had here: {error}\n"
            f"Put the dataset in {project.dataset} (`dvc pull`, or from a capsule), or provide its sources"
        ) from error
    prepare(spec, own / "raw", own / "dataset")
    dataset = open_dataset(own / "dataset")
    if dataset.hash != wanted:
        raise Inconclusive(
            f"the record was made with dataset {wanted}, its sources now give {dataset.hash}: "
            "provide the files the record was made with"
        )
    return Found(dataset, own / "dataset", "its sources")


def _own(project: Project, wanted: str) -> Path:
    return project.private() / "datasets" / wanted
