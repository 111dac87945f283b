"""The order in which windows of tokens are seen: a function of (seed, position), with no state to
save or lose."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from data_pipeline.errors import TooShortError
from data_pipeline.shards import TokenSequence

KEY_CONTEXT = "samebits training order 1"
ROUNDS = 8


def permute(index: int, size: int, key: bytes) -> int:
    """Where `index` goes under the permutation of 0 to `size - 1` that `key` (32 bytes) selects.

    A Feistel network over pairs (left, right) with left < a and right < b, where a is the least
    whole number with a·a >= size and b the least with a·b >= size; the pair stands for the number
    left·b + right. Round r = 0 to ROUNDS - 1 adds F(r, right) to left modulo a where r is even,
    and F(r, left) to right modulo b where r is odd. F(r, x) is the first 8 bytes, as a
    little-endian number, of the keyed BLAKE3 of the byte r followed by x as 8 bytes,
    little-endian. While the result is `size` or more, all rounds are applied to it again (cycle
    walking, which keeps it a permutation; seldom needed, since a·b - size < a).
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        left, right = divmod(index, b)
        for turn in range(ROUNDS):
            if turn % 2 == 0:
                left = (left + _round(turn, right, key)) % a
            else:
                right = (right + _round(turn, left, key)) % b
        index = left * b + right
        if index < size:
            return index


@lru_cache(maxsize=1 << 17)  # an epoch asks for few different ones, over and over
def _round(turn: int, half: int, key: bytes) -> int:
    digest = blake3(bytes([turn]) + half.to_bytes(8, "little"), key=key).digest(length=8)
    return int.from_bytes(digest, "little")


def epoch_key(seed: int, epoch: int) -> bytes:
    """The key of one epoch: BLAKE3 in key-derivation mode under KEY_CONTEXT of seed and epoch, 8
    bytes each, little-endian."""
    material = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    return blake3(material, derive_key_context=KEY_CONTEXT).digest()


class TrainingOrder:
    """Batches of training windows.

    The tokens are cut into n = (len(tokens) - 1) // context windows: window w has the inputs
    tokens[w·context : (w+1)·context] and as targets the same moved on by one token. Row r of the
    batch of step s has the position p = s·batch + r; its epoch is p // n and its window `permute(p
    mod n, n, epoch_key(seed, epoch))`. So every epoch sees every window once, in its own order, and
    an epoch may end in the middle of a batch.
    """

    def __init__(self, tokens: TokenSequence, context: int, batch: int, seed: int) -> None:
        """context, batch: 1 or more. seed: 0 to 2^64 - 1. Raises TooShortError where there is no
        whole window."""
        if context < 1 or batch < 1 or not 0 <= seed < 1 << 64:
            raise ValueError(f"expected context, batch >= 1 and 0 <= seed < 2^64, found {context}, {batch}, {seed}")
        self._tokens = tokens
        self._context = context
        self._batch = batch
        self._seed = seed
        self.windows = count_windows(tokens, context, "training")
        """Windows in one epoch."""

    def window(self, position: int) -> int:
        """The window at a position (0 or more)."""
        epoch, index = divmod(position, self.windows)
        return permute(index, self.windows, epoch_key(self._seed, epoch))

    def fill(self, step: int, inputs: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Write the batch of step `step` (0 or more) into two int32 `[batch, context]` arrays."""
        if step < 0:
            raise ValueError(f"expected a step of 0 or more, found {step}")
        _check_shape((self._batch, self._context), inputs, targets)
        for row in range(self._batch):
            window = self.window(step * self._batch + row)
            _fill_row(self._tokens, window, inputs[row], targets[row])


class ValidationWindows:
    """All non-overlapping windows of the validation split, in the order of the text."""

    def __init__(self, tokens: TokenSequence, context: int) -> None:
        """Raises TooShortError where there is no whole window."""
        if context < 1:
            raise ValueError(f"expected context >= 1, found {context}")
        self._tokens = tokens
        self._context = context
        self.count = count_windows(tokens, context, "validation")
        """Number of windows: (len(tokens) - 1) // context; at most `context` tokens at the end are
        left out."""

    def fill(self, first: int, inputs: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Write the windows from `first` on into two int32 `[rows, context]` arrays; all of them
        must exist."""
        rows = inputs.shape[0]
        _check_shape((rows, self._context), inputs, targets)
        if first < 0 or first + rows > self.count:
            raise IndexError(f"expected windows within 0 to {self.count}, asked for {first} to {first + rows}")
        for row in range(rows):
            _fill_row(self._tokens, first + row, inputs[row], targets[row])


def count_windows(tokens: TokenSequence, context: int, split: str) -> int:
    """Whole windows of `context` tokens with one token to follow. Raises TooShortError where there
    are none."""
    windows = (len(tokens) - 1) // context
    if windows < 1:
        remedy = f"a context of at most {len(tokens) - 1}" if len(tokens) > 1 else "a shorter context"
        share = "smaller" if split == "training" else "larger"
        raise TooShortError(
            f"the {split} split has {len(tokens)} tokens, but one window of context {context} "
            f"needs {context + 1}. "
            f"Use more text, {remedy} or a {share} data.validation_permille"
        )
    return windows


def _check_shape(shape: tuple[int, int], *arrays: NDArray[Any]) -> None:
    for array in arrays:
        if array.shape != shape or array.dtype != np.int32:
            raise ValueError(f"expected an int32 array of shape {shape}, found {array.dtype} {array.shape}")


def _fill_row(tokens: TokenSequence, window: int, inputs: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
    start = window * len(inputs)
    tokens.read(start, inputs)
    tokens.read(start + 1, targets)
