"""Whether a model has a row for every token of its data."""

from pathlib import Path

from data_pipeline import DatasetManifest, DataSpec, canonical
from data_pipeline.files import read_file
from data_pipeline.manifest import MANIFEST
from engine.spec import ModelSpec
from reproduce.errors import ConfigurationError
from reproduce.prepared import first_difference


def check_vocabulary(model: ModelSpec, tokens: int) -> None:
    """Raises ConfigurationError if the tokenizer has more tokens than the model."""
    if model.vocab < tokens:
        raise ConfigurationError(
            f"model.vocab: expected at least the tokenizer's {tokens} tokens, found {model.vocab}: "
            f"set model.vocab={tokens}"
        )


def prepared_vocabulary(folder: Path, data: DataSpec) -> int | None:
    """Tokens of the dataset in `folder`, if there is one and this `data` section is what it was made from.

    Raises CorruptDataError for a manifest that is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    manifest = canonical.decode(DatasetManifest, read_file(path, "prepare the dataset again"), path)
    return manifest.tokenizer.size if first_difference(manifest, data) is None else None
