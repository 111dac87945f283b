"""Whole files, written so that a crash at any point leaves the old file or the new one, and read
within a bound."""

import errno
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from artifacts import filesystem
from artifacts.errors import Corrupt, Missing, NoSpace, ReadOnly

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)

# Files of one batch that are open at once, where a process may open eight times as many.
_MOST_WAITING = 64
_PATIENCE_SECONDS = 2.0  # until other threads have closed theirs


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turns a full disk or quota into NoSpace and a folder that cannot be written into ReadOnly; these and all other
    errors of the system name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise NoSpace(
                f"no space left while writing {path} ({free_bytes(path)} bytes free): "
                "make room and go on from the last bundle"
            ) from error
        if error.errno in _READ_ONLY:
            raise ReadOnly(f"cannot write {path}: {error.strerror}") from error
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_whole(target: Path, parts: Iterable[bytes | memoryview], temporary: Path, mode: int = 0o644) -> None:
    """Writes `target` through a synced file in the folder `temporary`, replacing what was there.

    The entry in `target`'s folder is not durable before the caller has synced that folder.
    """
    with FileBatch(temporary) as batch:
        batch.write(target, parts, mode)


@dataclass(frozen=True)
class _Waiting:
    """A file that is written and neither synced nor named yet."""

    descriptor: int
    scratch: Path
    target: Path


class FileBatch:
    """Writes many files as `write_whole` does, by any number of threads, and syncs and names each some time after it is
    written: by then the medium has most of its bytes, and one commit of the filesystem's journal serves many files.

    All files are in their places when the `with` block has ended without an error; after an error those that are not
    are removed.
    """

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._waiting: deque[_Waiting] = deque()
        self._most = max(1, min(_MOST_WAITING, filesystem.open_file_limit() // 8))
        self._ended = False

    def write(self, target: Path, parts: Iterable[bytes | memoryview], mode: int = 0o644) -> None:
        scratch = self._temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
        with write_errors(target):
            descriptor = self._open(scratch, mode)
            try:
                for part in parts:
                    _write_all(descriptor, memoryview(part))
                filesystem.start_writeback(descriptor)
                if self._ended:
                    raise AssertionError(f"{target} was written after its batch had ended")
            except BaseException:
                _give_up(descriptor, scratch)
                raise
        self._waiting.append(_Waiting(descriptor, scratch, target))
        if len(self._waiting) > self._most:
            self._finish(len(self._waiting) - self._most // 2)

    def _open(self, scratch: Path, mode: int) -> int:
        """Where the process may open no more files, those that wait are finished first."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return filesystem.open_new(scratch, mode)
            except OSError as error:
                if error.errno not in _TOO_MANY_OPEN or time.monotonic() > deadline:
                    raise
            if self._waiting:
                self._finish(len(self._waiting))
            else:
                time.sleep(0.01)

    def __enter__(self) -> Self:
        make_directory(self._temporary)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish(len(self._waiting))
        finally:
            self._ended = True
            while self._waiting:
                file = self._waiting.popleft()
                _give_up(file.descriptor, file.scratch)

    def _finish(self, count: int) -> None:
        """Syncs and names the `count` files that have waited longest, or as many as other threads leave."""
        for _ in range(count):
            try:
                file = self._waiting.popleft()
            except IndexError:
                return
            with write_errors(file.target):
                try:
                    try:
                        filesystem.sync(file.descriptor)
                    finally:
                        filesystem.close(file.descriptor)
                    filesystem.rename(file.scratch, file.target)
                except BaseException:
                    _give_up(-1, file.scratch)
                    raise


def _give_up(descriptor: int, scratch: Path) -> None:
    """The space is wanted back at once; what stays behind all the same is for `gc`."""
    if descriptor >= 0:
        with suppress(OSError):
            filesystem.close(descriptor)
    with suppress(OSError):
        filesystem.unlink(scratch)


def make_directories(path: Path) -> None:
    """Makes `path` and its missing parents, each durable before the next."""
    if filesystem.is_directory(path):
        return
    make_directories(path.parent)
    make_directory(path)
    with write_errors(path):
        filesystem.sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Makes `path` if it is missing; durable only once the caller has synced the folder above it."""
    if not filesystem.is_directory(path):
        with write_errors(path), suppress(FileExistsError):
            filesystem.make_directory(path)


def read_whole(path: Path, limit: int, what: str) -> bytes:
    """The bytes of a file of at most `limit` bytes. Missing if there is none, Corrupt if longer or
    unreadable."""
    with _open_within(path, limit, what) as (descriptor, size):
        parts = []
        # One byte more than the size: a file that has grown since is noticed, not cut.
        wanted = size + 1
        while wanted > 0:
            part = filesystem.read(descriptor, wanted)
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    _require_size(path, size, len(data), what)
    return data


def read_whole_into(path: Path, limit: int, what: str, memory: Callable[[int], memoryview]) -> memoryview:
    """`read_whole` into what `memory` has for that many bytes: large files are read in half the time where pages
    need not be made for them."""
    with _open_within(path, limit, what) as (descriptor, size):
        target = memory(size + 1)
        found = 0
        while found <= size and (count := filesystem.read_into(descriptor, target[found:])):
            found += count
    _require_size(path, size, found, what)
    return target[:size]


def _require_size(path: Path, expected: int, found: int, what: str) -> None:
    if found != expected:
        raise Corrupt(f"{what}: {path} should have {expected} bytes, read {found}")


@contextmanager
def _open_within(path: Path, limit: int, what: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a file of at most `limit` bytes."""
    try:
        descriptor = filesystem.open_read(path)
    except FileNotFoundError as error:
        raise Missing(f"{what}: no file {path}") from error
    except OSError as error:
        if error.errno in _TOO_MANY_OPEN:
            raise  # says nothing of the file
        raise Corrupt(f"{what}: cannot open {path}: {error.strerror}") from error
    try:
        size = filesystem.size_of(descriptor)
        if size > limit:
            raise Corrupt(f"{what}: {path} has {size} bytes, at most {limit} are allowed")
        yield descriptor, size
    except OSError as error:
        raise Corrupt(f"{what}: cannot read {path}: {error.strerror}") from error
    finally:
        filesystem.close(descriptor)


def free_bytes(path: Path) -> int:
    """Bytes free on the filesystem that holds `path`, which need not exist yet."""
    for folder in (path, *path.parents):
        if filesystem.exists(folder):
            return filesystem.free_space(folder)
    raise Missing(f"no folder above {path}")


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data) > 0:
        written = filesystem.write(descriptor, data)
        data = data[written:]
