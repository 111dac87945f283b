"""From the first digits of a hash to the record or bundle meant."""

import re
from dataclasses import dataclass
from typing import Literal

from artifacts.errors import Ambiguous, InvalidInput
from artifacts.record import find_records, record_bundles
from artifacts.runs import list_runs
from artifacts.store import Store

_PREFIX = re.compile(r"[0-9a-f]{4,64}", re.ASCII)


@dataclass(frozen=True)
class Resolved:
    """`records` are the records that list the bundle, or the record itself."""

    kind: Literal["record", "bundle"]
    hash: str
    records: tuple[str, ...]


def resolve(store: Store, prefix: str) -> Resolved:
    """The one record or bundle (of a record or run) whose hash begins with `prefix` (at least 4
    digits).

    InvalidInput if there is none, Ambiguous with all candidates if there are several.
    """
    if _PREFIX.fullmatch(prefix) is None:
        raise InvalidInput(f"{prefix!r}: expected 4 to 64 lower-case hexadecimal digits of a hash")
    found: dict[str, Resolved] = {}
    for record in find_records(store):
        if record.startswith(prefix):
            found[record] = Resolved("record", record, (record,))
    for bundle, records in _bundles(store).items():
        if bundle.startswith(prefix):
            found[bundle] = Resolved("bundle", bundle, tuple(sorted(records)))
    if not found:
        raise InvalidInput(f"no record and no bundle in {store.path} begins with {prefix}")
    if len(found) > 1:
        candidates = "\n".join(f"  {item.kind} {item.hash}" for _, item in sorted(found.items()))
        raise Ambiguous(f"{prefix} could be any of\n{candidates}", tuple(sorted(found)))
    return next(iter(found.values()))


def _bundles(store: Store) -> dict[str, set[str]]:
    """Every bundle that a record or run lists, with the records that do."""
    holders: dict[str, set[str]] = {}
    for record in find_records(store):
        for bundle in record_bundles(store, record).values():
            holders.setdefault(bundle, set()).add(record)
    for run in list_runs(store):
        for bundle in run.bundles.values():
            holders.setdefault(bundle, set())
    return holders
