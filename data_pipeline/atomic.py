"""Directories that appear whole or not at all."""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.errors import NoSpaceError, StorageError


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn an OSError into a NoSpaceError or a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        where = "a file" if error.filename is None else os.fsdecode(error.filename)
        message = f"{where}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{message}. Nothing half-written was kept; make room and run again") from error
        raise StorageError(message) from error


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Give an empty directory beside `target`; on success it becomes `target`, on failure it goes.

    What a killed process left behind is removed by the next one. An existing `target` is replaced
    only if it is empty or holds a `manifest.json`, so a mistyped path destroys nothing. OSErrors
    come out as StorageError or NoSpaceError.
    """
    with storage_errors():
        target = target.absolute()
        _check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(target)
        partial, lock = _locked_partial(target)
        try:
            yield partial
            _sync_tree(partial)
            _swap(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)


def _check_replaceable(target: Path) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / "manifest.json").is_file()):
        raise StorageError(
            f"{target} exists and holds no manifest.json, so it was not written by this program: "
            "move it away or choose another directory"
        )


def _locked_partial(target: Path) -> tuple[Path, int]:
    """Make and lock a fresh directory beside `target`; the lock says that its writer lives."""
    while True:
        partial = target.parent / f".{target.name}.{secrets.token_hex(8)}.partial"
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have taken it for an orphan between the two calls above.
        if partial.exists():
            return partial, lock
        os.close(lock)


def _remove_orphans(target: Path) -> None:
    prefix = f".{target.name}."
    for path in list(target.parent.iterdir()):
        if not (path.name.startswith(prefix) and path.name.endswith((".partial", ".old"))):
            continue
        if len(path.name.removeprefix(prefix).split(".")[0]) != 16 or path.is_symlink() or not path.is_dir():
            continue
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path)
        finally:
            os.close(lock)


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for path in [*(Path(folder, file) for file in files), Path(folder)]:
            _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(partial: Path, target: Path) -> None:
    """Put `partial` in the place of `target`; between the two renames there is no `target`, never
    half of one."""
    old = partial.with_suffix(".old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
