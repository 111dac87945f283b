"""A bundle as a folder of plain files, the same bytes on every machine: what DVC tracks, pushes and
pulls.

    manifest.json      the manifest of the bundle; its BLAKE3 is the bundle's hash
    tensors/00000.bin  the bytes of the first tensor of the manifest, and so on
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from artifacts import canonical, durable, filesystem
from artifacts.bundle import (
    Bundle,
    allocate,
    load_manifest,
    parallel,
    read_chunk,
    save_bundle,
    split,
)
from artifacts.errors import Corrupt, InvalidInput, Missing, NoSpace
from artifacts.hashing import hash_bytes
from artifacts.manifest import Manifest, TensorEntry, read_manifest
from artifacts.store import Store

_MANIFEST = "manifest.json"
_TENSORS = "tensors"


def write_folder(store: Store, name: str, directory: str | Path) -> None:
    """Writes bundle `name` as the folder `directory`, which must be missing or empty.

    The manifest is written last: a folder without it is not whole. Errors: Missing and Corrupt as
    `load_bundle`, InvalidInput, NoSpace.
    """
    directory = Path(directory).absolute()
    if filesystem.exists(directory) and filesystem.list_directory(directory):
        raise InvalidInput(f"{directory} is not empty: remove it or name another folder")
    with store.using():
        manifest = load_manifest(store, name)
        needed = sum(entry.nbytes for entry in manifest.tensors)
        available = durable.free_bytes(directory)
        if available < needed:
            raise NoSpace(f"{directory}: {needed} bytes needed, {available} available: make room")
        durable.make_directories(directory / _TENSORS)
        for number, entry in enumerate(manifest.tensors):
            parts = (read_chunk(store, name, entry, chunk) for chunk in range(len(entry.chunks)))
            durable.write_whole(_tensor_path(directory, number), parts, directory)
        with durable.write_errors(directory):
            filesystem.sync_directory(directory / _TENSORS)
            durable.write_whole(directory / _MANIFEST, [store.view(name)], directory)
            filesystem.sync_directory(directory)


def folder_hash(directory: str | Path) -> str:
    """The hash of the bundle that the folder says it holds; `read_folder` checks that it does."""
    return hash_bytes(_manifest_bytes(Path(directory)))


def read_folder(directory: str | Path, expected: str | None = None) -> Bundle:
    """The bundle in a folder, every byte verified against its manifest.

    Only with `expected`, the hash of a bundle, is the manifest itself known to be the right one.
    Missing or Corrupt, naming file and tensor; NoSpace if memory would not hold the tensors.
    """
    directory = Path(directory)
    what = f"bundle folder {directory}"
    data = _manifest_bytes(directory)
    if expected is not None and hash_bytes(data) != expected:
        raise Corrupt(f"{what}: expected bundle {expected}, found {hash_bytes(data)}")
    manifest = read_manifest(data, what)
    _check_entries(directory, manifest)
    tensors = allocate(manifest, {}, what)
    numbered = list(enumerate(manifest.tensors))
    parallel(
        lambda item: _read_tensor(
            _tensor_path(directory, item[0]),
            item[1],
            tensors[item[1].name].reshape(-1).view(np.uint8).data,
        ),
        numbered,
    )
    return Bundle(tensors, manifest.state)


def import_folder(store: Store, directory: str | Path) -> str:
    """Saves the bundle in a folder into `store` and returns its hash, the one it had when it was
    written."""
    bundle = read_folder(directory)
    saved = save_bundle(store, bundle.tensors, bundle.state)
    if saved != folder_hash(directory):
        raise Corrupt(f"bundle folder {directory} changed while it was read")
    return saved


def _manifest_bytes(directory: Path) -> bytes:
    return durable.read_whole(directory / _MANIFEST, canonical.MAX_BYTES, f"bundle folder {directory}")


def _tensor_path(directory: Path, number: int) -> Path:
    return directory / _TENSORS / f"{number:05}.bin"


def _check_entries(directory: Path, manifest: Manifest) -> None:
    """A file that the manifest does not account for is an error: it may be what the reader was
    meant to see."""
    expected = {_tensor_path(directory, number).name for number in range(len(manifest.tensors))}
    found = set(filesystem.list_directory(directory / _TENSORS))
    if found - expected:
        raise Corrupt(f"bundle folder {directory}: unknown files {sorted(found - expected)}")
    if expected - found:
        raise Missing(f"bundle folder {directory}: no files {sorted(expected - found)}")
    unknown = set(filesystem.list_directory(directory)) - {_MANIFEST, _TENSORS}
    if unknown:
        raise Corrupt(f"bundle folder {directory}: unknown files {sorted(unknown)}")


def _read_tensor(path: Path, entry: TensorEntry, target: memoryview) -> None:
    what = f"{path}: tensor {entry.name}"
    with _open(path, what) as descriptor:
        size = filesystem.size_of(descriptor)
        if size != entry.nbytes:
            raise Corrupt(f"{what}: expected {entry.nbytes} bytes, found {size}")
        for number, part in enumerate(split(target)):
            _fill(descriptor, part, what)
            if hash_bytes(part) != entry.chunks[number]:
                raise Corrupt(f"{what}: chunk {number} is not the one in the manifest")


@contextmanager
def _open(path: Path, what: str) -> Iterator[int]:
    try:
        descriptor = filesystem.open_read(path)
    except OSError as error:
        raise Missing(f"{what}: cannot open: {error.strerror}") from error
    try:
        yield descriptor
    except OSError as error:
        raise Corrupt(f"{what}: cannot read: {error.strerror}") from error
    finally:
        filesystem.close(descriptor)


def _fill(descriptor: int, target: memoryview, what: str) -> None:
    at = 0
    while at < len(target):
        part = filesystem.read(descriptor, len(target) - at)
        if not part:
            raise Corrupt(f"{what}: the file ends early")
        target[at : at + len(part)] = part
        at += len(part)
