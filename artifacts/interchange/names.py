"""From the names and shapes of one program to those of another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts.bundle import Array
from artifacts.errors import Corrupt, InvalidInput


@dataclass(frozen=True)
class Renamed:
    """A parameter of shape `shape` that is called `ours` here and `theirs` there, where it may lie transposed."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def their_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


def to_theirs(parameters: Mapping[str, Array], names: Sequence[Renamed]) -> dict[str, Array]:
    """The same fp32 numbers under the other names. InvalidInput unless exactly the parameters named are given."""
    _require_names(set(parameters), {name.ours for name in names}, InvalidInput, "parameters")
    result = {}
    for name in names:
        array = parameters[name.ours]
        _require(array, name.ours, name.shape, InvalidInput)
        result[name.theirs] = np.ascontiguousarray(array.T if name.transposed else array)
    return result


def to_ours(tensors: Mapping[str, Array], names: Sequence[Renamed], what: str) -> dict[str, Array]:
    """The inverse of `to_theirs`. Corrupt, naming `what`, unless exactly the tensors named are given."""
    _require_names(set(tensors), {name.theirs for name in names}, Corrupt, what)
    result = {}
    for name in names:
        array = tensors[name.theirs]
        _require(array, f"{what}: {name.theirs}", name.their_shape, Corrupt)
        result[name.ours] = np.ascontiguousarray(array.T if name.transposed else array)
    return result


def _require_names(found: set[str], expected: set[str], error: type[InvalidInput | Corrupt], what: str) -> None:
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        raise error(f"{what}: missing {_some(missing)}, unknown {_some(unknown)}: it belongs to another model")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


def _require(array: Array, what: str, shape: tuple[int, ...], error: type[InvalidInput | Corrupt]) -> None:
    if array.dtype != np.float32 or array.shape != shape:
        raise error(f"{what}: expected float32{list(shape)}, found {array.dtype}{list(array.shape)}")
