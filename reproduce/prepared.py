"""The project's own dataset, as its stages take it: it is there, and made from the present `data` section.

A verification opens the datasets of records instead, which are known by their hashes.
"""

from pathlib import Path

from data_pipeline import Dataset, DatasetManifest, DataSpec, open_dataset
from data_pipeline.manifest import MANIFEST
from reproduce.errors import ConfigurationError, Inconclusive

REMEDY = "run `dvc repro`"


def open_prepared(folder: Path, data: DataSpec) -> Dataset:
    """The dataset in `folder`, every byte verified.

    Raises Inconclusive if there is none, ConfigurationError if it was made from another `data` section,
    CorruptDataError.
    """
    require_made(folder)
    dataset = open_dataset(folder)
    if (key := first_difference(dataset.manifest, data)) is not None:
        raise ConfigurationError(
            f"{folder} was made from another `data` section than params.yaml has (data.{key} differs): {REMEDY}"
        )
    return dataset


def require_made(folder: Path) -> None:
    """Raises Inconclusive if no stage has made `folder` yet: nothing is damaged then."""
    if not (folder / MANIFEST).exists():
        raise Inconclusive(f"{folder / MANIFEST} is missing, the stage that makes it has not run yet: {REMEDY}")


def first_difference(manifest: DatasetManifest, data: DataSpec) -> str | None:
    """The first key of the `data` section that a dataset was made with otherwise; None if it was made from this one."""
    tokenizer = manifest.tokenizer
    same = {
        "sources": manifest.provenance.sources == data.sources,
        "cleaning": manifest.provenance.cleaning == data.cleaning,
        "tokenizer.kind": tokenizer.kind == data.tokenizer.kind,
        # Characters have as many tokens as the text has kinds of them, which the section does not say.
        "tokenizer.vocabulary": data.tokenizer.kind != "bpe" or tokenizer.size == data.tokenizer.vocabulary,
        "validation_permille": manifest.validation_permille == data.validation_permille,
    }
    return next((key for key, agrees in same.items() if not agrees), None)
