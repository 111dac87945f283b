"""A store somewhere else, at any URL that fsspec knows: the same files, without runs, locks and tmp."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from artifacts.errors import Corrupt, InvalidInput, Missing, RemoteFailed, UnknownVersion
from artifacts.store import FORMAT, FORMAT_FILE, Store

_FAILS = object()


class Remote:
    """The store at `url`: a path, `s3://bucket/folder`, `memory://folder` and so on.

    Credentials and endpoints come from the environment, as the library of each protocol reads them. InvalidInput for a
    URL that nothing here understands.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._files, self._root = fsspec.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise InvalidInput(f"{url}: {error}") from error
        if isinstance(self._files, LocalFileSystem):
            self._files.auto_mkdir = True
        # Somebody else may have written since this process last looked.
        self._files.invalidate_cache()

    @contextmanager
    def using(self) -> Iterator[None]:
        """A folder of this machine is locked as a store is, so that nobody collects garbage there meanwhile."""
        if isinstance(self._files, LocalFileSystem) and self.size(FORMAT_FILE) is not None:
            with Store(self._root, read_only=True).using():
                yield
        else:
            yield

    def create(self) -> None:
        """Makes a store at the URL if there is nothing yet. InvalidInput if something else is there."""
        if self.size(FORMAT_FILE) is None:
            if self.list(""):
                raise InvalidInput(f"{self.url} is neither a store ({FORMAT_FILE} is missing) nor empty")
            if isinstance(self._files, LocalFileSystem):
                Store(self._root)
            else:
                self.write(FORMAT_FILE, FORMAT)
        self.require()

    def require(self) -> None:
        """InvalidInput if there is no store at the URL, Missing if there is one without its first file, UnknownVersion
        or Corrupt if it is not one of this format."""
        if self.size(FORMAT_FILE) is None and "objects" not in self.list(""):
            raise InvalidInput(
                f"{self.url} is not a store, {FORMAT_FILE} is missing there: `reproduce push {self.url}` makes one"
            )
        found = self.read(FORMAT_FILE, 64, "store format")
        if found != FORMAT:
            kind = UnknownVersion if found.startswith(b"samebits store ") else Corrupt
            raise kind(f"store {self.url} has format {found!r}, this program reads {FORMAT!r}")

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is none."""
        found = self._attempt(lambda: self._files.info(self._path(path)), absent=None)
        return None if found is None else int(found["size"])

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty if there is no such folder."""
        found = self._attempt(lambda: self._files.ls(self._path(folder), detail=False), absent=[])
        return sorted({str(name).rstrip("/").rpartition("/")[2] for name in found} - {""})

    def read(self, path: str, limit: int, what: str) -> bytes:
        """The bytes of a file of at most `limit` bytes. Missing or Corrupt, naming `what`."""
        size = self.size(path)
        if size is None:
            raise Missing(f"{what}: no file {path} at {self.url}")
        if size > limit:
            raise Corrupt(f"{what}: {path} at {self.url} has {size} bytes, at most {limit} are allowed")
        # Asked for as a range, so that no more comes, whatever is there now; some refuse an empty one.
        return bytes(self._attempt(lambda: self._files.cat_file(self._path(path), start=0, end=size))) if size else b""

    def write(self, path: str, data: bytes) -> None:
        """Writes a small file, replacing what was there."""
        self._attempt(lambda: self._files.pipe_file(self._path(path), data))

    def send(self, source: Path, path: str) -> None:
        """Copies a file of this machine there, replacing what was there."""
        self._attempt(lambda: self._files.put_file(str(source), self._path(path)))

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def _attempt(self, action: Callable[[], Any], absent: Any = _FAILS) -> Any:
        """What `action` returns; `absent`, if given, where there is no such file or folder."""
        try:
            return action()
        except Exception as error:  # every protocol's library raises its own
            if isinstance(error, FileNotFoundError) and absent is not _FAILS:
                return absent
            raise RemoteFailed(
                f"{self.url}: {type(error).__name__}: {error}\nWhat was moved before stays: the same command goes on"
            ) from error
