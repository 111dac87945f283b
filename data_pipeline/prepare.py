"""Prepare: raw documents to token shards, a tokenizer and a manifest."""

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from blake3 import blake3

from data_pipeline import canonical
from data_pipeline.atomic import new_directory, storage_errors
from data_pipeline.cleaning import clean
from data_pipeline.errors import CorruptDataError, DataError, TooShortError
from data_pipeline.files import check_files, read_file
from data_pipeline.manifest import (
    MANIFEST,
    TOKENIZER,
    DatasetManifest,
    Provenance,
    ProvenanceDocument,
    RawManifest,
    Split,
    TokenizerEntry,
    TokenType,
)
from data_pipeline.shards import ShardWriter, token_type
from data_pipeline.spec import BpeTokenizer, DataSpec
from data_pipeline.text import decode
from data_pipeline.tokenizer import Tokenizer, build_tokenizer
from data_pipeline.tokenizer.base import CHUNK_CHARACTERS
from data_pipeline.tokenizer.bpe import LIBRARY, LIBRARY_VERSION


def prepare(spec: DataSpec, raw_directory: Path, directory: Path) -> DatasetManifest:
    """Make the dataset in `directory` out of what `fetch` wrote to `raw_directory`.

    The documents are verified, decoded as UTF-8, cleaned and joined in the manifest's order; a
    document that does not end with a line feed gets one before the next document with text (none
    after the last). The last `validation_permille` thousandths of the characters, rounded down, are
    the validation split; both splits are tokenized by themselves. The directory appears whole or
    not at all. Memory holds one document or one chunk at a time.

    Raises DataError where the raw documents are of other sources, CorruptDataError, TextError,
    TooShortError, StorageError, NoSpaceError.
    """
    with storage_errors():
        raw = _open_raw(spec, raw_directory)
    with new_directory(directory) as partial:
        text, train, validation = (partial / name for name in ("text", "train", "validation"))
        characters, alphabet = _write_text(spec, raw, raw_directory, text)
        held_out = _held_out(characters, spec.validation_permille)
        _cut(text, train, characters - held_out, validation)
        with _read(train) as training_text:
            tokenizer = build_tokenizer(spec.tokenizer, alphabet, training_text)
        dtype = token_type(tokenizer.size)
        data = tokenizer.to_bytes()
        (partial / TOKENIZER).write_bytes(data)
        manifest = DatasetManifest(
            format="samebits dataset 1",
            dtype=dtype,
            tokenizer=TokenizerEntry(kind=spec.tokenizer.kind, size=tokenizer.size, blake3=blake3(data).hexdigest()),
            validation_permille=spec.validation_permille,
            train=_tokenize(tokenizer, train, characters - held_out, dtype),
            validation=_tokenize(tokenizer, validation, held_out, dtype),
            provenance=_provenance(spec, raw),
        )
        for path in (text, train, validation):
            path.unlink()
        (partial / MANIFEST).write_bytes(canonical.encode(manifest))
    return manifest


def _open_raw(spec: DataSpec, directory: Path) -> RawManifest:
    path = directory / MANIFEST
    manifest = canonical.decode(RawManifest, read_file(path, "run fetch"), path)
    if manifest.sources != spec.sources:
        raise DataError(f"{path}: expected the sources of the configuration, found others: run fetch again")
    check_files(
        directory,
        {MANIFEST, *(document.file for document in manifest.documents)},
        "run fetch again",
    )
    return manifest


def _write_text(spec: DataSpec, raw: RawManifest, directory: Path, path: Path) -> tuple[int, set[str]]:
    """Write the joined text; return its length in code points and its set of characters."""
    characters, alphabet, last = 0, set[str](), "\n"
    with path.open("x", encoding="utf-8", newline="") as out:
        for text in _texts(spec, raw, directory):
            if not text:
                continue
            joined = text if last == "\n" else "\n" + text
            out.write(joined)
            characters += len(joined)
            alphabet.update(joined)
            last = joined[-1]
    return characters, alphabet


def _texts(spec: DataSpec, raw: RawManifest, directory: Path) -> Iterator[str]:
    for document in raw.documents:
        path = directory / document.file
        data = path.read_bytes()
        if (found := blake3(data).hexdigest()) != document.blake3 or len(data) != document.size:
            raise CorruptDataError(
                f"{path} ({document.name}): expected {document.size} bytes with BLAKE3 "
                f"{document.blake3}, "
                f"found {len(data)} with {found}: run fetch again"
            )
        yield clean(decode(data, document.name), spec.cleaning, document.name)


def _held_out(characters: int, permille: int) -> int:
    held_out = characters * permille // 1000
    if held_out == 0:
        raise TooShortError(
            f"the text has {characters} characters, of which the last {permille} thousandths are "
            "none: a validation "
            f"split needs at least {-(-1000 // permille)} characters. Use more text or a larger "
            "validation_permille"
        )
    return held_out


def _cut(text: Path, train: Path, train_characters: int, validation: Path) -> None:
    """Copy the first `train_characters` of `text` to `train`, the rest to `validation`."""
    with _read(text) as source:
        with train.open("x", encoding="utf-8", newline="") as out:
            left = train_characters
            while left and (chunk := source.read(min(left, CHUNK_CHARACTERS))):
                out.write(chunk)
                left -= len(chunk)
        with validation.open("x", encoding="utf-8", newline="") as out:
            while chunk := source.read(CHUNK_CHARACTERS):
                out.write(chunk)


def _read(path: Path) -> TextIO:
    # newline="\n": a line ends at a line feed alone, and no character is translated.
    return path.open(encoding="utf-8", newline="\n")


def _tokenize(tokenizer: Tokenizer, path: Path, characters: int, dtype: TokenType) -> Split:
    """Write the shards of one split beside its text, named after it."""
    writer = ShardWriter(path.parent, path.name, dtype)
    with _read(path) as text:
        for ids in tokenizer.encode_stream(text):
            writer.write(ids)
    shards = writer.close()
    return Split(characters=characters, tokens=sum(shard.tokens for shard in shards), shards=shards)


def _provenance(spec: DataSpec, raw: RawManifest) -> Provenance:
    documents = tuple(
        ProvenanceDocument(name=document.name, source=document.source, size=document.size, blake3=document.blake3)
        for document in raw.documents
    )
    libraries = {LIBRARY: LIBRARY_VERSION} if isinstance(spec.tokenizer, BpeTokenizer) else {}
    return Provenance(sources=raw.sources, documents=documents, cleaning=spec.cleaning, libraries=libraries)
