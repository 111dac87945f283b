"""The health of a store: what is missing, what is corrupt, and what lies there unused."""

import random
from dataclasses import dataclass
from pathlib import Path

from artifacts import filesystem, runs
from artifacts.attestation import read_attestations
from artifacts.bundle import parallel
from artifacts.errors import Corrupt, InvalidInput
from artifacts.references import Fault, References, find_references
from artifacts.store import Store


@dataclass(frozen=True)
class FsckReport:
    """`missing` and `corrupt` lose data; `dangling` objects and `leftovers` are for `gc`.

    `objects` counts the objects in the store, `checked` those of them whose content was verified.
    """

    missing: tuple[Fault, ...]
    corrupt: tuple[Fault, ...]
    dangling: tuple[str, ...]
    leftovers: tuple[Path, ...]
    objects: int
    checked: int

    @property
    def exit_code(self) -> int:
        """0 if nothing is lost, 4 otherwise."""
        return Corrupt.exit_code if self.missing or self.corrupt else 0


def fsck(store: Store, sample: float = 1.0) -> FsckReport:
    """Checks everything in `store`, but of the chunks' content only a random part `sample`.

    What is missing is always found, whatever `sample`; calling with 0.05 now and then finds decay
    of the medium at a twentieth of the cost. InvalidInput unless 0 <= sample <= 1.
    """
    if not 0 <= sample <= 1:
        raise InvalidInput(f"sample {sample}: expected a part between 0 and 1")
    with store.using():
        found = find_references(store)
        present = set(store.objects())
        unread = sorted(present - found.read)
        # A fresh choice every time: repeated samples come to see every object.
        chosen = sorted(random.SystemRandom().sample(unread, round(sample * len(unread))))
        known = {fault.subject for fault in found.corrupt}
        for subject, message in parallel(lambda name: _check(store, name, found), chosen):
            if message is not None and subject not in known:
                found.corrupt.append(Fault(subject, message))
        for name in sorted(set(found.needed) - present):
            if found.needed[name] not in {fault.subject for fault in found.missing}:
                found.missing.append(Fault(found.needed[name], f"object {name} is missing"))
        _check_attestations(store, found)
        _check_runs(store, found)
        leftovers = [*store.strays(), *store.temporary_files()]
    return FsckReport(
        missing=tuple(found.missing),
        corrupt=tuple(found.corrupt),
        dangling=tuple(sorted(present - set(found.needed))),
        leftovers=tuple(leftovers),
        objects=len(present),
        checked=len(chosen) + len(found.read & present),
    )


def _check(store: Store, name: str, found: References) -> tuple[str, str | None]:
    subject = found.needed.get(name, f"object {name}")
    try:
        store.check(name)
    except Corrupt as error:
        return subject, str(error)
    return subject, None


def _check_attestations(store: Store, found: References) -> None:
    for record in filesystem.list_directory(store.path / "attestations"):
        subject = f"attestations of record {record}"
        found.attempt(subject, read_attestations, store, record)


def _check_runs(store: Store, found: References) -> None:
    for run_id in runs.run_ids(store):
        found.attempt(f"run {run_id}", runs.read_run, store, run_id)
