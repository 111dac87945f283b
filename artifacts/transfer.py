"""Moving records, with everything they reach, between a store and a remote one: only what is missing there, verified
where it arrives, and in an order that lets an interrupted transfer be repeated.

Objects come first and the index last, so a record is listed only once it is whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from artifacts import attestation, canonical, encoding, index, sealed
from artifacts.bundle import parallel
from artifacts.bundle_list import merge_bundles
from artifacts.errors import Ambiguous, Corrupt, InvalidInput
from artifacts.hashing import hash_bytes, is_hash
from artifacts.remote import Remote
from artifacts.store import Store
from artifacts.walk import Needed, walk

# Transfers mostly wait for the other side.
_THREADS = 8
_INDEX = "index/records"


@dataclass(frozen=True)
class Transfer:
    """What was moved: `sent` objects of `bytes` in all; `present` ones were there already."""

    records: tuple[str, ...]
    sent: int
    present: int
    bytes: int


def push(store: Store, url: str, records: Sequence[str] | None = None) -> Transfer:
    """Copies records (full hashes; None: all) with everything they reach to `url`.

    Every object is verified before it goes, and read back and verified there. Missing and Corrupt as `get`, RunDiffers
    if a record is listed there with another bundle for the same step, RemoteFailed.
    """
    remote = Remote(url)
    with store.using():
        chosen = index.records(store) if records is None else list(records)
        unknown = sorted(set(chosen) - set(index.records(store)))
        if unknown:
            raise InvalidInput(f"no record {unknown[0]} in {store.path}")
        remote.create()
        with remote.using():
            counts = [_push_record(store, remote, record) for record in chosen]
    return _total(chosen, counts)


def pull(store: Store, url: str, prefixes: Sequence[str] | None = None) -> Transfer:
    """Copies records from `url` (hashes or their first digits; None: all) with everything they reach into `store`.

    Every object is verified before it is taken in. InvalidInput for a record that is not there, Ambiguous, Missing and
    Corrupt if the other side is not whole, RemoteFailed.
    """
    remote = Remote(url)
    store.require_writable()
    remote.require()
    with remote.using(), store.using():
        chosen = _choose(remote, prefixes)
        counts = [_pull_record(store, remote, record) for record in chosen]
    return _total(chosen, counts)


def _total(records: list[str], counts: list[list[int | None]]) -> Transfer:
    sizes = [size for record in counts for size in record]
    sent = [size for size in sizes if size is not None]
    return Transfer(tuple(records), len(sent), len(sizes) - len(sent), sum(sent))


def _choose(remote: Remote, prefixes: Sequence[str] | None) -> list[str]:
    there = remote.list(_INDEX)
    for name in there:
        if not is_hash(name):
            raise Corrupt(f"{_INDEX}/{name} at {remote.url} is not named by the hash of a record")
    if prefixes is None:
        return there
    chosen = []
    for prefix in prefixes:
        found = tuple(name for name in there if prefix and name.startswith(prefix))
        if not found:
            raise InvalidInput(f"no record at {remote.url} begins with {prefix!r}")
        if len(found) > 1:
            listed = "\n".join(f"  {name}" for name in found)
            raise Ambiguous(f"{prefix} could be any of\n{listed}", found)
        chosen.append(found[0])
    return chosen


# Push


def _push_record(store: Store, remote: Remote, record: str) -> list[int | None]:
    listed = index.bundles(store, record)
    needed = list(walk(store, record, listed))
    counts = parallel(lambda item: _send(store, remote, item), needed, _THREADS)
    for name, seen in attestation.read_attestations(store, record).items():
        remote.write(_attestation_path(record, name), canonical.dumps(attestation.statement(seen)))
    path = f"{_INDEX}/{record}"
    if remote.size(path) is not None:
        there = index.loads(remote.read(path, sealed.MAX_BYTES, path), f"{path} at {remote.url}")
        listed = merge_bundles(there, listed, f"record {record}")
    remote.write(path, index.dumps(listed))
    return counts


def _send(store: Store, remote: Remote, needed: Needed) -> int | None:
    """Bytes sent, or None if the object was there."""
    local, path = store.object_path(needed.name), _object_path(needed.name)
    store.view(needed.name, needed.limit)
    size = local.stat().st_size
    there = remote.size(path)
    # A file of the same size is the same one, whole. Another size means another encoding, or a
    # transfer that was cut off on a medium that does not write files as a whole.
    if there == size or (there is not None and _is_whole(remote, needed)):
        return None
    remote.send(local, path)
    _check(remote, needed)
    return size


def _is_whole(remote: Remote, needed: Needed) -> bool:
    try:
        _check(remote, needed)
    except Corrupt:
        return False
    return True


def _check(remote: Remote, needed: Needed) -> None:
    """Corrupt unless the object there has the content that its name says."""
    content = encoding.decode(_read(remote, needed), needed.limit, f"{needed.what} at {remote.url}")
    if hash_bytes(content) != needed.name:
        raise Corrupt(f"{needed.what}: object {needed.name} at {remote.url} has hash {hash_bytes(content)}")


# Pull


def _pull_record(store: Store, remote: Remote, record: str) -> list[int | None]:
    path = f"{_INDEX}/{record}"
    listed = index.loads(remote.read(path, sealed.MAX_BYTES, path), f"{path} at {remote.url}")
    later, counts, names = [], [], []
    for needed in walk(store, record, listed):
        names.append(needed.name)
        if needed.followed:
            counts.append(_receive(store, remote, needed))
        else:
            later.append(needed)
    counts += parallel(lambda item: _receive(store, remote, item), later, _THREADS)
    store.sync_objects(names)
    _pull_attestations(store, remote, record)
    index.add(store, record, listed)
    return counts


def _receive(store: Store, remote: Remote, needed: Needed) -> int | None:
    """Bytes received, or None if the object was here."""
    if store.holds_whole(needed.name):
        return None
    file = _read(remote, needed)
    try:
        store.adopt_object(needed.name, file, needed.limit)
    except Corrupt as error:
        raise type(error)(f"{needed.what} at {remote.url}: {error}") from error
    return len(file)


def _pull_attestations(store: Store, remote: Remote, record: str) -> None:
    for file in remote.list(f"attestations/{record}"):
        name = file.removesuffix(".json")
        what = f"attestation {file} of record {record} at {remote.url}"
        data = remote.read(_attestation_path(record, name), canonical.MAX_BYTES, what)
        attestation.write_attestation(store, attestation.loads_named(data, name, record, what))


# Both


def _read(remote: Remote, needed: Needed) -> bytes:
    return remote.read(_object_path(needed.name), encoding.HEADER_SIZE + needed.limit, needed.what)


def _object_path(name: str) -> str:
    return f"objects/{name[:2]}/{name[2:]}"


def _attestation_path(record: str, name: str) -> str:
    return f"attestations/{record}/{name}.json"
