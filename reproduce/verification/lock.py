"""Does what dvc.lock said of the stages, as a record keeps it, fit the rest of the record?"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from artifacts import Record
from reproduce.configuration import differences
from reproduce.errors import CorruptOutput

DATASET = "data/dataset"
_PARAMS = "params.yaml"


def check_lock(record: Record) -> None:
    """The parameters that each stage ran with are those of the configuration, and each took what an earlier one made.
    Raises CorruptOutput."""
    stages = record.lock
    if not isinstance(stages, Mapping):
        raise CorruptOutput("the record's lock is not a list of stages")
    made: dict[str, str] = {}
    for name, stage in stages.items():
        for key, value in _parameters(stage):
            expected = _at(record.configuration, key)
            # Where attention keeps its probabilities is a choice of memory and in no record.
            found = {k: v for k, v in value.items() if k != "attention"} if key == "model" else value
            if changed := differences(expected, found, key):
                raise CorruptOutput(
                    f"the record's lock says that stage {name} ran with another configuration than the record's: "
                    f"{'; '.join(changed)}"
                )
        for path, md5 in _files(stage, "outs"):
            made[path] = md5
    for name, stage in stages.items():
        for path, md5 in _files(stage, "deps"):
            if path in made and made[path] != md5:
                raise CorruptOutput(
                    f"the record's lock says that stage {name} took {path} with md5 {md5}, but that it was made with "
                    f"md5 {made[path]}"
                )


def check_lock_of_dataset(record: Record, folder: Path) -> None:
    """The dataset that the lock names is the one in `folder`. Raises CorruptOutput."""
    stages: Any = record.lock
    named = {path: md5 for stage in stages.values() for path, md5 in _files(stage, "outs")}
    if DATASET in named and named[DATASET] != (found := folder_md5(folder)):
        raise CorruptOutput(
            f"the record's lock names a dataset with md5 {named[DATASET]}, the record's own has {found}"
        )


def folder_md5(folder: Path) -> str:
    """What DVC calls the hash of a folder: the MD5 of a list of its files with theirs."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = [
        {
            "md5": hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest(),
            "relpath": path.relative_to(folder).as_posix(),
        }
        for path in files
    ]
    entries.sort(key=lambda entry: entry["relpath"])
    text = json.dumps(entries, sort_keys=True).encode("utf-8")
    return hashlib.md5(text, usedforsecurity=False).hexdigest() + ".dir"


def _parameters(stage: Any) -> Iterator[tuple[str, Any]]:
    params = stage.get("params", {}) if isinstance(stage, Mapping) else {}
    values = params.get(_PARAMS, {}) if isinstance(params, Mapping) else {}
    if isinstance(values, Mapping):
        yield from values.items()


def _files(stage: Any, kind: str) -> Iterator[tuple[str, str]]:
    entries = stage.get(kind, []) if isinstance(stage, Mapping) else []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and "path" in entry and "md5" in entry:
            yield str(entry["path"]), str(entry["md5"])


def _at(configuration: Mapping[str, Any], key: str) -> Any:
    place: Any = configuration
    for part in key.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place
