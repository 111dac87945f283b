"""Drawing tokens from a model, a function of the logits and an address: the same text on every machine.

Weights are integers, rint(exp((l - max) / temperature) * 2**30), so their running sum is exact; a 64-bit random word
picks a point below their total.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.numerics.elementary import exp32
from engine.numerics.jit import kernel
from engine.numerics.random import uniform_u32
from engine.numerics.sums import sum_integer
from engine.numerics.types import Floats, Longs, Scalar, Words

SAMPLING_SITE = 2**32 - 1
"""The random site of sampling; dropout counts its sites from 0."""

_WORD = 2**32


@kernel
def k_sampling_weights(logits: Floats, chosen: Longs, temperature: Scalar, weights: Longs) -> None:
    """weights[i] = rint(exp((logits[chosen[i]] - max) / temperature) * 2**30), the maximum over the chosen."""
    largest = logits[chosen[0]]
    for i in range(chosen.size):
        largest = max(largest, logits[chosen[i]])
    for i in range(chosen.size):
        scaled = np.float32(np.float32(logits[chosen[i]] - largest) / temperature)
        weights[i] = sum_integer(exp32(scaled), np.float64(1073741824.0))


def candidates(logits: Floats, top_k: int) -> Longs:
    """Ids that may be drawn, ascending: the `top_k` largest logits, of equal ones the lower ids; 0 takes all."""
    if top_k == 0 or top_k >= logits.size:
        return np.arange(logits.size, dtype=np.int64)
    order = np.argsort(-logits, kind="stable")[:top_k]
    return np.sort(order).astype(np.int64)


def draw(logits: Floats, temperature: float, top_k: int, seed: int, position: int) -> int:
    """One id, with the random word of `position`; temperature 0 takes the likeliest, of equals the lowest id."""
    if temperature == 0.0:
        return int(np.argmax(logits))
    chosen = candidates(logits, top_k)
    weights = np.zeros(chosen.size, np.int64)
    # A temperature below the smallest fp32 would divide by zero; the smallest normal one draws the same.
    k_sampling_weights(logits, chosen, np.float32(max(temperature, 2.0**-126)), weights)
    ends = np.cumsum(weights)
    low, high = (uniform_u32(seed, position, SAMPLING_SITE, element) for element in (0, 1))
    point = (high * _WORD + low) * int(ends[-1]) >> 64
    return int(chosen[np.searchsorted(ends, point, side="right")])


def sample(
    next_logits: Callable[[Words], npt.NDArray[np.float32]],
    context: int,
    prompt: Sequence[int],
    *,
    tokens: int,
    vocabulary: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """`tokens` ids that follow `prompt` (at least one id).

    next_logits: logits [V] after 1 to `context` tokens (Trainer.next_logits). vocabulary: only ids below it are drawn,
    since a model may have room for more than its tokenizer knows. Past the context the oldest tokens are forgotten.
    """
    window = list(prompt[-context:])
    for position in range(tokens):
        logits = next_logits(np.array(window, np.int32))[:vocabulary]
        token = draw(logits, temperature, top_k, seed, position)
        yield token
        window = [*window[-(context - 1) :], token] if context > 1 else [token]
