"""AdamW (Loshchilov & Hutter 2019), the global gradient norm, and the tree that joins shard gradients.

    g' = g * clip,  clip = 1 or fp32(clip_norm / norm)
    m' = beta1*m + (1 - beta1)*g',  v' = beta2*v + (1 - beta2)*(g'*g')
    w' = w*decay - rate * ((m'/correction1) / (sqrt(v'/correction2) + epsilon))

decay = fp32(1 - rate*weight_decay) for the kinds of parameter that are decayed, else 1. Every operation is one fp32
rounding, in the order written. Departure from the paper: the decay is multiplied in, so that it is one rounding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.digest import Sums, with_element
from engine.numerics.fixed_point import INFINITY_BITS, magnitude_bits
from engine.numerics.jit import device_function, kernel
from engine.numerics.sums import SUM_LANES, lanes_total
from engine.numerics.types import Doubles, Floats, Longs, Scalar
from engine.schedule import StepValues
from engine.spec import TrainSpec

NORM_CHUNK = 4096  # elements whose squares one partial sum adds up; part of the definition


@kernel
def k_add_gradients(a: Floats, b: Floats, first: Scalar, last: Scalar) -> None:
    """a += b on flat arrays: one node of the tree over shards."""
    a, b = a[first:last], b[first:last]
    for i in range(a.size):
        a[i] += b[i]


@kernel
def k_grad_norm_partial(g: Floats, first: Scalar, last: Scalar, partial: Doubles, lanes: Doubles) -> None:
    """partial[c] = ordered float64 sum of squares of chunk c of the flat gradient, for chunks first..last."""
    for c in range(first, last):
        lanes[:] = 0.0
        end = min((c + 1) * NORM_CHUNK, g.size)
        for start in range(c * NORM_CHUNK, end, SUM_LANES):
            piece = g[start : min(start + SUM_LANES, end)]
            for j in range(piece.size):
                x = np.float64(piece[j])
                lanes[j] += x * x
        partial[c] = lanes_total(lanes)


@kernel
def k_grad_norm_final(partial: Doubles, lanes: Doubles) -> float:
    """Square root of the ordered sum of the partial sums."""
    lanes[:] = 0.0
    for start in range(0, partial.size, SUM_LANES):
        for j in range(min(SUM_LANES, partial.size - start)):
            lanes[j] += partial[start + j]
    return np.sqrt(lanes_total(lanes))  # type: ignore[no-any-return]


class Rule(NamedTuple):
    """What AdamW does in one step to every element of one kind of parameter, as fp32 numbers."""

    clip: Scalar
    beta1: Scalar
    rest1: Scalar  # 1 - beta1
    beta2: Scalar
    rest2: Scalar  # 1 - beta2
    correction1: Scalar
    correction2: Scalar
    epsilon: Scalar
    rate: Scalar
    decay: Scalar


@device_function
def _rule_of(numbers: Floats) -> Rule:
    """A rule comes as an array: Numba leaks memory with every named tuple that Python hands to a kernel."""
    return Rule(
        numbers[0],
        numbers[1],
        numbers[2],
        numbers[3],
        numbers[4],
        numbers[5],
        numbers[6],
        numbers[7],
        numbers[8],
        numbers[9],
    )


@device_function
def _updated(w: Scalar, g: Scalar, m: Scalar, v: Scalar, rule: Rule) -> tuple[Scalar, Scalar, Scalar]:
    """The new w, m, v of one element."""
    x = g * rule.clip
    m = rule.beta1 * m + rule.rest1 * x
    v = rule.beta2 * v + rule.rest2 * (x * x)
    step = (m / rule.correction1) / (np.sqrt(v / rule.correction2) + rule.epsilon)
    return w * rule.decay - rule.rate * step, m, v


@kernel
def k_adamw_check(
    w: Floats,
    g: Floats,
    m: Floats,
    v: Floats,
    first: Scalar,
    last: Scalar,
    numbers: Floats,
    flag: Longs,
    slot: Scalar,
) -> None:
    """Set flag[slot] if k_adamw would write a number that is not finite; write nothing else."""
    top = np.int32(0)
    rule = _rule_of(numbers)
    w, g, m, v = w[first:last], g[first:last], m[first:last], v[first:last]
    for i in range(w.size):
        for x in _updated(w[i], g[i], m[i], v[i], rule):
            top = max(top, magnitude_bits(x))
    if top >= INFINITY_BITS:
        flag[slot] = 1


@kernel
def k_adamw(
    w: Floats,
    g: Floats,
    m: Floats,
    v: Floats,
    first: Scalar,
    last: Scalar,
    numbers: Floats,
    sums: Sums,
) -> None:
    """Update elements first..last of one parameter's flat w, m, v; sums [3, 2] gets their part of the step digest."""
    rule = _rule_of(numbers)
    a_w = b_w = a_m = b_m = a_v = b_v = np.uint64(0)
    w, g, m, v = w[first:last], g[first:last], m[first:last], v[first:last]
    for i in range(w.size):
        wi, mi, vi = _updated(w[i], g[i], m[i], v[i], rule)
        w[i] = wi
        m[i] = mi
        v[i] = vi
        a_w, b_w = with_element(a_w, b_w, first + i, wi)
        a_m, b_m = with_element(a_m, b_m, first + i, mi)
        a_v, b_v = with_element(a_v, b_v, first + i, vi)
    sums[0, 0], sums[0, 1] = a_w, b_w
    sums[1, 0], sums[1, 1] = a_m, b_m
    sums[2, 0], sums[2, 1] = a_v, b_v


@dataclass(frozen=True)
class AdamWConstants:
    """The recipe's constants as fp32 numbers."""

    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    epsilon: np.float32

    @classmethod
    def of(cls, train: TrainSpec) -> "AdamWConstants":
        return cls(
            np.float32(train.beta1),
            np.float32(1.0 - train.beta1),
            np.float32(train.beta2),
            np.float32(1.0 - train.beta2),
            np.float32(train.epsilon),
        )

    def rule(self, clip: np.float32, values: StepValues, decayed: bool) -> Floats:
        """What a step does to parameters that are decayed, or to those that are not: the numbers of a Rule."""
        rule = Rule(
            clip=clip,
            beta1=self.beta1,
            rest1=self.rest1,
            beta2=self.beta2,
            rest2=self.rest2,
            correction1=values.correction1,
            correction2=values.correction2,
            epsilon=self.epsilon,
            rate=values.learning_rate,
            decay=values.decay if decayed else np.float32(1.0),
        )
        return np.array(rule, np.float32)


def clip_factor(norm: float, clip_norm: float) -> np.float32:
    """What gradients are multiplied by so that their global norm is at most clip_norm (0: no limit)."""
    if clip_norm == 0.0 or norm <= clip_norm:
        return np.float32(1.0)
    return np.float32(clip_norm / norm)
