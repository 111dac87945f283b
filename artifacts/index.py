"""The index of records: which objects are records, and which bundles lie between their first and
final one.

One sealed file per record, `index/records/<record>`. It is not part of the record: how often
bundles were saved changes no hash.
"""

from collections.abc import Mapping
from pathlib import Path

from artifacts import filesystem
from artifacts.bundle_list import (
    list_document,
    merge_bundles,
    open_bundle_list,
    read_bundle_list,
    write_bundle_list,
)
from artifacts.errors import Corrupt
from artifacts.hashing import is_hash
from artifacts.sealed import seal, unseal
from artifacts.store import Store

_FORMAT = "samebits record index"


def records(store: Store) -> list[str]:
    """Hashes of the indexed records, sorted. Corrupt if something else lies there."""
    names = filesystem.list_directory(_folder(store))
    for name in names:
        if not is_hash(name):
            raise Corrupt(f"{_folder(store) / name} is not named by the hash of a record")
    return names


def bundles(store: Store, record: str) -> dict[int, str]:
    """The bundles listed for a record, by step."""
    return read_bundle_list(_folder(store) / record, _FORMAT, f"index of record {record}")


def dumps(listed: Mapping[int, str]) -> bytes:
    """The bytes of the index file of a record."""
    return seal(list_document(_FORMAT, listed))


def loads(data: bytes, what: str) -> dict[int, str]:
    """The bundles listed in an index file with the bytes `data`. Corrupt, naming `what`."""
    return open_bundle_list(unseal(data, what), _FORMAT, what)


def add(store: Store, record: str, listed: Mapping[int, str]) -> None:
    """Lists a record, and `listed` beside the bundles that are listed for it already."""
    with store.exclusive_file("index"):
        path = _folder(store) / record
        before = bundles(store, record) if filesystem.exists(path) else {}
        merged = merge_bundles(before, listed, f"record {record}")
        write_bundle_list(store, path, _FORMAT, merged)


def replace(store: Store, record: str, listed: Mapping[int, str]) -> None:
    """Lists exactly `listed` for a record."""
    with store.exclusive_file("index"):
        write_bundle_list(store, _folder(store) / record, _FORMAT, listed)


def _folder(store: Store) -> Path:
    return store.path / "index" / "records"
