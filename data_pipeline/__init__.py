"""What feeds the engine: documents to tokens, and the order in which they are seen.

spec = DataSpec.model_validate(configuration["data"])
fetch(spec, Path("data/raw"), root=Path("."))
prepare(spec, Path("data/raw"), Path("data/dataset"))
dataset = open_dataset(Path("data/dataset"))
TrainingOrder(dataset.train, context=256, batch=32, seed=1337).fill(step, inputs, targets)
"""

from data_pipeline.dataset import Dataset, open_dataset
from data_pipeline.errors import (
    CorruptDataError,
    DataError,
    NoSpaceError,
    SourceError,
    StorageError,
    TextError,
    TooShortError,
)
from data_pipeline.fetch import fetch
from data_pipeline.manifest import DatasetManifest, RawManifest
from data_pipeline.order import TrainingOrder, ValidationWindows
from data_pipeline.prepare import prepare
from data_pipeline.shards import Tokens
from data_pipeline.spec import DataSpec
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "CorruptDataError",
    "DataError",
    "DataSpec",
    "Dataset",
    "DatasetManifest",
    "NoSpaceError",
    "RawManifest",
    "SourceError",
    "StorageError",
    "TextError",
    "Tokenizer",
    "Tokens",
    "TooShortError",
    "TrainingOrder",
    "ValidationWindows",
    "fetch",
    "load_tokenizer",
    "open_dataset",
    "prepare",
]
