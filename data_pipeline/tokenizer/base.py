"""What every tokenizer has in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TextIO

import numpy as np
from blake3 import blake3
from numpy.typing import ArrayLike, NDArray

from data_pipeline.errors import TextError

REPLACEMENT = "\ufffd"
"""What an id outside the vocabulary decodes to: a model's vocabulary may be larger than its
tokenizer's."""

CHUNK_CHARACTERS = 1 << 20


class Tokenizer(ABC):
    """Text to token ids and back; `decode(encode(text)) == text` for every text that `encode`
    takes."""

    kind: ClassVar[str]
    """The name in the configuration."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of tokens; ids are 0 to size - 1."""

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.uint32]:
        """Token ids of `text`, uint32 `[n]`.

        Raises TextError for a lone surrogate or a character outside the vocabulary, with its
        position.
        """

    @abstractmethod
    def encode_stream(self, text: TextIO) -> Iterator[NDArray[np.uint32]]:
        """The ids of a text file (opened with newline="\\n") in pieces whose sum is `encode` of the
        whole."""

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """The text of `ids` (integers, 1-D). An id of `size` or more gives U+FFFD; a negative one
        is a TextError."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The canonical bytes of tokenizer.json."""

    @property
    def hash(self) -> str:
        """BLAKE3 of `to_bytes()`."""
        return blake3(self.to_bytes()).hexdigest()


def checked_ids(ids: ArrayLike) -> NDArray[Any]:
    """`ids` as a 1-D integer array. Raises TextError for anything else and for a negative id."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TextError(f"expected a 1-D sequence of integer token ids, found {array.dtype} of shape {array.shape}")
    if (least := int(array.min())) < 0:
        raise TextError(f"expected token ids of 0 or more, found {least} at position {int(array.argmin())}")
    return array
