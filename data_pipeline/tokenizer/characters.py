"""Tokenizer `characters`: one token per Unicode code point."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from data_pipeline import canonical
from data_pipeline.errors import CorruptDataError, TextError
from data_pipeline.strict import Sequence, Strict
from data_pipeline.text import check, show
from data_pipeline.tokenizer.base import CHUNK_CHARACTERS, REPLACEMENT, Tokenizer, checked_ids


class CharactersFile(Strict):
    """The content of tokenizer.json."""

    format: Literal["samebits characters 1"]
    """Name and version of this format."""
    code_points: Sequence[Annotated[int, Field(ge=0, le=0x10FFFF)]]
    """The code point of each id: strictly increasing, no surrogates."""


class Characters(Tokenizer):
    """Ids are positions in the sorted code points of the text that the vocabulary was made from."""

    kind: ClassVar[str] = "characters"

    def __init__(self, code_points: NDArray[np.uint32]) -> None:
        self._code_points = code_points
        # One row more than the vocabulary: what every id outside it decodes to.
        self._decoding = np.append(code_points, np.uint32(ord(REPLACEMENT)))

    @classmethod
    def of(cls, alphabet: Iterable[str]) -> Self:
        """The tokenizer of a set of characters, in any order."""
        return cls(np.array(sorted(ord(character) for character in set(alphabet)), np.uint32))

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Self:
        """Read tokenizer.json. Raises CorruptDataError, naming `path`."""
        points = canonical.decode(CharactersFile, data, path).code_points
        if list(points) != sorted(set(points)) or any(0xD800 <= point < 0xE000 for point in points):
            raise CorruptDataError(f"{path}: expected increasing code points without surrogates, found others")
        return cls(np.array(points, np.uint32))

    def to_bytes(self) -> bytes:
        points = tuple(self._code_points.tolist())
        return canonical.encode(CharactersFile(format="samebits characters 1", code_points=points))

    @property
    def size(self) -> int:
        return len(self._code_points)

    def encode(self, text: str) -> NDArray[np.uint32]:
        return self._encode(text, 0)

    def encode_stream(self, text: TextIO) -> Iterator[NDArray[np.uint32]]:
        position = 0
        while chunk := text.read(CHUNK_CHARACTERS):
            yield self._encode(chunk, position)
            position += len(chunk)

    def decode(self, ids: ArrayLike) -> str:
        rows = np.minimum(checked_ids(ids), self.size).astype(np.int64)
        data: bytes = self._decoding[rows].astype("<u4").tobytes()
        return data.decode("utf-32-le")

    def _encode(self, chunk: str, position: int) -> NDArray[np.uint32]:
        check(chunk)
        points = np.frombuffer(chunk.encode("utf-32-le"), "<u4").astype(np.uint32)
        ids = np.searchsorted(self._code_points, points).astype(np.uint32)
        unseen = self._decoding[ids] != points
        # An unseen character past the last one meets the extra row, which may hold that very one.
        unseen |= ids == self.size
        if unseen.any():
            first = int(unseen.argmax())
            raise TextError(
                f"expected one of the {self.size} characters of the training corpus, found "
                f"{show(chunk[first])} at character {position + first}: leave it out of the text, "
                "or use the "
                "tokenizer bpe, which takes any text"
            )
        return ids
