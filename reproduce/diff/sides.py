"""What is compared: a record, a run or a bundle, and what is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from artifacts import (
    RunInfo,
    Store,
    list_runs,
    load_bundle,
    read_attestations,
    read_record,
    resolve,
)
from artifacts.errors import Ambiguous, InvalidInput
from artifacts.store import FORMAT_FILE
from reproduce.diff.contents import Contents
from reproduce.errors import Inconclusive, ReproduceError
from reproduce.lineage import Lineage
from reproduce.naming import refuse_final
from reproduce.state import Identity
from reproduce.verification.integrity import bundles_by_step


@dataclass(frozen=True)
class Side:
    """kind: record, run or bundle. digests, losses: after each step done, from step 1. bundles: saved states by step.

    contents: of every tensor after each step, where the tier keeps them. environments: of those who say that they
    trained it. sessions: first step of each process that worked on it.
    """

    kind: str
    name: str
    store: Store
    identity: Identity
    sources: Mapping[str, str]
    digests: list[bytes]
    losses: npt.NDArray[np.float32]
    bundles: Mapping[int, str]
    contents: Contents | None
    environments: list[Mapping[str, Any]] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name[:12]}"

    @property
    def first_step(self) -> int:
        return min(self.bundles)


def is_store(text: str) -> bool:
    """Whether it names the folder of a store."""
    return (Path(text) / FORMAT_FILE).is_file()


def open_store(text: str) -> Store:
    """The store in a folder, to read. Raises ReproduceError."""
    if not is_store(text):
        raise ReproduceError(
            f"{text} is no store: expected a folder with a file {FORMAT_FILE}, such as .samebits/store"
        )
    return Store(Path(text), read_only=True)


def find_side(store: Store, text: str) -> Side:
    """The record, run or bundle whose name begins with `text`, or FOLDER:NAME for one in the store of a folder. Raises
    InvalidInput, Ambiguous, Inconclusive, ReproduceError."""
    folder, colon, prefix = text.rpartition(":")
    refuse_final(prefix)
    if colon:
        store = open_store(folder)
    runs = [info for info in list_runs(store) if info.run_id.startswith(prefix)] if len(prefix) >= 4 else []
    try:
        found = resolve(store, prefix)
    except Ambiguous:
        raise
    except InvalidInput as error:
        if len(runs) == 1:
            return _of_run(store, runs[0])
        if len(runs) > 1:
            listed = "\n".join(f"  run {info.run_id}" for info in runs)
            raise ReproduceError(f"{prefix} could be any of\n{listed}\ngive more digits") from error
        raise ReproduceError(f"{error}, and no run either: `reproduce log` lists what there is") from error
    if runs:
        raise ReproduceError(f"{prefix} could be {found.kind} {found.hash} or run {runs[0].run_id}: give more digits")
    return _of_record(store, found.hash) if found.kind == "record" else _of_bundle(store, found.hash, found.records)


def _of_record(store: Store, name: str) -> Side:
    record = read_record(store, name)
    final = load_bundle(store, record.final_bundle).tensors
    trained = [a for a in read_attestations(store, name).values() if a.activity == "trained"]
    return Side(
        "record",
        name,
        store,
        Identity(record.configuration, record.dataset, record.tokenizer),
        record.sources,
        _digests(final),
        final["history/loss"],
        bundles_by_step(store, name, record),
        Contents.of(final),
        [a.environment for a in trained],
        _sessions_of(store, record.final_bundle),
    )


def _of_run(store: Store, info: RunInfo) -> Side:
    lineage = Lineage.read(info.lineage, info.run_id)
    if lineage is None or not info.bundles:
        raise Inconclusive(f"run {info.run_id} has saved no bundle yet: go on with it (`dvc repro`), or compare later")
    newest = load_bundle(store, info.bundles[max(info.bundles)]).tensors
    return Side(
        "run",
        info.run_id,
        store,
        Identity(lineage.configuration, lineage.dataset, lineage.tokenizer),
        lineage.sources,
        _digests(newest),
        newest["history/loss"],
        info.bundles,
        Contents.of(newest),
        sessions=[session.first_step for session in lineage.sessions],
    )


def _of_bundle(store: Store, name: str, records: tuple[str, ...]) -> Side:
    """A bundle, with what the record or run that lists it knows; what came after it is left out."""
    holder = _of_record(store, records[0]) if records else None
    for info in list_runs(store):
        if holder is None and name in info.bundles.values():
            holder = _of_run(store, info)
    if holder is None:
        raise Inconclusive(
            f"bundle {name} belongs to no run or record in {store.path}, so what it was made with is not known: "
            "pull or import the record that it is of"
        )
    tensors = load_bundle(store, name).tensors
    step = len(tensors["history/loss"])
    bundles = {s: b for s, b in holder.bundles.items() if s < step} | {step: name}
    return Side(
        "bundle",
        name,
        store,
        holder.identity,
        holder.sources,
        _digests(tensors),
        tensors["history/loss"],
        bundles,
        Contents.of(tensors),
        holder.environments,
        [s for s in holder.sessions if s <= step],
    )


def _digests(tensors: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
    return [bytes(row) for row in tensors["history/digest"]]


def _sessions_of(store: Store, final: str) -> list[int]:
    """The sessions of the run that a record was made of, if the store still has it."""
    for info in list_runs(store):
        if final in info.bundles.values():
            lineage = Lineage.read(info.lineage, info.run_id)
            return [] if lineage is None else [session.first_step for session in lineage.sessions]
    return []
