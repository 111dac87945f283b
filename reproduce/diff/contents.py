"""Where two runs of the tier debug part, without a replay: they hold the hash of every tensor after every step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Contents:
    """BLAKE3 of each of the named tensors after each step: [steps, names, 32]."""

    names: list[str]
    hashes: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> "Contents | None":
        """From the state of a bundle; None if its tier keeps none."""
        if "history/tensors" not in tensors:
            return None
        return cls(sorted(name for name in tensors if not name.startswith("history/")), tensors["history/tensors"])

    def after(self, step: int) -> dict[str, str]:
        """The hash (hex) of each tensor after a step, which counts from 1."""
        rows = self.hashes[step - 1]
        return {name: bytes(row).hex() for name, row in zip(self.names, rows, strict=True)}


def compare_contents(a: Contents, b: Contents, step: int) -> list[dict[str, Any]]:
    """One entry for each tensor that has another content after that step, in the order of their names, with both
    hashes, or None for one that is not there."""
    there, here = a.after(step), b.after(step)
    return [
        {"tensor": name, "blake3": [there.get(name), here.get(name)]}
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]
