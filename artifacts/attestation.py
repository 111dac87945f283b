"""Attestations: who saw a record trained or verified, on which machine, with which verdict.

An in-toto Statement v1 in canonical JSON, `attestations/<record>/<BLAKE3 of the file>.json`. A
record may have any number of them; two that disagree are both kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import canonical, durable, filesystem
from artifacts.canonical import JSON
from artifacts.errors import Corrupt, InvalidInput
from artifacts.hashing import hash_bytes, is_hash, require_hash
from artifacts.store import Store

PREDICATE_TYPE = "urn:samebits:attestation:1"

_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_FIELDS = {"_type", "predicate", "predicateType", "subject"}
_PREDICATE_FIELDS = {"activity", "environment", "finished", "started", "verdict"}
_ACTIVITIES = ("trained", "verified")
_SUFFIX = ".json"


@dataclass(frozen=True)
class Attestation:
    """One observation of a record.

    record       hash of the record
    activity     "trained" or "verified"
    verdict      JSON object: the verdict and what it rests on
    environment  JSON object: the fingerprint of the machine
    started, finished   when, as text (RFC 3339, UTC)
    """

    record: str
    activity: str
    verdict: Mapping[str, JSON]
    environment: Mapping[str, JSON]
    started: str
    finished: str


def write_attestation(store: Store, attestation: Attestation) -> str:
    """Stores an attestation and returns its hash. InvalidInput if the record is not in the
    store."""
    require_hash(attestation.record, "record of an attestation")
    with store.using():
        if not store.has(attestation.record):
            raise InvalidInput(f"no record {attestation.record} in the store to attest to")
        data = canonical.dumps(statement(attestation))
        name = hash_bytes(data)
        try:
            loads(data, attestation.record, "attestation")
        except Corrupt as error:
            raise InvalidInput(f"this attestation could not be read again: {error}") from error
        store.write_file(_folder(store, attestation.record) / (name + _SUFFIX), data)
    return name


def read_attestations(store: Store, record: str) -> dict[str, Attestation]:
    """All attestations of a record by their hash, sorted. Corrupt if one was altered, renamed or
    moved."""
    folder = _folder(store, require_hash(record, "record"))
    found = {}
    for file in filesystem.list_directory(folder):
        what = f"attestation {folder / file}"
        name = file.removesuffix(_SUFFIX)
        if not file.endswith(_SUFFIX) or not is_hash(name):
            raise Corrupt(f"{what}: not named by a hash")
        data = durable.read_whole(folder / file, canonical.MAX_BYTES, what)
        found[name] = loads_named(data, name, record, what)
    return found


def statement(attestation: Attestation) -> dict[str, JSON]:
    """The in-toto statement of an attestation."""
    return {
        "_type": _STATEMENT_TYPE,
        "subject": [{"name": "record", "digest": {"blake3": attestation.record}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "activity": attestation.activity,
            "environment": attestation.environment,
            "finished": attestation.finished,
            "started": attestation.started,
            "verdict": attestation.verdict,
        },
    }


def loads_named(data: bytes, name: str, record: str, what: str) -> Attestation:
    """`loads`, but Corrupt also unless `name` is the hash of `data`."""
    if hash_bytes(data) != name:
        raise Corrupt(f"{what}: content has hash {hash_bytes(data)}")
    return loads(data, record, what)


def loads(data: bytes, record: str, what: str) -> Attestation:
    """The attestation to `record` whose canonical bytes are `data`. Corrupt, naming `what`."""
    value = canonical.loads(data, what)
    if not isinstance(value, dict) or set(value) != _FIELDS:
        raise Corrupt(f"{what}: not an in-toto statement with the fields {sorted(_FIELDS)}")
    if value["_type"] != _STATEMENT_TYPE or value["predicateType"] != PREDICATE_TYPE:
        raise Corrupt(f"{what}: type {value['_type']!r} of {value['predicateType']!r} is unknown")
    if value["subject"] != [{"name": "record", "digest": {"blake3": record}}]:
        raise Corrupt(f"{what}: its subject is not record {record}")
    predicate: Any = value["predicate"]
    if not isinstance(predicate, dict) or set(predicate) != _PREDICATE_FIELDS:
        raise Corrupt(f"{what}: the predicate needs the fields {sorted(_PREDICATE_FIELDS)}")
    texts_fit = all(isinstance(predicate[field], str) for field in ("started", "finished"))
    objects_fit = all(isinstance(predicate[field], dict) for field in ("verdict", "environment"))
    if predicate["activity"] not in _ACTIVITIES or not texts_fit or not objects_fit:
        raise Corrupt(f"{what}: the predicate has a field of the wrong kind")
    return Attestation(record=record, **predicate)


def _folder(store: Store, record: str) -> Path:
    return store.path / "attestations" / record
