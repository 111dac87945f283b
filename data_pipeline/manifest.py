"""The manifests of a raw directory and of a dataset."""

from typing import Annotated, Literal

from pydantic import Field

from data_pipeline.cleaning import CleaningStep
from data_pipeline.sources import Source
from data_pipeline.strict import Hash, Sequence, Strict

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A count that JSON can hold exactly."""

TokenType = Literal["uint8", "uint16", "uint32"]
"""Type of a stored token; little-endian."""


class RawDocument(Strict):
    """One document as it was fetched."""

    name: str
    """Its name in the source."""
    source: Count
    """Index of its source in the list of sources."""
    file: str
    """POSIX path of its content, relative to the raw directory."""
    size: Count
    """Bytes."""
    blake3: Hash
    """Hash of its content."""


class RawManifest(Strict):
    """What `fetch` wrote."""

    format: Literal["samebits raw 1"]
    """Name and version of this format."""
    sources: Sequence[Source]
    """The sources that were fetched."""
    documents: Sequence[RawDocument]
    """The documents, in the order in which they are joined."""


class ProvenanceDocument(Strict):
    """One document that the text was made of."""

    name: str
    """Its name in the source."""
    source: Count
    """Index of its source."""
    size: Count
    """Bytes, before cleaning."""
    blake3: Hash
    """Hash of its content, before cleaning."""


class Provenance(Strict):
    """Where the tokens come from."""

    sources: Sequence[Source]
    """The declared sources."""
    documents: Sequence[ProvenanceDocument]
    """The documents, in the order in which they were joined."""
    cleaning: Sequence[CleaningStep]
    """The cleaning steps, in order."""
    libraries: dict[str, str]
    """Versions of the libraries that can change bits, by name: `tokenizers` for bpe, none for
    characters."""


class TokenizerEntry(Strict):
    """The tokenizer of a dataset."""

    kind: Literal["characters", "bpe"]
    """Its name."""
    size: Count
    """Number of tokens in its vocabulary."""
    blake3: Hash
    """Hash of tokenizer.json."""


class Shard(Strict):
    """One file of tokens."""

    file: str
    """Its name."""
    tokens: Annotated[int, Field(ge=1, lt=2**53)]
    """Number of tokens it holds."""
    blake3: Hash
    """Hash of its bytes."""


class Split(Strict):
    """The training or the validation part."""

    characters: Count
    """Length of its text in code points."""
    tokens: Count
    """Length in tokens: the sum over the shards."""
    shards: Sequence[Shard]
    """Its files, in order."""


class DatasetManifest(Strict):
    """What `prepare` wrote. The dataset's hash is the BLAKE3 of this manifest's canonical bytes."""

    format: Literal["samebits dataset 1"]
    """Name and version of this format."""
    dtype: TokenType
    """Type of every stored token."""
    tokenizer: TokenizerEntry
    """The tokenizer."""
    validation_permille: Count
    """Thousandths of the characters that are held out."""
    train: Split
    """The training part."""
    validation: Split
    """The validation part: the end of the text."""
    provenance: Provenance
    """Where it comes from."""
