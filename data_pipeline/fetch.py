"""Fetch: sources to a directory of raw documents with a manifest."""

import shutil
from pathlib import Path

from blake3 import blake3

from data_pipeline import canonical
from data_pipeline.atomic import new_directory
from data_pipeline.errors import SourceError
from data_pipeline.manifest import MANIFEST, RawDocument, RawManifest
from data_pipeline.sources import Document, Places
from data_pipeline.spec import DataSpec

DOCUMENTS = "documents"


def fetch(spec: DataSpec, directory: Path, root: Path) -> RawManifest:
    """Write the documents of `spec.sources`, exactly as fetched, and a manifest to `directory`.

    Files are numbered in the order of the documents, so no name of a source can clash or escape;
    the manifest maps them to names, sizes and BLAKE3 hashes. The directory appears whole or not at
    all. A download that was cut off is kept in `.<directory>.downloads` beside it until a fetch
    succeeds.

    root: the project, which the paths of `file` sources start from.
    Raises SourceError, CorruptDataError, StorageError, NoSpaceError.
    """
    downloads = directory.absolute().with_name(f".{directory.absolute().name}.downloads")
    with new_directory(directory) as partial:
        places = Places(root.absolute(), partial / "scratch", downloads)
        places.scratch.mkdir()
        (partial / DOCUMENTS).mkdir()
        entries: list[RawDocument] = []
        for index, source in enumerate(spec.sources):
            for document in source.documents(places):
                entries.append(_write(document, index, f"{DOCUMENTS}/{len(entries):06d}.txt", partial))
        _check_names(entries)
        places.scratch.rmdir()
        manifest = RawManifest(format="samebits raw 1", sources=spec.sources, documents=tuple(entries))
        (partial / MANIFEST).write_bytes(canonical.encode(manifest))
    shutil.rmtree(downloads, ignore_errors=True)
    return manifest


def _write(document: Document, source: int, file: str, directory: Path) -> RawDocument:
    digest, size = blake3(), 0
    with (directory / file).open("xb") as out:
        for chunk in document.chunks:
            out.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return RawDocument(name=document.name, source=source, file=file, size=size, blake3=digest.hexdigest())


def _check_names(entries: list[RawDocument]) -> None:
    """Refuse a document that two sources give: text that counts twice is a mistake more often than
    a wish."""
    first: dict[str, int] = {}
    for entry in entries:
        if (other := first.setdefault(entry.name, entry.source)) != entry.source:
            raise SourceError(
                f"expected every document once, found {entry.name!r} in sources {other} and "
                f"{entry.source}: "
                "remove it from one of them"
            )
