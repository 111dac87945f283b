"""A capsule: one file that holds a record and all it needs to be verified without anything else.

It is a tar file of a narrow kind (see ustar.py), so that it can be looked into with any tar, and its bytes follow from
what is in it: no time, no compression, one order. The members are described in docs/format.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from artifacts import attestation, canonical, durable, filesystem, index, ustar
from artifacts.bundle_list import list_entries, read_entries
from artifacts.canonical import JSON
from artifacts.document import make_document, open_document
from artifacts.errors import Corrupt, InvalidInput, Missing
from artifacts.hashing import hash_bytes, is_hash
from artifacts.record import Record, read_record
from artifacts.store import Store
from artifacts.ustar import MemberReader
from artifacts.walk import Needed, walk

_FORMAT = "samebits capsule"
_FIELDS = {"attestations", "bundles", "files", "record"}
_CONTENTS = "capsule.json"
_MAX_FILE_NAME = ustar.MAX_NAME - len("files/")


@dataclass(frozen=True)
class File:
    """A file besides the record's own: `hash` is the BLAKE3 of its bytes, `size` is in bytes."""

    name: str
    hash: str
    size: int


@dataclass(frozen=True)
class Contents:
    """What a capsule holds, as its first member says."""

    record: str
    bundles: Mapping[int, str]
    attestations: tuple[str, ...]
    files: tuple[File, ...]


def export_capsule(
    store: Store,
    record: str,
    path: str | Path,
    files: Mapping[str, Path] | None = None,
    every_bundle: bool = False,
) -> Contents:
    """Writes record, step digests, first and final bundle (with `every_bundle` those in between too), attestations
    and `files` (by the name they are to have) to the new file `path`.

    The same content gives the same bytes. Errors: InvalidInput (path taken, names that a capsule cannot hold), Missing
    and Corrupt as `get`, NoSpace.
    """
    path = Path(path).absolute()
    if filesystem.exists(path):
        raise InvalidInput(f"{path} is there already: remove it or name another file")
    extra = {} if files is None else dict(files)
    _check_names(list(extra))
    with store.using():
        if record not in index.records(store):
            raise InvalidInput(f"no record {record} in {store.path}")
        listed = index.bundles(store, record) if every_bundle else {}
        seen = attestation.read_attestations(store, record)
        contents = Contents(
            record,
            _with_ends(read_record(store, record), listed),
            tuple(seen),
            tuple(_describe(name, extra[name]) for name in sorted(extra)),
        )
        statements = {name: canonical.dumps(attestation.statement(seen[name])) for name in seen}
        durable.write_whole(path, _members(store, contents, statements, extra), path.parent)
        with durable.write_errors(path.parent):
            filesystem.sync_directory(path.parent)
    return contents


def begins_as_capsule(path: str | Path) -> bool:
    """Whether `path` is a file whose first member is called as that of a capsule: to tell a slip from damage."""
    first = _CONTENTS.encode("ascii") + b"\0"
    try:
        with Path(path).open("rb") as file:
            return file.read(len(first)) == first
    except IsADirectoryError:
        return False


def import_capsule(store: Store, path: str | Path, folder: str | Path | None = None) -> Contents:
    """Takes a capsule's record with everything it needs into `store`, and its files into the new or empty `folder`
    (without one they are only verified).

    Every byte is verified before it is taken in, and the record is listed last. Memory stays within one object.
    Errors: Missing, Corrupt and UnknownVersion naming the member, InvalidInput (folder not empty), RunDiffers, NoSpace.
    """
    path = Path(path)
    target = None if folder is None else Path(folder).absolute()
    if target is not None and filesystem.exists(target) and filesystem.list_directory(target):
        raise InvalidInput(f"{target} is not empty: remove it or name another folder")
    store.require_writable()
    try:
        file = path.open("rb")
    except OSError as error:
        raise Missing(f"capsule {path}: cannot open: {error.strerror}") from error
    with file, store.using():
        members = MemberReader(file, f"capsule {path}")
        contents = _read_contents(members)
        names = [_import_object(store, members, needed) for needed in walk(store, contents.record, contents.bundles)]
        _check_bundles(store, contents, members.what)
        store.sync_objects(names)
        seen = [_read_attestation(members, contents.record, name) for name in contents.attestations]
        for extra in contents.files:
            _import_file(members, extra, target)
        if members.next() is not None:
            raise Corrupt(f"{members.what}: holds more than its contents say")
        for item in seen:
            attestation.write_attestation(store, item)
        index.add(store, contents.record, contents.bundles)
    return contents


def _with_ends(record: Record, listed: Mapping[int, str]) -> dict[int, str]:
    bundles = {**listed, 0: record.first_bundle, record.steps: record.final_bundle}
    return dict(sorted(bundles.items()))


# Export


def _describe(name: str, path: Path) -> File:
    digest, size = blake3(), 0
    for part in _parts(path):
        digest.update(part)
        size += len(part)
    return File(name, digest.hexdigest(), size)


def _parts(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while part := file.read(ustar.PART):
                yield part
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error


def _members(
    store: Store, contents: Contents, statements: Mapping[str, bytes], files: Mapping[str, Path]
) -> Iterator[bytes | memoryview]:
    yield from _member(_CONTENTS, canonical.dumps(_document(contents)))
    for needed in walk(store, contents.record, contents.bundles):
        yield from _member(f"objects/{needed.name}", store.view(needed.name, needed.limit))
    for name, data in statements.items():
        yield from _member(f"attestations/{name}.json", data)
    for file in contents.files:
        yield ustar.header(f"files/{file.name}", file.size)
        yield from _unchanged(file, files[file.name])
        yield ustar.padding(file.size)
    yield ustar.END


def _member(name: str, content: bytes | memoryview) -> Iterator[bytes | memoryview]:
    yield ustar.header(name, len(content))
    yield content
    yield ustar.padding(len(content))


def _unchanged(file: File, path: Path) -> Iterator[bytes]:
    digest, size = blake3(), 0
    for part in _parts(path):
        digest.update(part)
        size += len(part)
        if size > file.size:
            break
        yield part
    if size != file.size or digest.hexdigest() != file.hash:
        raise InvalidInput(f"{path} changed while it was read: export again")


def _document(contents: Contents) -> dict[str, JSON]:
    files: list[JSON] = [{"hash": file.hash, "name": file.name, "size": file.size} for file in contents.files]
    return make_document(
        _FORMAT,
        {
            "attestations": contents.attestations,
            "bundles": list_entries(contents.bundles),
            "files": files,
            "record": contents.record,
        },
    )


# Import


def _read_contents(members: MemberReader) -> Contents:
    what = f"{members.what}: {_CONTENTS}"
    value = canonical.loads(_read_member(members, _CONTENTS, canonical.MAX_BYTES), what)
    fields: Any = open_document(value, _FORMAT, _FIELDS, what)
    record, attestations, files = fields["record"], fields["attestations"], fields["files"]
    if not is_hash(record):
        raise Corrupt(f"{what}: its record is not a hash")
    if not isinstance(attestations, list) or not all(map(is_hash, attestations)):
        raise Corrupt(f"{what}: its attestations are not a list of hashes")
    if attestations != sorted(set(attestations)):
        raise Corrupt(f"{what}: its attestations are not sorted, each once")
    if not isinstance(files, list):
        raise Corrupt(f"{what}: its files are not a list")
    described = tuple(_read_file(file, what) for file in files)
    names = [file.name for file in described]
    try:
        _check_names(names)
    except InvalidInput as error:
        raise Corrupt(f"{what}: {error}") from error
    if names != sorted(names):
        raise Corrupt(f"{what}: its files are not sorted by name")
    return Contents(record, read_entries(fields["bundles"], what), tuple(attestations), described)


def _read_file(value: JSON, what: str) -> File:
    if not isinstance(value, dict) or set(value) != {"hash", "name", "size"}:
        raise Corrupt(f"{what}: a file needs the fields hash, name, size")
    name, digest, size = value["name"], value["hash"], value["size"]
    sized = isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= ustar.MAX_SIZE
    if not isinstance(name, str) or not is_hash(digest) or not sized:
        raise Corrupt(f"{what}: a file has a field of the wrong kind")
    assert isinstance(digest, str)
    assert isinstance(size, int)
    return File(name, digest, size)


def _check_names(names: list[str]) -> None:
    """InvalidInput unless all of them can be files of one folder, on a case-insensitive filesystem too."""
    folded: set[str] = set()
    folders: set[str] = set()
    for name in names:
        if not ustar.is_name(name) or len(name) > _MAX_FILE_NAME:
            raise InvalidInput(
                f"file name {name!r}: expected at most {_MAX_FILE_NAME} of A-Z a-z 0-9 _ . - in parts joined by /, "
                "none beginning with a dot"
            )
        lower = name.lower()
        if lower in folded:
            raise InvalidInput(f"file name {name!r} is there twice, but for upper and lower case")
        folded.add(lower)
        parts = lower.split("/")
        folders |= {"/".join(parts[:count]) for count in range(1, len(parts))}
    if both := sorted(folded & folders):
        raise InvalidInput(f"{both[0]!r} would be both a file and a folder")


def _expect(members: MemberReader, name: str, limit: int) -> int:
    """The size of the next member, which has to be `name`."""
    found = members.next()
    if found is None or found[0] != name:
        raise Corrupt(f"{members.what}: expected {name}, found {found[0] if found else 'the end'}")
    if found[1] > limit:
        raise Corrupt(f"{members.what}: {name} has {found[1]} bytes, at most {limit} are allowed")
    return found[1]


def _read_member(members: MemberReader, name: str, limit: int) -> bytes:
    return b"".join(members.content(_expect(members, name, limit)))


def _import_object(store: Store, members: MemberReader, needed: Needed) -> str:
    content = _read_member(members, f"objects/{needed.name}", needed.limit)
    if hash_bytes(content) != needed.name:
        raise Corrupt(f"{members.what}: {needed.what}: content has hash {hash_bytes(content)}, not {needed.name}")
    return store.write_object(content, needed.width)


def _check_bundles(store: Store, contents: Contents, what: str) -> None:
    record = read_record(store, contents.record)
    if dict(contents.bundles) != _with_ends(record, contents.bundles):
        raise Corrupt(f"{what}: {_CONTENTS} lists other first and final bundles than the record")


def _read_attestation(members: MemberReader, record: str, name: str) -> attestation.Attestation:
    member = f"attestations/{name}.json"
    data = _read_member(members, member, canonical.MAX_BYTES)
    return attestation.loads_named(data, name, record, f"{members.what}: {member}")


def _import_file(members: MemberReader, file: File, folder: Path | None) -> None:
    name = f"files/{file.name}"
    if _expect(members, name, file.size) != file.size:
        raise Corrupt(f"{members.what}: {name} has not the {file.size} bytes that {_CONTENTS} says")
    parts = _hashed(members, file)
    if folder is None:
        for _ in parts:
            pass
        return
    target = folder / file.name
    durable.make_directories(target.parent)
    durable.write_whole(target, parts, target.parent)
    with durable.write_errors(target.parent):
        filesystem.sync_directory(target.parent)


def _hashed(members: MemberReader, file: File) -> Iterator[bytes]:
    digest = blake3()
    for part in members.content(file.size):
        digest.update(part)
        yield part
    if digest.hexdigest() != file.hash:
        raise Corrupt(f"{members.what}: files/{file.name} has hash {digest.hexdigest()}, not {file.hash}")
