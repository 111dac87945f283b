"""A lock file that many may hold shared or one exclusively, among processes and threads (flock)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts import durable, filesystem
from artifacts.errors import ReadOnly


class Gate:
    """The lock file `path`.

    For `shared` a file that cannot be written serves as well, if it can be read, and where the
    folder cannot be written, or with `read_only`, none at all: a store in a folder that cannot be
    written is not being collected either. Who wants to write has to look at `without_lock`.
    """

    def __init__(self, path: Path, read_only: bool) -> None:
        self._path = path
        self._read_only = read_only
        self._changed = threading.Condition()
        self._holders = 0
        self._descriptor: int | None = None
        self._owner: int | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """May be nested, also within `exclusive`, and held by any number of threads at once."""
        # One descriptor serves all holders of this process, so that nesting cannot wait for itself
        # behind somebody who asks for the exclusive lock in between.
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, me))
            if self._holders == 0 and self._owner is None:
                self._descriptor = self._open_shared()
            self._holders += 1
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                if self._holders == 0 and self._descriptor is not None:
                    filesystem.close(self._descriptor)
                    self._descriptor = None
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Waits until nobody else holds the lock; for ever if this thread holds it already."""
        # Threads first, then processes: the wait for another process must not keep the threads of
        # this one from giving up the shared lock.
        with self._changed:
            self._changed.wait_for(lambda: self._owner is None and self._holders == 0)
            self._owner = threading.get_ident()
        try:
            descriptor = self._open_writable()
            try:
                filesystem.lock_exclusive(descriptor)
                yield
            finally:
                filesystem.close(descriptor)
        finally:
            with self._changed:
                self._owner = None
                self._changed.notify_all()

    def _open_shared(self) -> int | None:
        descriptor = self._open_there() if self._read_only else self._open_writable_or_there()
        if descriptor is None:
            return None
        try:
            filesystem.lock_shared(descriptor)
        except BaseException:
            filesystem.close(descriptor)
            raise
        return descriptor

    @property
    def without_lock(self) -> bool:
        """Whether it is held shared with no lock, because there is none that could be opened."""
        return self._holders > 0 and self._owner is None and self._descriptor is None

    def _open_writable_or_there(self) -> int | None:
        try:
            return self._open_writable()
        except ReadOnly:
            return self._open_there()

    def _open_there(self) -> int | None:
        try:
            return filesystem.open_read(self._path)
        except (FileNotFoundError, PermissionError):
            return None

    def _open_writable(self) -> int:
        with durable.write_errors(self._path):
            durable.make_directories(self._path.parent)
            return filesystem.open_lock(self._path)
