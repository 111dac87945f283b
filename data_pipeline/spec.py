"""The `data` section of a configuration."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from data_pipeline.cleaning import CleaningStep
from data_pipeline.sources import Source
from data_pipeline.strict import Sequence, Strict


class CharacterTokenizer(Strict):
    """One token per Unicode code point; the vocabulary is the sorted set of code points of the
    whole text."""

    kind: Literal["characters"]
    """The tokenizer's name."""


class BpeTokenizer(Strict):
    """Byte-level byte-pair encoding, trained on the training split; lossless on any text."""

    kind: Literal["bpe"]
    """The tokenizer's name."""
    vocabulary: Annotated[int, Field(ge=256, lt=2**31)]
    """Number of tokens: the 256 bytes and `vocabulary - 256` merges. A text that cannot give so
    many is refused."""


TokenizerSpec = Annotated[CharacterTokenizer | BpeTokenizer, Field(discriminator="kind")]


class DataSpec(Strict):
    """Where the text comes from and how it becomes tokens. Everything here decides bits."""

    sources: Annotated[Sequence[Source], Field(min_length=1)]
    """Where documents come from; they are joined source by source in this order, each source's
    sorted by name."""
    cleaning: Sequence[CleaningStep] = ()
    """Steps applied to each document, in this order; none by default, so the text is taken as it
    is."""
    tokenizer: TokenizerSpec
    """How text becomes tokens."""
    validation_permille: Annotated[int, Field(ge=1, le=999)]
    """Thousandths of the characters, at the end of the text and rounded down, that are held out for
    validation."""

    @model_validator(mode="after")
    def _no_step_twice(self) -> Self:
        if len(set(self.cleaning)) != len(self.cleaning):
            raise ValueError(f"cleaning: expected each step once, found {list(self.cleaning)}")
        return self
