"""Hashes of states that are not saved, and where two states differ."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from artifacts import hash_bytes
from artifacts.bundle import flat_bytes, split
from artifacts.canonical import JSON
from artifacts.manifest import Manifest, TensorEntry, write_manifest
from engine.digest import content_digest, content_hashes, k_digest, k_group_digest, step_digest
from engine.trainer import STATE_ARRAYS, Trainer

Arrays = Mapping[str, npt.NDArray[Any]]


def bundle_hash(tensors: Arrays, state: Mapping[str, JSON]) -> str:
    """The hash that a bundle of these would have."""
    entries = tuple(
        TensorEntry(
            name,
            tensors[name].dtype.name,
            tensors[name].shape,
            tuple(hash_bytes(chunk) for chunk in split(flat_bytes(name, tensors[name]))),
        )
        for name in sorted(tensors)
    )
    return hash_bytes(write_manifest(Manifest(entries, state)))


def state_digest(trainer: Trainer, state: Arrays) -> bytes:
    """The step digest of a whole state, from its tensors; the state is of one step at least."""
    losses = state["history/loss"]
    if trainer.contents is not None:
        tensors = {name: array for name, array in state.items() if not name.startswith("history/")}
        return content_digest(len(losses), losses[-1], content_hashes(tensors, 1))
    parameters = trainer.program.parameters
    add_up = k_group_digest if trainer.train.precision else k_digest
    sums = np.zeros((len(parameters), len(STATE_ARRAYS), 2), np.uint64)
    for number, parameter in enumerate(parameters):
        for kind, array in enumerate(STATE_ARRAYS):
            add_up(np.ascontiguousarray(state[f"{array}/{parameter.name}"]).reshape(-1), sums[number, kind])
    return step_digest(len(losses), losses[-1], sums)


def differing_tensors(expected: Arrays, found: Arrays) -> list[dict[str, Any]]:
    """For every tensor that is not the same bit for bit: its name, how many elements differ, the first of them."""
    result: list[dict[str, Any]] = []
    for name in sorted({*expected, *found}):
        a, b = expected.get(name), found.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            result.append({"tensor": name, "difference": "shape, type or presence"})
            continue
        unequal = np.flatnonzero(_bits(a) != _bits(b))
        if len(unequal):
            at = int(unequal[0])
            result.append(
                {
                    "tensor": name,
                    "elements": len(unequal),
                    "index": [int(i) for i in np.unravel_index(at, a.shape)],
                    "expected": _value(a.reshape(-1)[at]),
                    "found": _value(b.reshape(-1)[at]),
                }
            )
    return result


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype(f"u{flat.dtype.itemsize}"))


def _value(element: Any) -> str:
    """As text: canonical JSON has no NaN, and fp32 in its shortest form."""
    return str(element)
