"""Tokenizers: text to ids and back, without loss."""

from pathlib import Path
from typing import TextIO

from data_pipeline.errors import CorruptDataError
from data_pipeline.spec import CharacterTokenizer, TokenizerSpec
from data_pipeline.tokenizer.base import REPLACEMENT, Tokenizer
from data_pipeline.tokenizer.bpe import Bpe
from data_pipeline.tokenizer.characters import Characters

__all__ = ["REPLACEMENT", "Bpe", "Characters", "Tokenizer", "build_tokenizer", "load_tokenizer"]


def build_tokenizer(spec: TokenizerSpec, alphabet: set[str], training_text: TextIO) -> Tokenizer:
    """Make the declared tokenizer.

    alphabet: the characters of the whole text. training_text: the training split (newline="\\n"),
    read by bpe only, so that a learned vocabulary has not seen the validation split.
    """
    if isinstance(spec, CharacterTokenizer):
        return Characters.of(alphabet)
    return Bpe.train(training_text, spec.vocabulary)


def load_tokenizer(data: bytes, kind: str, path: Path) -> Tokenizer:
    """The tokenizer that the bytes of a tokenizer.json stand for. Raises CorruptDataError, naming
    `path`."""
    kinds: dict[str, type[Characters] | type[Bpe]] = {"characters": Characters, "bpe": Bpe}
    if kind not in kinds:
        raise CorruptDataError(f"{path}: expected a tokenizer of kind {' or '.join(kinds)}, found {kind!r}")
    return kinds[kind].from_bytes(data, path)
