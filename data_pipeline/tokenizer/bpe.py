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
from typing import Any, ClassVar, Self, TextIO

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from data_pipeline import canonical
from data_pipeline.errors import CorruptDataError, TooShortError
from data_pipeline.text import check
from data_pipeline.tokenizer.base import CHUNK_CHARACTERS, REPLACEMENT, Tokenizer, checked_ids

LIBRARY = "tokenizers"
LIBRARY_VERSION: str = tokenizers.__version__

PIECE = r"[^\n]*\n+|[^\n]+"


class Bpe(Tokenizer):
    """Ids 0 to 255 are bytes (in the order of the library's alphabet), then tokens in the order
    they were merged."""

    kind: ClassVar[str] = "bpe"

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._library = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self._bytes = [_to_bytes(token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]

    @classmethod
    def train(cls, training_text: TextIO, vocabulary: int) -> Self:
        """Learn `vocabulary - 256` merges. Raises TooShortError where the text cannot give so
        many."""
        library = _empty()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            show_progress=False,
            special_tokens=[],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        library.train_from_iterator(_pieces(training_text), trainer)
        if (found := library.get_vocab_size()) != vocabulary:
            raise TooShortError(
                f"tokenizer bpe: expected a vocabulary of {vocabulary}, found text that gives only "
                f"{found}: "
                f"set vocabulary to at most {found} or use more text"
            )
        return cls(canonical.canonicalise(library.to_str()))

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Self:
        """Read tokenizer.json. Raises CorruptDataError, naming `path`."""
        try:
            loaded = json.loads(data)
            model = loaded.pop("model")
            expected = json.loads(_empty().to_str())
            del expected["model"]
            same = loaded == expected and canonical.canonicalise(data.decode("utf-8")) == data
            alphabet = set(pre_tokenizers.ByteLevel.alphabet())
            ids = sorted(model["vocab"].values())
            if not same or ids != list(range(len(ids))) or not alphabet <= set(model["vocab"]):
                raise ValueError("its settings, ids or bytes are not those of this tokenizer")
            return cls(data)
        except Exception as error:  # the library raises bare Exception
            raise CorruptDataError(
                f"{path}: expected a byte-level BPE tokenizer, found: {error}"
            ) from error

    def to_bytes(self) -> bytes:
        return self._data

    @property
    def size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> NDArray[np.uint32]:
        parts = list(self.encode_stream(io.StringIO(text, newline="\n")))
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32)

    def encode_stream(self, text: TextIO) -> Iterator[NDArray[np.uint32]]:
        for batch in _batches(_pieces(text)):
            encodings = self._library.encode_batch_fast(batch, add_special_tokens=False)
            for encoding in encodings:
                yield np.array(encoding.ids, np.uint32)

    def decode(self, ids: ArrayLike) -> str:
        """The text of `ids`. Bytes that are not UTF-8, as a sample may end in, give U+FFFD too."""
        outside = REPLACEMENT.encode("utf-8")
        parts = (
            self._bytes[row] if row < self.size else outside for row in checked_ids(ids).tolist()
        )
        return b"".join(parts).decode("utf-8", errors="replace")


def _empty() -> Any:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    library.decoder = decoders.ByteLevel()
    return library


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """What PIECE cuts a text into, from its lines: the cut the library makes, made early so that
    text can stream."""
    piece = ""
    for line in lines:
        check(line)
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


def _alphabet() -> dict[str, int]:
    """The byte that each character of a token stands for: printable Latin-1 itself, the others from
    U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + row): byte for row, byte in enumerate(others)
    }


_BYTE_OF = _alphabet()


def _to_bytes(token: str) -> bytes:
    return bytes(_BYTE_OF[character] for character in token)
