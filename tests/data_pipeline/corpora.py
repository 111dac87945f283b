"""Small corpora on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_pipeline import DataSpec, fetch, prepare


def make_spec(**changes: Any) -> DataSpec:
    """A spec of all files below `text`, by characters, half held out."""
    fields: dict[str, Any] = {
        "sources": [{"kind": "file", "paths": ["text/**"]}],
        "tokenizer": {"kind": "characters"},
        "validation_permille": 500,
    }
    return DataSpec.model_validate(fields | changes)


def write_files(root: Path, files: dict[str, bytes]) -> None:
    """Write files below `text`."""
    for name, data in files.items():
        path = root / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def make_dataset(root: Path, files: dict[str, bytes], **changes: Any) -> Path:
    """Fetch and prepare `files` below `root`; return the dataset's directory."""
    write_files(root, files)
    spec = make_spec(**changes)
    fetch(spec, root / "raw", root)
    prepare(spec, root / "raw", root / "dataset")
    return root / "dataset"
