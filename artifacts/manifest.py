"""The manifest of a bundle: what it means, checked, and its canonical bytes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from artifacts import canonical
from artifacts.canonical import JSON
from artifacts.document import make_document, open_document
from artifacts.errors import Corrupt, InvalidInput
from artifacts.hashing import is_hash

CHUNK_SIZE = 4 * 2**20
"""Bytes of every chunk of a tensor but the last; part of format version 1, so equal tensors have
equal chunks."""

_FORMAT = "samebits bundle"
_TENSOR_FIELDS = {"chunks", "dtype", "name", "shape"}
_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", re.ASCII)
_MAX_NAME = 200
_MAX_DIMENSIONS = 16
_MAX_BYTES = 2**53


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `chunks` are the hashes of its consecutive chunks."""

    ITEM_SIZES: ClassVar[dict[str, int]] = {
        "float32": 4,
        "float64": 8,
        "int32": 4,
        "int64": 8,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
    }

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[str, ...]

    @cached_property
    def nbytes(self) -> int:
        return self.ITEM_SIZES[self.dtype] * math.prod(self.shape)

    def chunk_length(self, number: int) -> int:
        """Bytes of chunk `number`."""
        return min(CHUNK_SIZE, self.nbytes - number * CHUNK_SIZE)


@dataclass(frozen=True)
class Manifest:
    """`tensors` sorted by name; `state` is a JSON object."""

    tensors: tuple[TensorEntry, ...]
    state: Mapping[str, JSON]

    @cached_property
    def _by_name(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.tensors}

    def tensor(self, name: str) -> TensorEntry:
        return self._by_name[name]


def check_name(name: str) -> str:
    """`name` itself; InvalidInput if a tensor may not be called so."""
    if not _is_name(name):
        raise InvalidInput(
            f"tensor name {name!r}: expected at most {_MAX_NAME} of A-Z a-z 0-9 _ . - in parts joined by /"
        )
    return name


def write_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest. InvalidInput if it could not be read again."""
    tensors: list[JSON] = [
        {
            "chunks": entry.chunks,
            "dtype": entry.dtype,
            "name": entry.name,
            "shape": entry.shape,
        }
        for entry in manifest.tensors
    ]
    data = canonical.dumps(make_document(_FORMAT, {"state": manifest.state, "tensors": tensors}))
    try:
        read_manifest(data, "manifest")
    except Corrupt as error:
        raise InvalidInput(f"bundle cannot be saved: {error}") from error
    return data


def read_manifest(data: bytes | memoryview, what: str) -> Manifest:
    """The manifest whose canonical bytes are `data`. Corrupt, naming `what`, unless everything in
    it fits together."""
    value = open_document(canonical.loads(bytes(data), what), _FORMAT, {"state", "tensors"}, what)
    state, tensors = value["state"], value["tensors"]
    if not isinstance(state, dict) or not isinstance(tensors, list):
        raise Corrupt(f"{what}: state has to be an object and tensors a list")
    entries = tuple(_read_tensor(tensor, what) for tensor in tensors)
    names = [entry.name for entry in entries]
    if any(a >= b for a, b in pairwise(names)):
        raise Corrupt(f"{what}: tensors are not sorted by name, each once")
    return Manifest(entries, state)


def _read_tensor(value: JSON, what: str) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != _TENSOR_FIELDS:
        raise Corrupt(f"{what}: a tensor has to have the fields {sorted(_TENSOR_FIELDS)}")
    name, dtype, shape, chunks = (value[field] for field in ("name", "dtype", "shape", "chunks"))
    if not isinstance(name, str) or not _is_name(name):
        raise Corrupt(f"{what}: tensor name {name!r} is not allowed")
    if not isinstance(dtype, str) or dtype not in TensorEntry.ITEM_SIZES:
        raise Corrupt(f"{what}: tensor {name}: unknown dtype {dtype!r}")
    if not isinstance(chunks, list) or not all(is_hash(chunk) for chunk in chunks):
        raise Corrupt(f"{what}: tensor {name}: chunks have to be a list of hashes")
    entry = TensorEntry(name, dtype, _read_shape(shape, f"{what}: tensor {name}"), tuple(chunks))
    expected = -(-entry.nbytes // CHUNK_SIZE)
    if len(entry.chunks) != expected:
        raise Corrupt(
            f"{what}: tensor {name}: {dtype}{list(entry.shape)} takes {expected} chunks, {len(entry.chunks)} are listed"
        )
    return entry


def _read_shape(value: JSON, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise Corrupt(f"{what}: shape has to be a list of at most {_MAX_DIMENSIONS} numbers")
    shape = []
    for size in value:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise Corrupt(f"{what}: shape {value} has a size that is not a natural number")
        shape.append(size)
    # Also for tensors without elements: their other sizes must be such that an array can be made.
    if math.prod(max(size, 1) for size in shape) * 8 > _MAX_BYTES:
        raise Corrupt(f"{what}: shape {value} is too large")
    return tuple(shape)


def _is_name(name: str) -> bool:
    return len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None
