"""Everything that a record needs, in one order: what is pushed, pulled, exported and imported."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from artifacts import canonical
from artifacts.bundle import load_manifest
from artifacts.encoding import MAX_CONTENT
from artifacts.record import DIGEST_SIZE, read_record
from artifacts.store import Store


@dataclass(frozen=True)
class Needed:
    """An object that a record reaches.

    limit     bytes that its content may have at most
    width     bytes of the numbers it is made of, 1 if it is not
    followed  whether it is read to find the objects after it
    """

    name: str
    what: str
    limit: int
    width: int = 1
    followed: bool = False


def walk(store: Store, record: str, listed: Mapping[int, str]) -> Iterator[Needed]:
    """The objects of a record with the bundles `listed`, each once: the record, its digests, then by step every
    bundle's manifest and its chunks as the manifest has them.

    An object that is `followed` has to be in `store` when the next one is asked for, so this works as well for what
    is just being received. Missing or Corrupt if it cannot be read then.
    """
    seen = {record}
    yield Needed(record, f"record {record}", canonical.MAX_BYTES, followed=True)
    found = read_record(store, record)
    if found.digests not in seen:
        seen.add(found.digests)
        limit = min(DIGEST_SIZE * found.steps, MAX_CONTENT)
        yield Needed(found.digests, f"step digests of record {record}", limit)
    bundles = {**listed, 0: found.first_bundle, found.steps: found.final_bundle}
    for step in sorted(bundles):
        bundle = bundles[step]
        what = f"bundle {bundle} of step {step}"
        if bundle not in seen:
            seen.add(bundle)
            yield Needed(bundle, what, canonical.MAX_BYTES, followed=True)
        for entry in load_manifest(store, bundle).tensors:
            for number, chunk in enumerate(entry.chunks):
                if chunk not in seen:
                    seen.add(chunk)
                    width = entry.ITEM_SIZES[entry.dtype]
                    yield Needed(chunk, f"tensor {entry.name} of {what}", entry.chunk_length(number), width)
