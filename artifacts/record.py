"""Records: what a committed run is, under one hash."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import ConfigDict, Field, JsonValue

from artifacts import canonical, index
from artifacts.bundle import load_manifest
from artifacts.document import make_document, open_document
from artifacts.encoding import MAX_CONTENT
from artifacts.errors import Corrupt, InvalidInput
from artifacts.hashing import hash_bytes, require_hash
from artifacts.store import Store

_FORMAT = "samebits record"
DIGEST_SIZE = 32
MOST_STEPS = MAX_CONTENT // DIGEST_SIZE
"""Steps of which a record can hold the digests: they are one object."""

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Record(pydantic.BaseModel):
    """A committed run. Every field enters its hash, and nothing else does.

    pipeline        BLAKE3 of the bytes of dvc.yaml lock            the canonical lock entries of
    the stages before commit configuration   the resolved configuration without run options
    specification   BLAKE3 of the canonical model specification dataset         hash of the dataset
    version tokenizer       hash of the tokenizer tier            portable, debug or prod
    first_bundle    bundle before the first step final_bundle    bundle after the last step steps
    number of training steps digests         object of the digests of all steps (see
    `write_digests`) results         final losses and what else the run is judged by, without
    timings sources         BLAKE3 of every normative source file, by its path with `/`
    sources_digest  BLAKE3 of the canonical JSON of `sources` hardware        the class of hardware
    and libraries that the bits depend on; null for portable, else required tolerance       the
    declared tolerance; null for portable, else required
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    pipeline: Hash
    lock: JsonValue
    configuration: dict[str, JsonValue]
    specification: Hash
    dataset: Hash
    tokenizer: Hash
    tier: Literal["portable", "debug", "prod"]
    first_bundle: Hash
    final_bundle: Hash
    steps: Annotated[int, Field(ge=0)]
    digests: Hash
    results: dict[str, JsonValue]
    sources: dict[str, Hash]
    sources_digest: Hash
    hardware: dict[str, JsonValue] | None
    tolerance: dict[str, JsonValue] | None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "Record":
        if self.sources_digest != sources_digest(self.sources):
            raise ValueError("sources_digest is not the digest of sources")
        given = [field is not None for field in (self.hardware, self.tolerance)]
        if self.tier == "portable" and any(given):
            raise ValueError("a portable record has neither hardware class nor tolerance")
        if self.tier != "portable" and not all(given):
            raise ValueError(f"a {self.tier} record needs hardware class and tolerance")
        return self


def sources_digest(sources: Mapping[str, str]) -> str:
    """One hash over the hashes of the normative source files, by path."""
    return hash_bytes(canonical.dumps(sources))


def write_digests(store: Store, digests: Sequence[bytes]) -> str:
    """Stores the digests of all steps, 32 bytes each in the order of the steps; returns the
    object's hash."""
    for step, digest in enumerate(digests):
        if len(digest) != DIGEST_SIZE:
            raise InvalidInput(f"digest of step {step} has {len(digest)} bytes, not {DIGEST_SIZE}")
    return store.put(b"".join(digests))


def read_digests(store: Store, record: Record) -> list[bytes]:
    """The digests of all steps of a record; Corrupt if there are more or fewer than steps."""
    data = store.get(record.digests)
    if len(data) != DIGEST_SIZE * record.steps:
        raise Corrupt(f"object {record.digests}: {len(data)} bytes, expected the digests of {record.steps} steps")
    return [data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE)]


def dumps(record: Record) -> bytes:
    """The canonical bytes of a record; their BLAKE3 is its hash."""
    return canonical.dumps(make_document(_FORMAT, record.model_dump(mode="json")))


def loads(data: bytes, what: str) -> Record:
    """The record whose canonical bytes are `data`; Corrupt or UnknownVersion, naming `what`."""
    fields: Any = open_document(canonical.loads(data, what), _FORMAT, set(Record.model_fields), what)
    try:
        return Record(**fields)
    except pydantic.ValidationError as error:
        raise Corrupt(f"{what}: not a valid record: {error}") from error


def write_record(store: Store, record: Record, bundles: Mapping[int, str]) -> str:
    """Stores and indexes a record; returns its hash.

    `bundles` are the bundles in between, by step. They are listed beside the record and do not
    change its hash; what is listed already stays. Missing or Corrupt if a bundle or the digests are
    not in the store.
    """
    with store.using():
        read_digests(store, record)
        for bundle in {record.first_bundle, record.final_bundle, *bundles.values()}:
            load_manifest(store, require_hash(bundle, "bundle"))
        name = store.put(dumps(record))
        index.add(store, name, bundles)
    return name


def read_record(store: Store, name: str) -> Record:
    """The record `name`, verified."""
    return loads(store.get(name, canonical.MAX_BYTES), f"record {name}")


def find_records(store: Store) -> list[str]:
    """Hashes of all records, sorted."""
    return index.records(store)


def record_bundles(store: Store, name: str) -> dict[int, str]:
    """All listed bundles of record `name` by step, the first and the final one included."""
    record = read_record(store, name)
    ends = {0: record.first_bundle, record.steps: record.final_bundle}
    return dict(sorted({**index.bundles(store, name), **ends}.items()))
