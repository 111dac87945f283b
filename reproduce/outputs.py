"""The small files of the pipeline: the same bytes on every machine, written whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import canonical
from artifacts.canonical import JSON
from reproduce.errors import CorruptOutput, Inconclusive


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.partial")
    scratch.write_bytes(data)
    os.replace(scratch, path)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """For people and DVC: sorted and indented."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """An object that `write_json` wrote. Raises Inconclusive if there is no such file, CorruptOutput; both say the
    remedy."""
    try:
        value: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise Inconclusive(f"{path} is missing, the stage that makes it has not run yet: {remedy}") from error
    except ValueError as error:
        raise CorruptOutput(f"{path}: expected JSON, found something else: {remedy}") from error
    if not isinstance(value, dict):
        raise CorruptOutput(f"{path}: expected a JSON object, found something else: {remedy}")
    return value


def write_canonical(path: Path, value: JSON) -> None:
    """For hashing: RFC 8785, no byte besides."""
    write_bytes(path, canonical.dumps(value))


def write_table(path: Path, header: Iterable[str], rows: Iterable[tuple[int, np.float32 | float]]) -> None:
    """A CSV file; numbers as the shortest decimals that read back the same."""
    lines = [",".join(header), *(f"{step},{shortest(value)}" for step, value in rows)]
    write_text(path, "".join(f"{line}\n" for line in lines))


def shortest(value: np.float32 | float) -> str:
    """The shortest decimal that reads back as `value` in its own precision."""
    if isinstance(value, np.float32):
        return np.format_float_positional(value, unique=True, trim="0")
    return repr(value)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
