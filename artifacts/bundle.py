"""Bundles: named tensors and a JSON state under one hash.

The bundle's hash is that of its manifest, canonical JSON that names every tensor, its dtype and
shape, and the hashes of its chunks. A bundle holds what training needs to go on and nothing else:
no time, path or machine.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from artifacts.canonical import JSON
from artifacts.errors import Corrupt, InvalidInput, NoSpace
from artifacts.manifest import (
    CHUNK_SIZE,
    Manifest,
    TensorEntry,
    check_name,
    read_manifest,
    write_manifest,
)
from artifacts.store import Store

Array = NDArray[Any]
_T = TypeVar("_T")

# Of a tensor's bytes in memory: a line of the processor's cache.
_ALIGNMENT = 64

# What one object costs on disk beside its content: header and the rest of its last block.
_OBJECT_OVERHEAD = 4096


@dataclass(frozen=True)
class Bundle:
    """`tensors` by name (C-contiguous, little-endian) and the JSON object `state`."""

    tensors: dict[str, Array]
    state: Mapping[str, JSON]


@dataclass(frozen=True)
class _Chunk:
    """Chunk `number` of tensor `entry`, whose bytes are `content`."""

    tensor: str
    number: int
    width: int
    content: memoryview


def save_bundle(
    store: Store,
    tensors: Mapping[str, Array],
    state: Mapping[str, JSON],
    threads: int | None = None,
) -> str:
    """Saves a bundle durably and returns its hash.

    Hold `store.using()` around this call and whatever records the hash, or `gc` may come in
    between. Errors: InvalidInput (name, dtype, state), NoSpace before anything is written if the
    raw tensors would not fit.
    """
    flat = {check_name(name): flat_bytes(name, tensor) for name, tensor in tensors.items()}
    store.require_writable()
    count = sum(1 + len(content) // CHUNK_SIZE for content in flat.values())
    store.require_space(sum(map(len, flat.values())) + count * _OBJECT_OVERHEAD)
    with store.using():
        chunks = [
            _Chunk(name, number, tensors[name].dtype.itemsize, content)
            for name in sorted(flat)
            for number, content in enumerate(split(flat[name]))
        ]
        with store.writing() as writer:
            hashes = parallel(lambda chunk: writer.write_object(chunk.content, chunk.width), chunks, threads)
        by_tensor: dict[str, list[str]] = {name: [] for name in flat}
        for chunk, name in zip(chunks, hashes, strict=True):
            by_tensor[chunk.tensor].append(name)
        entries = [
            TensorEntry(name, tensors[name].dtype.name, tensors[name].shape, tuple(by_tensor[name]))
            for name in sorted(flat)
        ]
        # The manifest names the chunks, so it comes after they are durable.
        store.sync_objects(hashes)
        return store.put(write_manifest(Manifest(tuple(entries), state)))


def load_manifest(store: Store, name: str) -> Manifest:
    """The manifest of bundle `name`, verified; its chunks are not looked at."""
    return read_manifest(store.view(name), f"bundle {name}")


def load_bundle(store: Store, name: str, into: Mapping[str, Array] | None = None) -> Bundle:
    """The bundle `name`, every byte verified.

    Tensors named in `into` are read into those arrays (same dtype and shape, C-contiguous,
    writable) and the others into new ones; a name in `into` that the bundle lacks is an error.
    After an error the content of `into` is undefined. Errors: Missing and Corrupt naming object and
    tensor, NoSpace if memory would not hold the tensors.
    """
    with store.using():
        manifest = load_manifest(store, name)
        tensors = allocate(manifest, into or {}, f"bundle {name}")
        parallel(
            lambda chunk: load_chunk(store, name, manifest.tensor(chunk.tensor), chunk.number, chunk.content),
            _targets(tensors),
        )
    return Bundle(tensors, manifest.state)


def verify_bundle(store: Store, name: str) -> Manifest:
    """Reads and verifies every byte of bundle `name` without keeping them. Missing or Corrupt as
    `load_bundle`."""
    with store.using():
        manifest = load_manifest(store, name)
        tasks = [(entry, number) for entry in manifest.tensors for number in range(len(entry.chunks))]
        parallel(lambda task: read_chunk(store, name, *task), tasks)
    return manifest


def read_chunk(store: Store, bundle: str, entry: TensorEntry, number: int) -> memoryview:
    """The verified bytes of one chunk. Missing or Corrupt, naming bundle, tensor, chunk and
    object."""
    content = memoryview(bytearray(entry.chunk_length(number)))
    load_chunk(store, bundle, entry, number, content)
    return content


def load_chunk(store: Store, bundle: str, entry: TensorEntry, number: int, target: memoryview) -> None:
    """`read_chunk` into `target`, which has to have the chunk's length."""
    try:
        store.read_into(entry.chunks[number], target)
    except Corrupt as error:
        raise type(error)(f"bundle {bundle}: tensor {entry.name}, chunk {number}: {error}") from error


def flat_bytes(name: str, tensor: Array) -> memoryview:
    """The canonical bytes of a tensor: C order, little-endian. A view where the tensor already lies
    so."""
    if tensor.dtype.name not in TensorEntry.ITEM_SIZES:
        raise InvalidInput(f"tensor {name}: dtype {tensor.dtype} is not one of {', '.join(TensorEntry.ITEM_SIZES)}")
    little = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def split(content: memoryview) -> Iterable[memoryview]:
    """The chunks of a tensor's bytes: none if there are no bytes, otherwise all but the last of
    CHUNK_SIZE."""
    return (content[at : at + CHUNK_SIZE] for at in range(0, len(content), CHUNK_SIZE))


def allocate(manifest: Manifest, into: Mapping[str, Array], what: str) -> dict[str, Array]:
    """An array for every tensor of `manifest`, those of `into` first. InvalidInput where they do
    not fit."""
    missing = sorted(set(into) - {entry.name for entry in manifest.tensors})
    if missing:
        raise InvalidInput(f"{what} has no tensor {', '.join(missing)}")
    needed = sum(entry.nbytes for entry in manifest.tensors if entry.name not in into)
    available = psutil.virtual_memory().available
    if needed > available:
        raise NoSpace(f"{what}: needs {needed} bytes of memory, {available} are available")
    memory = _pieces([entry.nbytes for entry in manifest.tensors if entry.name not in into])
    tensors = {}
    for entry in manifest.tensors:
        dtype = np.dtype(entry.dtype).newbyteorder("<")
        given = into.get(entry.name)
        if given is None:
            tensors[entry.name] = next(memory).view(dtype).reshape(entry.shape)
            continue
        if given.dtype != dtype or given.shape != entry.shape:
            raise InvalidInput(
                f"{what}: tensor {entry.name} is {entry.dtype}{list(entry.shape)}, "
                f"the array given for it is {given.dtype}{list(given.shape)}"
            )
        if not (given.flags.c_contiguous and given.flags.writeable):
            raise InvalidInput(f"array for tensor {entry.name} is not C-contiguous and writable")
        tensors[entry.name] = given
    return tensors


def _pieces(sizes: list[int]) -> Iterator[NDArray[np.uint8]]:
    """Arrays of so many bytes, one after the other in one piece of memory: the system hands that out in few large
    pages, which takes a third of the time of many small ones."""
    memory = np.empty(sum(sizes) + len(sizes) * _ALIGNMENT, np.uint8)
    at = 0
    for size in sizes:
        at += -(memory.ctypes.data + at) % _ALIGNMENT
        yield memory[at : at + size]
        at += size


def parallel(task: Callable[[Any], _T], items: Iterable[Any], threads: int | None = None) -> list[_T]:
    """`task` of every item, in order; the first error ends it and is raised.

    Hashing, compressing and reading release the interpreter's lock, so threads are enough. Unless
    `threads` says how many, there are three more than cores, to keep these busy while threads wait for
    the disk.
    """
    with ThreadPoolExecutor(threads or (os.cpu_count() or 1) + 3) as pool:
        futures: list[Future[_T]] = [pool.submit(task, item) for item in items]
        try:
            _, pending = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # somebody lost patience: nothing new is begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for future in pending:
            future.cancel()
        # A cancelled task has no result, but then an earlier or later one has an error: that one is
        # raised.
        for future in futures:
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]


def _targets(tensors: Mapping[str, Array]) -> list[_Chunk]:
    chunks = []
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1).view(np.uint8).data
        chunks += [_Chunk(name, number, tensor.dtype.itemsize, part) for number, part in enumerate(split(flat))]
    return chunks
