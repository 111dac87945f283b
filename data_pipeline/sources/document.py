"""What every source has in common."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.strict import Strict

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """A named document; `chunks` are its bytes in order, to be read once, before the next document
    is asked for."""

    name: str
    chunks: Iterator[bytes]


@dataclass(frozen=True)
class Places:
    """Directories a source may use.

    root: the project, which relative paths start from. scratch: empty, removed after the fetch.
    downloads: kept when a fetch fails, so that the next one goes on from there.
    """

    root: Path
    scratch: Path
    downloads: Path


class SourceSpec(Strict):
    """A declared source."""

    @abstractmethod
    def documents(self, places: Places) -> Iterator[Document]:
        """Yield the documents, sorted by the UTF-8 bytes of their names.

        Raises SourceError where they cannot be had, CorruptDataError where bytes differ from a
        pinned hash.
        """


def file_chunks(path: Path | bytes) -> Iterator[bytes]:
    """The bytes of a file, piece by piece; it is opened when the first piece is asked for."""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
