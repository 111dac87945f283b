"""Open a prepared dataset, verified."""

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from data_pipeline import canonical
from data_pipeline.atomic import storage_errors
from data_pipeline.errors import CorruptDataError
from data_pipeline.files import check_files, read_file
from data_pipeline.manifest import MANIFEST, TOKENIZER, DatasetManifest, Split
from data_pipeline.shards import Tokens, open_shard
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

REMEDY = "prepare the dataset again"


@dataclass(frozen=True)
class Dataset:
    """A dataset whose every byte agreed with its manifest when it was opened."""

    hash: str
    """BLAKE3 of the manifest's bytes: it stands for the tokens, the tokenizer and where they come
    from."""
    manifest: DatasetManifest
    """The manifest."""
    tokenizer: Tokenizer
    """The tokenizer that the tokens were made with."""
    train: Tokens
    """The training split, memory-mapped read-only."""
    validation: Tokens
    """The validation split, memory-mapped read-only."""


def open_dataset(directory: Path) -> Dataset:
    """Open what `prepare` wrote, verifying the hash of every file.

    Raises CorruptDataError, naming the file that is damaged, missing or not of this dataset.
    """
    with storage_errors():
        path = directory / MANIFEST
        data = read_file(path, "run prepare")
        manifest = canonical.decode(DatasetManifest, data, path)
        shards = (*manifest.train.shards, *manifest.validation.shards)
        check_files(directory, {MANIFEST, TOKENIZER, *(shard.file for shard in shards)}, REMEDY)
        return Dataset(
            hash=blake3(data).hexdigest(),
            manifest=manifest,
            tokenizer=_open_tokenizer(directory / TOKENIZER, manifest),
            train=_open_split(directory, manifest, manifest.train),
            validation=_open_split(directory, manifest, manifest.validation),
        )


def _open_tokenizer(path: Path, manifest: DatasetManifest) -> Tokenizer:
    data = read_file(path, REMEDY)
    entry = manifest.tokenizer
    if (found := blake3(data).hexdigest()) != entry.blake3:
        raise CorruptDataError(f"{path}: expected BLAKE3 {entry.blake3}, found {found}: {REMEDY}")
    tokenizer = load_tokenizer(data, entry.kind, path)
    if tokenizer.size != entry.size:
        raise CorruptDataError(f"{path}: expected {entry.size} tokens, found {tokenizer.size}: {REMEDY}")
    return tokenizer


def _open_split(directory: Path, manifest: DatasetManifest, split: Split) -> Tokens:
    tokens = Tokens([open_shard(directory, shard, manifest.dtype, manifest.tokenizer.size) for shard in split.shards])
    if len(tokens) != split.tokens:
        raise CorruptDataError(f"{directory / MANIFEST}: expected {split.tokens} tokens, its shards hold {len(tokens)}")
    return tokens
