"""Runs in progress: who writes them, how far they are, and the bundles saved so far.

runs/<run>/lock      taken by the one writer
runs/<run>/state     sealed: status and the writing process
runs/<run>/bundles   sealed: bundles by step
runs/<run>/lineage   sealed: whatever JSON the caller keeps there
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from filelock import FileLock, Timeout

from artifacts import durable, filesystem
from artifacts.bundle import load_manifest, verify_bundle
from artifacts.bundle_list import merge_bundles, read_bundle_list, write_bundle_list
from artifacts.canonical import JSON
from artifacts.document import make_document, open_document
from artifacts.errors import (
    Corrupt,
    DamagedBundle,
    InvalidInput,
    Missing,
    RunLocked,
)
from artifacts.process import Process, this_process
from artifacts.sealed import read_sealed, seal
from artifacts.store import Store

Status = Literal["running", "interrupted", "complete", "failed"]

_BUNDLES = "samebits run bundles"
_STATE = "samebits run state"
_LINEAGE = "samebits run lineage"
_RUN_ID = re.compile(r"[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?", re.ASCII)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """What a run was like when it was looked at. `status` is "interrupted" for a running one whose
    process is gone."""

    run_id: str
    status: Status
    process: Process
    bundles: Mapping[int, str]
    lineage: JSON


class Run:
    """A run opened for writing by this process; a context manager that gives up the lock at its
    end."""

    def __init__(self, store: Store, run_id: str, lock: FileLock) -> None:
        self.store = store
        self.run_id = run_id
        self._folder = _folder(store, run_id)
        self._lock = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives up the lock. A status "running" that is left now reads as "interrupted" once the
        process ends."""
        self._lock.release()

    def bundles(self) -> dict[int, str]:
        """The bundles saved so far, by step."""
        return _read_bundles(self._folder, self.run_id)

    def record_bundle(self, step: int, bundle: str) -> None:
        """Adds a whole bundle to the list, durably.

        Call it within the `store.using()` that `bundle` was saved in. RunDiffers if the run had
        other bits at `step` before; Missing if the bundle is not in the store.
        """
        with self.store.using():
            load_manifest(self.store, bundle)
            merged = merge_bundles(self.bundles(), {step: bundle}, f"run {self.run_id}")
            write_bundle_list(self.store, self._folder / "bundles", _BUNDLES, merged)

    def last_bundle(self) -> tuple[int, str] | None:
        """Step and hash of the newest bundle, every byte of it verified; None if none was saved.

        DamagedBundle if the newest one is missing or corrupt; the error names the newest whole one
        before it, to be taken up only by an explicit decision.
        """
        damaged: Corrupt | None = None
        for step, bundle in sorted(self.bundles().items(), reverse=True):
            try:
                verify_bundle(self.store, bundle)
            except Corrupt as error:
                log.error("run %s, step %d: %s", self.run_id, step, error)
                damaged = damaged or error
                continue
            if damaged is None:
                return step, bundle
            raise DamagedBundle(
                f"run {self.run_id}: its newest bundle cannot be read: {damaged}\n"
                f"The newest whole one is {bundle} of step {step}: "
                f"go on from it with `reproduce resume {bundle}`",
                (step, bundle),
            ) from damaged
        if damaged is None:
            return None
        raise DamagedBundle(
            f"run {self.run_id}: none of its bundles can be read; the newest: {damaged}\n"
            "`reproduce pull URL` or `reproduce import CAPSULE` brings back those of a record elsewhere; to start "
            f"anew, move {self.store.path} away and run `reproduce train`",
            None,
        ) from damaged

    def set_state(self, status: Status) -> None:
        """Writes the status, with this process as its writer."""
        if status not in get_args(Status):
            raise InvalidInput(f"run status {status!r}: expected one of {get_args(Status)}")
        _write(self.store, self._folder / "state", _STATE, _state_json(status, this_process()))

    def set_lineage(self, lineage: JSON) -> None:
        """Replaces the lineage."""
        _write(self.store, self._folder / "lineage", _LINEAGE, lineage)


def open_run(store: Store, run_id: str) -> Run:
    """The run `run_id`, made if there is none, locked for this process and marked as running.

    RunLocked, naming the process, if another one writes it.
    """
    folder = _folder(store, run_id)
    store.require_writable()
    durable.make_directories(folder)
    lock = FileLock(folder / "lock", timeout=0, is_singleton=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunLocked(f"run {run_id} is being written by {_holder(folder)}") from error
    try:
        run = Run(store, run_id, lock)
        # The bundle list comes before the state: a folder with a state is a whole run.
        if not filesystem.exists(folder / "bundles"):
            write_bundle_list(store, folder / "bundles", _BUNDLES, {})
        if not filesystem.exists(folder / "lineage"):
            run.set_lineage(None)
        run.bundles()
        run.set_state("running")
    except BaseException:
        lock.release()
        raise
    return run


def read_run(store: Store, run_id: str) -> RunInfo | None:
    """The run as it is now, without its lock; None if it was only about to be made.

    Missing if there is no such run, or Corrupt.
    """
    folder = _folder(store, run_id)
    if not filesystem.exists(folder):
        raise Missing(f"no run {run_id} in {store.path}")
    if not filesystem.exists(folder / "state"):
        return None
    status, process = _read_state(folder, run_id)
    if status == "running" and not process.may_be_alive():
        status = "interrupted"
    lineage = _read(folder / "lineage", _LINEAGE, f"lineage of run {run_id}")
    return RunInfo(run_id, status, process, _read_bundles(folder, run_id), lineage)


def list_runs(store: Store) -> list[RunInfo]:
    """All runs, sorted by id, without those that were only about to be made."""
    found = (read_run(store, run_id) for run_id in run_ids(store))
    return [run for run in found if run is not None]


def run_ids(store: Store) -> list[str]:
    """Ids of all runs, sorted, also of those that were only about to be made."""
    return filesystem.list_directory(store.path / "runs")


def listed(store: Store, run_id: str) -> dict[int, str]:
    """The bundles of a run by step; none for one that was only about to be made."""
    folder = _folder(store, run_id)
    return _read_bundles(folder, run_id) if filesystem.exists(folder / "bundles") else {}


def replace_list(store: Store, run_id: str, bundles: Mapping[int, str]) -> None:
    """Lists exactly `bundles` for a run. For `gc`, which nobody writes beside."""
    write_bundle_list(store, _folder(store, run_id) / "bundles", _BUNDLES, bundles)


def _folder(store: Store, run_id: str) -> Path:
    if _RUN_ID.fullmatch(run_id) is None:
        raise InvalidInput(f"run {run_id!r}: expected 1 to 64 of a-z 0-9 _ -, a letter or digit at both ends")
    return store.path / "runs" / run_id


def _holder(folder: Path) -> str:
    try:
        return str(_read_state(folder, folder.name)[1])
    except Missing:
        return "a process that is just beginning"


def _read_bundles(folder: Path, run_id: str) -> dict[int, str]:
    return read_bundle_list(folder / "bundles", _BUNDLES, f"bundles of run {run_id}")


def _read_state(folder: Path, run_id: str) -> tuple[Status, Process]:
    what = f"state of run {run_id}"
    value = _read(folder / "state", _STATE, what)
    if not isinstance(value, dict) or set(value) != {"process", "status"}:
        raise Corrupt(f"{what}: expected process and status")
    status = value["status"]
    if status not in get_args(Status):
        raise Corrupt(f"{what}: unknown status {status!r}")
    return status, Process.from_json(value["process"], what)


def _state_json(status: Status, process: Process) -> JSON:
    return {"process": process.to_json(), "status": status}


def _write(store: Store, path: Path, kind: str, value: JSON) -> None:
    store.write_file(path, seal(make_document(kind, {"value": value})))


def _read(path: Path, kind: str, what: str) -> JSON:
    return open_document(read_sealed(path, what), kind, {"value"}, what)["value"]
