"""Sums over tokens: blocks of kernels leave parts, and one launch at the end of the backward half adds them all."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COLUMNS = 128  # that a block of k_combine takes
SUMMED = np.dtype(
    [("parts", "<i8"), ("out", "<i8"), ("blocks", "<i4"), ("stride", "<i4"), ("columns", "<i4"), ("unused", "<i4")]
)


@dataclass(frozen=True)
class Parts:
    """What one operation leaves: fp32 [shards, blocks, kinds, width], `blocks` in a shard. outputs: the parameter whose
    gradient each kind is, None where nobody wants it."""

    blocks: int
    width: int
    outputs: tuple[str | None, ...]

    @property
    def line(self) -> int:
        """Elements that a block leaves."""
        return len(self.outputs) * self.width


class SumPlaces:
    """Where the parts of each operation stand, one after another in one buffer; `elements` are all of them."""

    def __init__(self, parts: Mapping[str, Parts], shards: int) -> None:
        self._parts = parts
        self.places: dict[str, int] = {}
        self.elements = 0
        for name, part in parts.items():
            self.places[name] = self.elements
            self.elements += shards * part.blocks * part.line

    @property
    def rows(self) -> int:
        """Of the table."""
        return sum(
            -(-part.width // COLUMNS) for part in self._parts.values() for output in part.outputs if output is not None
        )

    def table(self, parameters: Mapping[str, int]) -> npt.NDArray[np.void]:
        """SUMMED, what each block of k_combine adds; `parameters`: first element of each in the gradients."""
        return np.array(
            [
                (
                    self.places[name] + kind * part.width + column,
                    parameters[output] + column,
                    part.blocks,
                    part.line,
                    min(COLUMNS, part.width - column),
                    0,
                )
                for name, part in self._parts.items()
                for kind, output in enumerate(part.outputs)
                if output is not None
                for column in range(0, part.width, COLUMNS)
            ],
            SUMMED,
        )
