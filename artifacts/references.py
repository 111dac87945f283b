"""Which objects a store's records and runs reach: what `gc` keeps and `fsck` looks for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from artifacts import index, runs
from artifacts.bundle import load_manifest
from artifacts.errors import Corrupt, InvalidInput, Missing
from artifacts.record import read_record
from artifacts.store import Store

_T = TypeVar("_T")

Policy: TypeAlias = Callable[[Mapping[int, str]], dict[int, str]]
"""From the bundles of a run or record, by step, to those of them that are kept."""


@dataclass(frozen=True)
class Fault:
    """Something that cannot be read: its file or object, and what is wrong with it."""

    subject: str
    message: str


@dataclass
class References:
    """`needed` maps every reached object to what needs it; `read` holds those of them that were
    read and verified on the way (records and manifests); `followed` are the bundles gone
    through."""

    needed: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    missing: list[Fault] = field(default_factory=list)
    corrupt: list[Fault] = field(default_factory=list)
    followed: set[str] = field(default_factory=set)

    def attempt(self, subject: str, action: Callable[..., _T], *args: object) -> _T | None:
        """The result of `action(*args)`, or None with its fault noted."""
        try:
            return action(*args)
        except Missing as error:
            _note(self.missing, Fault(subject, str(error)))
        except (Corrupt, InvalidInput) as error:
            _note(self.corrupt, Fault(subject, str(error)))
        return None


def _note(faults: list[Fault], fault: Fault) -> None:
    if fault not in faults:
        faults.append(fault)


def find_references(store: Store, policy: Policy = dict) -> References:
    """Everything that records and runs reach, and what could not be read on the way there.

    Of every list of bundles only what `policy` makes of it counts. Chunks are only listed, not
    looked at.
    """
    found = References()
    for record in found.attempt("index", index.records, store) or ():
        _follow_record(store, record, policy, found)
    for run_id in runs.run_ids(store):
        listed = found.attempt(f"run {run_id}", runs.listed, store, run_id)
        _follow_bundles(store, policy(listed or {}).values(), f"run {run_id}", found)
    return found


def _follow_record(store: Store, name: str, policy: Policy, found: References) -> None:
    subject = f"record {name}"
    found.needed.setdefault(name, subject)
    record = found.attempt(subject, read_record, store, name)
    listed = found.attempt(subject, index.bundles, store, name) or {}
    if record is not None:
        found.read.add(name)
        found.needed.setdefault(record.digests, subject)
        listed = {**listed, 0: record.first_bundle, record.steps: record.final_bundle}
    _follow_bundles(store, policy(listed).values(), subject, found)


def _follow_bundles(store: Store, names: Iterable[str], holder: str, found: References) -> None:
    for name in names:
        # Not `found.needed`: a chunk may happen to hold the bytes of a manifest.
        if name in found.followed:
            continue
        found.followed.add(name)
        subject = f"bundle {name} of {holder}"
        found.needed.setdefault(name, subject)
        manifest = found.attempt(subject, load_manifest, store, name)
        if manifest is None:
            continue
        found.read.add(name)
        for entry in manifest.tensors:
            for chunk in entry.chunks:
                found.needed.setdefault(chunk, f"tensor {entry.name} of {subject}")
