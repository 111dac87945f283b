"""ANDREA checkpoints: a step, a number of parameters, and weights and Adam's moments as three flat arrays.

    int32 step | int32 n | float32 weights[n] | float32 m[n] | float32 v[n]        all little-endian

The file has no names: parameters lie one after the other in an order that both sides know, here the layout.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts import durable, filesystem
from artifacts.bundle import Array, flat_bytes
from artifacts.errors import Corrupt, InvalidInput, Missing

LACKS = (
    "names and shapes of the parameters (taken from the configuration given here)",
    "loss and digest of every step",
    "seed, and where data and random numbers go on",
    "hashes of configuration, specification, dataset and tokenizer, and the tier",
)
"""What a bundle has and such a file has not."""

Layout = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of the parameters in the order of the file."""

_HEAD = struct.Struct("<ii")
_KINDS = ("weights", "m", "v")
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class AndreaCheckpoint:
    """`tensors` by name as in a bundle: `weights/<parameter>`, `m/<parameter>`, `v/<parameter>`, all fp32."""

    step: int
    tensors: dict[str, Array]


def write_andrea(path: str | Path, step: int, tensors: Mapping[str, Array], layout: Layout) -> None:
    """Writes the new file `path`, whole or not at all; other tensors than those of the layout are left out.

    InvalidInput if the file is there already or tensors are missing or of another shape; NoSpace, ReadOnly.
    """
    path = Path(path).absolute()
    count = _count(layout)
    if not 0 <= step <= _LARGEST or not 0 < count <= _LARGEST:
        raise InvalidInput(f"{path}: an ANDREA checkpoint cannot hold step {step} of {count} parameters")
    if filesystem.exists(path):
        raise InvalidInput(f"{path} is there already: remove it or name another file")
    arrays = [_take(tensors, f"{kind}/{name}", shape) for kind in _KINDS for name, shape in layout]

    def parts() -> Iterator[bytes | memoryview]:
        yield _HEAD.pack(step, count)
        for array in arrays:
            yield flat_bytes("tensor", array)

    durable.write_whole(path, parts(), path.parent)
    with durable.write_errors(path.parent):
        filesystem.sync_directory(path.parent)


def read_andrea(path: str | Path, layout: Layout) -> AndreaCheckpoint:
    """Reads a checkpoint; `LACKS` says what it cannot tell.

    Missing; Corrupt if its length is not what its head says, a number is not finite or a second moment negative;
    InvalidInput if it has another number of parameters than the layout.
    """
    path = Path(path)
    what = f"ANDREA checkpoint {path}"
    try:
        file = path.open("rb")
    except OSError as error:
        raise Missing(f"{what}: cannot open: {error.strerror}") from error
    with file:
        head = file.read(_HEAD.size)
        if len(head) != _HEAD.size:
            raise Corrupt(f"{what}: {len(head)} bytes, shorter than its head")
        step, count = _HEAD.unpack(head)
        size = filesystem.size_of(file.fileno())
        expected = _HEAD.size + 4 * len(_KINDS) * count
        if step < 0 or count <= 0 or size != expected:
            raise Corrupt(f"{what}: step {step} and {count} parameters make {expected} bytes, it has {size}")
        if count != _count(layout):
            raise InvalidInput(f"{what}: has {count} parameters, the configuration has {_count(layout)}")
        tensors: dict[str, Array] = {}
        for kind in _KINDS:
            for name, shape in layout:
                flat = np.fromfile(file, "<f4", math.prod(shape))
                _check(flat, f"{what}: {kind}/{name}", may_be_negative=kind != "v")
                tensors[f"{kind}/{name}"] = flat.reshape(shape)
    return AndreaCheckpoint(step, tensors)


def _count(layout: Layout) -> int:
    return sum(math.prod(shape) for _, shape in layout)


def _take(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = tensors.get(name)
    if array is None or array.dtype != np.float32 or array.shape != shape:
        found = "none" if array is None else f"{array.dtype}{list(array.shape)}"
        raise InvalidInput(f"tensor {name}: expected float32{list(shape)}, found {found}")
    return array


def _check(flat: Array, what: str, may_be_negative: bool) -> None:
    bad = ~np.isfinite(flat)
    if not may_be_negative:
        bad |= flat < 0
    if bad.any():
        place = int(np.argmax(bad))
        raise Corrupt(f"{what}: number {place} is {flat[place]}")
