"""The content-addressed object store. Its layout and guarantees are in docs/format.md.

Order of a write: temporary file in the same filesystem, fsync, atomic rename, fsync of the folder;
an object is written before whatever names it. So a crash leaves the old state or the new one, and
at worst temporary files and objects that nothing names yet, which `gc` removes.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts import durable, encoding, filesystem
from artifacts.errors import Corrupt, InvalidInput, Missing, NoSpace, ReadOnly, UnknownVersion
from artifacts.gate import Gate
from artifacts.hashing import hash_bytes, is_hash, require_hash

FORMAT_FILE = "STORE_FORMAT"
FORMAT = b"samebits store 1\n"

_FORMAT_PREFIX = b"samebits store "
_FOLDERS = ("attestations", "index", "locks", "objects", "runs", "tmp")
_OBJECT_MODE = 0o444

log = logging.getLogger(__name__)


class Scratch:
    """Memory that a thread uses again and again, for content that is looked at and not kept."""

    def __init__(self) -> None:
        self._own = threading.local()

    def get(self, size: int) -> memoryview:
        """`size` bytes, undefined; good until this thread asks again."""
        if size > len(getattr(self._own, "memory", b"")):
            self._own.memory = bytearray(size)
        return memoryview(self._own.memory)[:size] if size else memoryview(b"")


class Store:
    """A store in the folder `path`, made there if the folder is missing or empty (unless
    `read_only`).

    Any number of processes and threads may use one store at once. `level` is the zstd level of what
    is written from here on; it changes no hash. Errors: InvalidInput if `path` is something else
    than a store, UnknownVersion, Missing (read-only and not there).
    """

    def __init__(self, path: str | Path, read_only: bool = False, level: int = encoding.DEFAULT_LEVEL) -> None:
        self.path = Path(path).absolute()
        self.read_only = read_only
        self.level = level
        self._checked: set[str] = set()
        self._scratch_file = Scratch()
        self._scratch_content = Scratch()
        self._gate = Gate(self.path / "locks" / "store", read_only)
        if not filesystem.exists(self.path / FORMAT_FILE):
            self._create()
        self._check_format()

    # Objects

    def put(self, content: bytes | memoryview, width: int = 1) -> str:
        """Stores `content` durably and returns its hash. `width`: see `encoding.encode`."""
        with self.using():
            name = self.write_object(content, width)
            self.sync_objects([name])
        return name

    def get(self, name: str, limit: int = encoding.MAX_CONTENT) -> bytes:
        """The content of object `name`, verified; Missing, or Corrupt, also if longer than `limit`
        bytes."""
        return bytes(self.view(name, limit))

    def view(self, name: str, limit: int = encoding.MAX_CONTENT) -> memoryview:
        """`get` without a copy."""
        path = self.object_path(name)
        what = f"object {name}"
        file = durable.read_whole(path, encoding.HEADER_SIZE + limit, what)
        content = encoding.decode(file, limit, what)
        self._check_hash(name, hash_bytes(content))
        return content

    def read_into(self, name: str, target: memoryview) -> None:
        """Reads object `name` into `target`, which it has to fill; otherwise as `get`.

        After an error the bytes of `target` are undefined.
        """
        what = f"object {name}"
        encoding.decode_into(self._read_scratch(name, len(target), what), target, what)
        self._check_hash(name, hash_bytes(target))

    def check(self, name: str) -> None:
        """`get` without the content: Missing or Corrupt unless object `name` is there and whole."""
        what = f"object {name}"
        file = self._read_scratch(name, encoding.MAX_CONTENT, what)
        content = encoding.decode(file, encoding.MAX_CONTENT, what, self._scratch_content.get)
        self._check_hash(name, hash_bytes(content))

    def has(self, name: str) -> bool:
        """Whether a file of object `name` is there; its content is only checked by `get`."""
        return filesystem.exists(self.object_path(name))

    def write_object(self, content: bytes | memoryview, width: int = 1) -> str:
        """`put` without the last step: the object is durable after `sync_objects` has seen its
        name.

        An object that is there already is verified once and not written again; a damaged one is
        replaced.
        """
        with self.writing() as writer:
            return writer.write_object(content, width)

    @contextmanager
    def writing(self) -> Iterator["ObjectWriter"]:
        """For `write_object` of many, by any number of threads: they are in their places when the block has ended."""
        self.require_writable()
        with durable.FileBatch(self.path / "tmp") as batch:
            writer = ObjectWriter(self, batch)
            yield writer
        self._checked |= writer.names

    def adopt_object(self, name: str, file: bytes, length: int) -> None:
        """`write_object` of an object file that was made elsewhere, verified first.

        Corrupt unless `file` holds the object `name`, of at most `length` bytes.
        """
        self.require_writable()
        content = encoding.decode(file, length, f"object {name}")
        self._check_hash(name, hash_bytes(content))
        if not self.holds_whole(name):
            with self.writing() as writer:
                writer.write_file(name, [file])

    def sync_objects(self, names: Iterable[str]) -> None:
        """Makes the folder entries of objects durable, also of those that another process has just
        written."""
        folders = {self.object_path(name).parent for name in names}
        self._sync_folders([*sorted(folders), self.path / "objects"])

    def objects(self) -> Iterator[str]:
        """Names of all objects, sorted. Files that are no objects are left out; see `strays`."""
        for name, _ in self._object_files():
            if name is not None:
                yield name

    def strays(self) -> Iterator[Path]:
        """What lies among the objects without a name that an object could have."""
        for name, path in self._object_files():
            if name is None:
                yield path

    def temporary_files(self) -> Iterator[Path]:
        """Files being written, or left behind by writers that died."""
        for name in filesystem.list_directory(self.path / "tmp"):
            yield self.path / "tmp" / name

    def object_path(self, name: str) -> Path:
        require_hash(name, "object name")
        return self.path / "objects" / name[:2] / name[2:]

    # Other files

    def write_file(self, target: Path, content: bytes) -> None:
        """Writes a small file below the store, durably and atomically, replacing what was there."""
        with self.using():
            self.require_writable()
            durable.make_directories(target.parent)
            durable.write_whole(target, [content], self.path / "tmp")
            between = target.parent.relative_to(self.path).parents
            self._sync_folders([target.parent, *(self.path / folder for folder in between)])

    # Use by several processes

    @contextmanager
    def using(self) -> Iterator[None]:
        """While this is held no `gc` runs. Hold it from saving objects until something names
        them."""
        with self._gate.shared():
            yield

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While this is held nobody else uses the store. For `gc`; not to be asked for within
        `using`."""
        self.require_writable()
        with self._gate.exclusive():
            yield

    @contextmanager
    def exclusive_file(self, name: str) -> Iterator[None]:
        """Serialises changes to one changeable file among processes and threads."""
        self.require_writable()
        with self.using(), Gate(self.path / "locks" / name, read_only=False).exclusive():
            yield

    def require_writable(self) -> None:
        if self.read_only:
            raise ReadOnly(f"store {self.path} is open read-only")
        if self._gate.without_lock:
            raise ReadOnly(f"cannot write {self.path}: its lock {self.path / 'locks' / 'store'} cannot be opened")

    def require_space(self, needed: int) -> None:
        """NoSpace if fewer than `needed` bytes are free where the store lies."""
        available = durable.free_bytes(self.path)
        if available < needed:
            raise NoSpace(
                f"store {self.path}: {needed} bytes needed, {available} available: "
                "make room (`reproduce gc` removes what no record or run reaches) and try again"
            )

    def forget_checked(self) -> None:
        """Verifies objects again before their next reuse."""
        self._checked.clear()

    # Inside

    def _read_scratch(self, name: str, limit: int, what: str) -> memoryview:
        """The file of object `name`, good until this thread reads another one so."""
        path = self.object_path(name)
        return durable.read_whole_into(path, encoding.HEADER_SIZE + limit, what, self._scratch_file.get)

    def _check_hash(self, name: str, found: str) -> None:
        if found != name:
            path = self.object_path(name)
            raise Corrupt(f"object {name}: content has hash {found} ({path})")

    def _sync_folders(self, folders: Iterable[Path]) -> None:
        # Folders that were there already are synced too: the process that made them may not have
        # come to it yet.
        for folder in folders:
            with durable.write_errors(folder):
                filesystem.sync_directory(folder)

    def holds_whole(self, name: str) -> bool:
        """Whether object `name` is there and its content matches; read at most once."""
        if not self.has(name):
            return False
        if name in self._checked:
            return True
        try:
            self.check(name)
        except Corrupt as error:
            log.warning("a damaged object is written anew: %s", error)
            return False
        self._checked.add(name)
        return True

    def _object_files(self) -> Iterator[tuple[str | None, Path]]:
        root = self.path / "objects"
        for shard in filesystem.list_directory(root):
            if not filesystem.is_directory(root / shard):
                yield None, root / shard
                continue
            for rest in filesystem.list_directory(root / shard):
                name = shard + rest
                fits = len(shard) == 2 and is_hash(name)
                yield (name if fits else None), root / shard / rest

    def _create(self) -> None:
        if self.read_only:
            raise Missing(f"no store at {self.path}: {FORMAT_FILE} is missing")
        self._require_empty()
        with self.using():
            for folder in _FOLDERS:
                durable.make_directories(self.path / folder)
            # The format file comes last: a folder without it is not a store yet.
            durable.write_whole(self.path / FORMAT_FILE, [FORMAT], self.path / "tmp")
            self._sync_folders([self.path])

    def _require_empty(self) -> None:
        """A store is not made in a folder with other content; what a crash during creation left is
        no such content."""
        for entry in filesystem.list_directory(self.path):
            if entry in ("locks", "tmp"):
                continue
            if entry in _FOLDERS and not filesystem.list_directory(self.path / entry):
                continue
            if not filesystem.exists(self.path / FORMAT_FILE):  # else another process was faster
                raise InvalidInput(f"{self.path} is neither a store ({FORMAT_FILE} is missing) nor empty ({entry})")

    def _check_format(self) -> None:
        found = durable.read_whole(self.path / FORMAT_FILE, 64, "store format")
        if found == FORMAT:
            return
        if found.startswith(_FORMAT_PREFIX):
            raise UnknownVersion(f"store {self.path} has format {found!r}, this program reads {FORMAT!r}")
        raise Corrupt(f"store {self.path}: {FORMAT_FILE} should be {FORMAT!r}, is {found!r}")


class ObjectWriter:
    """Writes objects to `store` as parts of one batch; `Store.writing` makes it. `names` are those it has been given,
    all whole and in place when the batch has ended without an error."""

    def __init__(self, store: Store, batch: durable.FileBatch) -> None:
        self.names: set[str] = set()
        self._store = store
        self._batch = batch
        self._lock = threading.Lock()

    def write_object(self, content: bytes | memoryview, width: int = 1) -> str:
        """`Store.write_object`, but the object may be in its place only when the batch has ended."""
        view = memoryview(content).cast("B")
        if len(view) > encoding.MAX_CONTENT:
            raise InvalidInput(f"an object of {len(view)} bytes, at most {encoding.MAX_CONTENT}")
        name = hash_bytes(view)
        if self._is_new(name) and not self._store.holds_whole(name):
            try:
                self.write_file(name, encoding.encode(view, width, self._store.level))
            except BaseException:
                self.names.discard(name)
                raise
        return name

    def write_file(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Object `name` with the file that `parts` make."""
        self.names.add(name)
        path = self._store.object_path(name)
        # Not synced here: `sync_objects` does that once for all objects of a bundle.
        durable.make_directory(path.parent)
        self._batch.write(path, parts, _OBJECT_MODE)

    def _is_new(self, name: str) -> bool:
        """Of equal contents in a batch only one is looked for and written."""
        with self._lock:
            new = name not in self.names
            self.names.add(name)
        return new
