"""Capsules with the record's dataset and sources in them, and where these go when one is taken in."""

import secrets
import shutil
from pathlib import Path

from artifacts import Store, hash_bytes, read_record
from artifacts.capsule import Contents, begins_as_capsule, export_capsule, import_capsule
from data_pipeline import DataError, open_dataset
from reproduce.errors import Inconclusive, ReproduceError
from reproduce.normative import ROOT
from reproduce.project import Project

_DATASET = "dataset"


def write_capsule(
    project: Project, store: Store, record: str, path: Path, with_data: bool, every_bundle: bool
) -> Contents:
    """Exports a record with those of its sources that are here unchanged and, if asked, its dataset.

    Raises Inconclusive if data/dataset is not the record's.
    """
    found = read_record(store, record)
    files = {
        f"sources/{name}": ROOT / name
        for name, digest in found.sources.items()
        if (ROOT / name).is_file() and hash_bytes((ROOT / name).read_bytes()) == digest
    }
    if with_data:
        folder = project.dataset
        if (here := open_dataset(folder).hash) != found.dataset:
            raise Inconclusive(
                f"{folder} is dataset {here}, the record was made with {found.dataset}: check out the record's "
                "configuration and run `dvc repro prepare`, or export without --data"
            )
        files |= {
            f"{_DATASET}/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*") if path.is_file()
        }
    return export_capsule(store, record, path, files, every_bundle)


def require_capsule(path: Path) -> None:
    """Raises ReproduceError, saying what to do, for what is no capsule at all. Damage is found while one is read."""
    if begins_as_capsule(path):
        return
    if (path / "manifest.json").is_file():
        remedy = "it looks like a bundle: `reproduce import` takes it with --as folder"
    elif path.suffix == ".safetensors" or (path / "model.safetensors").is_file():
        remedy = "it looks like GPT-2 weights: `reproduce import` takes them with --as gpt2"
    else:
        remedy = (
            "`reproduce export RECORD FILE` writes one, and `reproduce import` takes files of other kinds with --as"
        )
    raise ReproduceError(f"{path} is not a capsule: {remedy}")


def take_capsule(project: Project, store: Store, path: Path, folder: Path | None) -> tuple[Contents, Path | None]:
    """Imports a capsule; its files go to `folder`, or to where `verify` looks for datasets. Returns where they are."""
    if folder is not None:
        return import_capsule(store, path, folder), folder
    scratch = project.private() / "capsules" / secrets.token_hex(8)
    scratch.parent.mkdir(exist_ok=True)
    try:
        contents = import_capsule(store, path, scratch)
        where = _place_dataset(project, scratch / _DATASET, read_record(store, contents.record).dataset)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return contents, where


def _place_dataset(project: Project, found: Path, expected: str) -> Path | None:
    """Moves a dataset that came with a record to where a verification of it looks; None if none came."""
    if not found.is_dir():
        return None
    target = project.private() / "datasets" / expected / "dataset"
    try:
        if open_dataset(found).hash != expected:
            raise Inconclusive("the capsule's dataset is not the one that its record names")
    except DataError as error:
        raise Inconclusive(f"the capsule's dataset cannot be used: {error}") from error
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    found.rename(target)
    return target
