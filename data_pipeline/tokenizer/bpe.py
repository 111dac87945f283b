"""Tokenizer `bpe`: byte-level byte-pair encoding, by the `tokenizers` library.

The text is first cut after every run of line feeds; each piece is cut further by the GPT-2 pattern
(words with the space before them, numbers, punctuation, white space), and merges never cross a cut.
Every byte is a token, nothing is normalised, nothing is put in front, no string has a special
meaning: any text comes back as it was.
"""

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TextIO

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from tokenizers import Regex, models, pre_tokenizers, trainers

from data_pipeline import canonical
from data_pipeline.errors import CorruptDataError, TooShortError
from data_pipeline.strict import Sequence, Strict
from data_pipeline.text import check
from data_pipeline.tokenizer.base import CHUNK_CHARACTERS, REPLACEMENT, Tokenizer, checked_ids

LIBRARY = "tokenizers"
LIBRARY_VERSION: str = tokenizers.__version__

PIECE = r"[^\n]*\n+|[^\n]+"

Merge = tuple[int, int]
Id = Annotated[int, Field(ge=0)]


class BpeFile(Strict):
    """The content of tokenizer.json: a format of its own, so that a release of the library that
    writes its files differently changes no hash."""

    format: Literal["samebits bpe 1"]
    """Name and version of this format."""
    merges: Sequence[Sequence[Id]]
    """Pairs of ids, first learned first. Ids 0 to 255 are the bytes; each merge whose bytes are not
    a token yet makes the next id."""


class Bpe(Tokenizer):
    """Ids 0 to 255 are the bytes of that value, then come tokens in the order they were learned."""

    kind: ClassVar[str] = "bpe"

    def __init__(self, merges: Iterable[Merge]) -> None:
        """Raises ValueError for a merge of an id that is not known yet, or a repeated one."""
        self._merges = tuple(merges)
        self._bytes = _tokens(self._merges)
        names = [_name(token) for token in self._bytes]
        self._library = _library(
            models.BPE(
                vocab={name: row for row, name in enumerate(names)},
                merges=[(names[left], names[right]) for left, right in self._merges],
            )
        )

    @classmethod
    def train(cls, training_text: TextIO, vocabulary: int) -> Self:
        """Learn tokens until there are `vocabulary`; the text is a file opened with newline="\\n".

        Raises TooShortError where the text cannot give so many.
        """
        library = _library(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            show_progress=False,
            special_tokens=[],
            initial_alphabet=sorted(_NAME_OF_BYTE),
        )
        library.train_from_iterator(_pieces(training_text), trainer)
        learned = json.loads(library.to_str())["model"]["merges"]
        ids = {name: byte for byte, name in enumerate(_NAME_OF_BYTE)}
        merges = []
        for left, right in learned:
            merges.append((ids[left], ids[right]))
            ids.setdefault(left + right, len(ids))
        trained = cls(merges)
        if trained.size != vocabulary:
            raise TooShortError(
                f"tokenizer bpe: expected a vocabulary of {vocabulary}, found text that gives only "
                f"{trained.size}: set vocabulary to at most {trained.size} or use more text"
            )
        return trained

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Self:
        """Read tokenizer.json. Raises CorruptDataError, naming `path`."""
        merges = canonical.decode(BpeFile, data, path).merges
        try:
            return cls((left, right) for left, right in merges)
        except ValueError as error:
            raise CorruptDataError(f"{path}: expected merges of known tokens: {error}") from error

    def to_bytes(self) -> bytes:
        return canonical.encode(BpeFile(format="samebits bpe 1", merges=self._merges))

    @property
    def size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> NDArray[np.uint32]:
        check(text)
        parts = list(self.encode_stream(io.StringIO(text, newline="\n")))
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32)

    def encode_stream(self, text: TextIO) -> Iterator[NDArray[np.uint32]]:
        for batch in _batches(_pieces(text)):
            encodings = self._library.encode_batch_fast(batch, add_special_tokens=False)
            yield np.array([row for encoding in encodings for row in encoding.ids], np.uint32)

    def decode(self, ids: ArrayLike) -> str:
        """The text of `ids`. Bytes that are not UTF-8, as a sample may end in, give U+FFFD too."""
        outside = REPLACEMENT.encode("utf-8")
        rows = checked_ids(ids).tolist()
        data = b"".join(self._bytes[row] if row < self.size else outside for row in rows)
        return data.decode("utf-8", errors="replace")


def _tokens(merges: Iterable[Merge]) -> list[bytes]:
    """The bytes of every id."""
    tokens = [bytes([byte]) for byte in range(256)]
    known = set(tokens)
    seen = set[Merge]()
    for merge in merges:
        if max(merge) >= len(tokens) or merge in seen:
            raise ValueError(f"found {merge} where {len(tokens)} tokens are known")
        seen.add(merge)
        token = tokens[merge[0]] + tokens[merge[1]]
        if token not in known:
            known.add(token)
            tokens.append(token)
    return tokens


def _library(model: models.BPE) -> Any:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return library


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """What PIECE cuts a text into, from its lines: the library's own cut, made early so that text
    can stream."""
    piece = ""
    for line in lines:
        if line != "\n" and piece:
            yield piece
            piece = ""
        piece += line
    if piece:
        yield piece


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece)
        if characters >= CHUNK_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _byte_names() -> list[str]:
    """The character that the library writes for each byte: printable Latin-1 stands for itself,
    the others for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_NAME_OF_BYTE = _byte_names()


def _name(token: bytes) -> str:
    return "".join(_NAME_OF_BYTE[byte] for byte in token)
