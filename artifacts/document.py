"""What all documents of the format have in common: a kind, a version and exactly the fields of
it."""

from collections.abc import Set

from artifacts.canonical import JSON
from artifacts.errors import Corrupt, UnknownVersion

VERSION = 1
"""The one version of every kind of document so far."""


def make_document(kind: str, fields: dict[str, JSON]) -> dict[str, JSON]:
    """The document of `kind` with `fields`."""
    return {"format": kind, "version": VERSION, **fields}


def open_document(value: JSON, kind: str, fields: Set[str], what: str) -> dict[str, JSON]:
    """The fields of a document of `kind`; Corrupt or UnknownVersion, naming `what`."""
    if not isinstance(value, dict) or value.get("format") != kind:
        raise Corrupt(f"{what}: not a document of the kind {kind!r}")
    version = value.get("version")
    if isinstance(version, bool) or version != VERSION:  # True == 1
        raise UnknownVersion(f"{what}: {kind} version {version!r}, this program reads {VERSION}")
    found = {name: item for name, item in value.items() if name not in ("format", "version")}
    if set(found) != fields:
        raise Corrupt(f"{what}: fields {sorted(found)}, expected {sorted(fields)}")
    return found
