"""Reading directories that a manifest describes."""

import os
from pathlib import Path

from data_pipeline.errors import CorruptDataError


def read_file(path: Path, remedy: str) -> bytes:
    """The bytes of a file that must exist. Raises CorruptDataError, saying the remedy."""
    if not path.is_file():
        raise CorruptDataError(f"{path}: expected this file, found none: {remedy}")
    return path.read_bytes()


def check_files(directory: Path, expected: set[str], remedy: str) -> None:
    """Raise CorruptDataError unless the files below `directory` are exactly `expected` (POSIX
    names)."""
    found = {
        Path(folder, file).relative_to(directory).as_posix()
        for folder, _, files in os.walk(directory)
        for file in files
    }
    if missing := sorted(expected - found):
        raise CorruptDataError(f"{directory / missing[0]}: missing ({len(missing)} in all): {remedy}")
    if extra := sorted(found - expected):
        raise CorruptDataError(f"{directory / extra[0]}: not in the manifest ({len(extra)} in all): {remedy}")
