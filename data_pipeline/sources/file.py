"""Source `file`: files of the project."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from data_pipeline.errors import SourceError
from data_pipeline.patterns import Pattern, files_matching, in_order, on_disk
from data_pipeline.sources.document import Document, Places, SourceSpec, file_chunks
from data_pipeline.strict import Sequence


class FileSource(SourceSpec):
    """Files below the project's root. A file that several patterns match is taken once."""

    kind: Literal["file"]
    """The source's name."""
    paths: Annotated[Sequence[Pattern], Field(min_length=1)]
    """Paths or patterns (see data_pipeline.patterns) relative to the root; each must match at least
    one file."""

    def documents(self, places: Places) -> Iterator[Document]:
        names: list[str] = []
        for pattern in self.paths:
            matches = files_matching(places.root, pattern)
            if not matches:
                raise SourceError(
                    f"source file: expected files matching {pattern!r} under {places.root}, found "
                    "none: "
                    "correct the pattern or add the files"
                )
            names += matches
        for name in in_order(names):
            yield Document(name, file_chunks(on_disk(places.root, name)))
