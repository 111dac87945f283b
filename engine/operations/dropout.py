"""Dropout (Srivastava et al. 2014) as a function of an address: (seed, step, site, element) decides.

Element e is kept if its random word (numerics/random.py) is at least `threshold` = floor(p * 2**32); kept values are
multiplied by fp32(1 / (1 - p)). Nothing is remembered, so the backward
pass finds the same mask again.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from engine.numerics.jit import kernel
from engine.numerics.random import dropout_threshold, random_words4, split_seed
from engine.numerics.types import Floats, Scalar
from engine.operations.base import Execution
from engine.threads import Task


def keep_factor(probability: float) -> np.float32:
    """What kept values are multiplied by: fp32(1 / (1 - p)), p the shortest decimal that reads as `probability`."""
    return np.float32(float(1 / (1 - Fraction(repr(probability)))))


@dataclass(frozen=True)
class Mask:
    """What decides a mask, as the numbers that kernels take; threshold 0 keeps everything."""

    key_low: np.uint32
    key_high: np.uint32
    step: np.uint32
    site: np.uint32
    threshold: np.uint32
    factor: np.float32

    @classmethod
    def of(cls, run: Execution, probability: float, site: int) -> "Mask":
        probability = probability if run.training else 0.0
        return cls(
            *split_seed(run.seed),
            np.uint32(run.step),
            np.uint32(site),
            dropout_threshold(probability),
            keep_factor(probability),
        )

    @property
    def arguments(self) -> tuple[Scalar, ...]:
        return (self.key_low, self.key_high, self.step, self.site, self.threshold, self.factor)


@kernel
def k_dropout(
    x: Floats,
    first: Scalar,
    last: Scalar,
    base: Scalar,
    key_low: Scalar,
    key_high: Scalar,
    step: Scalar,
    site: Scalar,
    threshold: Scalar,
    factor: Scalar,
) -> None:
    """x[i] *= factor where element base + i is kept, else x[i] = 0, for first <= i < last of a flat array."""
    zero = np.float32(0.0)
    for group in range((base + first) // 4, (base + last + 3) // 4):
        words = random_words4(key_low, key_high, step, site, group)
        start = 4 * group - base
        for j in range(4):
            i = start + j
            if first <= i < last:
                x[i] = x[i] * factor if words[j] >= threshold else zero


def dropout_tasks(run: Execution, probability: float, site: int, x: Floats) -> list[Task]:
    """Tasks that put x, the flat values of this shard's rows, through dropout in place."""
    mask = Mask.of(run, probability, site)
    base = np.int64(run.first_row) * np.int64(x.size // run.sizes.batch)
    return [(k_dropout, (x, a, b, base, *mask.arguments)) for a, b in run.team.ranges(x.size, 64)]
