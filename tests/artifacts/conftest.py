"""A store in a folder whose name has a space and letters outside ASCII, and small states."""

import copy
import functools
import os

import numpy as np
import pytest

from artifacts import (
    Attestation,
    Record,
    Store,
    filesystem,
    save_bundle,
    sources_digest,
    write_attestation,
    write_digests,
    write_record,
)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "ein Läger 倉庫")


@pytest.fixture
def tensors():
    random = np.random.default_rng(7)
    return {
        "weights/wte": random.standard_normal((40, 8)).astype(np.float32),
        "weights/ln_f.bias": np.zeros(8, np.float32),
        "m/wte": random.standard_normal((40, 8)).astype(np.float32),
        "v/wte": np.zeros((40, 8), np.float32),
        "history/loss": np.empty(0, np.float32),
        "history/digest": np.arange(64, dtype=np.uint8).reshape(2, 32),
        "step": np.array(2, np.int64),
    }


class Crash(BaseException):
    """The process is gone: nothing that catches Exception sees it."""


CHANGES = (
    "open_new",
    "open_lock",
    "write",
    "sync",
    "rename",
    "unlink",
    "make_directory",
    "sync_directory",
)


class FaultyDisk:
    """Counts the calls that change the disk and lets one of them fail.

    With `kind` "crash" that call and all later ones fail, a write after half of its bytes; with an
    errno only that call does. Syncs do nothing: what is simulated is the process, not the medium.
    """

    def __init__(self, monkeypatch):
        self.calls = []
        self.fail_at = None
        self.kind = None
        for name in CHANGES:
            real = getattr(filesystem, name)
            monkeypatch.setattr(filesystem, name, functools.partial(self._call, name, real))

    def arm(self, fail_at, kind):
        self.calls, self.fail_at, self.kind = [], fail_at, kind

    def _call(self, name, real, *arguments):
        number = len(self.calls)
        self.calls.append(name)
        if self.fail_at is not None:
            crashed = self.kind == "crash" and number >= self.fail_at
            if number == self.fail_at and name == "write":
                descriptor, data = arguments
                real(descriptor, data[: len(data) // 2])
            if crashed:
                raise Crash
            if number == self.fail_at:
                raise OSError(self.kind, os.strerror(self.kind))
        if name in ("sync", "sync_directory"):
            return None
        return real(*arguments)


@pytest.fixture
def disk(monkeypatch):
    return FaultyDisk(monkeypatch)


@pytest.fixture
def crash():
    return Crash


class Medium:
    """Follows every change below `root` and can lay out what a power cut would leave of it.

    Files and folders have what the process sees (`now`) and what is certainly on the medium
    (`kept`): a file's bytes after its sync, a folder's entries after its sync.
    """

    def __init__(self, monkeypatch, root):
        self.root = root
        self.bytes_now, self.bytes_kept = {}, {}
        self.entries_now, self.entries_kept = {}, {}
        self.descriptors = {}
        self.moments = []
        for path in [root, *root.rglob("*")]:
            if path.is_dir():
                entries = {child.name: child.stat().st_ino for child in path.iterdir()}
                self.entries_now[path], self.entries_kept[path] = entries, dict(entries)
            else:
                inode = path.stat().st_ino
                self.bytes_now[inode] = self.bytes_kept[inode] = path.read_bytes()
        for name in CHANGES:
            real = getattr(filesystem, name)
            monkeypatch.setattr(filesystem, name, functools.partial(self._call, name, real))

    def _call(self, name, real, *arguments):
        result = None if "sync" in name else real(*arguments)
        getattr(self, f"_{name}")(result, *arguments)
        self.moments.append(copy.deepcopy((self.bytes_now, self.bytes_kept)))
        self.moments[-1] += (copy.deepcopy(self.entries_now), copy.deepcopy(self.entries_kept))
        return result

    def _open_new(self, descriptor, path, mode):
        inode = path.stat().st_ino
        self.descriptors[descriptor] = inode
        self.bytes_now[inode], self.bytes_kept[inode] = b"", b""
        self.entries_now[path.parent][path.name] = inode

    def _open_lock(self, descriptor, path):
        inode = path.stat().st_ino
        self.bytes_now[inode] = self.bytes_kept[inode] = b""
        self.entries_now[path.parent][path.name] = inode

    def _write(self, written, descriptor, data):
        self.bytes_now[self.descriptors[descriptor]] += bytes(data[:written])

    def _sync(self, _, descriptor):
        inode = self.descriptors[descriptor]
        self.bytes_kept[inode] = self.bytes_now[inode]

    def _rename(self, _, source, target):
        inode = self.entries_now[source.parent].pop(source.name)
        self.entries_now[target.parent][target.name] = inode

    def _unlink(self, _, path):
        del self.entries_now[path.parent][path.name]

    def _make_directory(self, _, path):
        self.entries_now[path] = {}
        self.entries_kept[path] = {}
        self.entries_now[path.parent][path.name] = path.stat().st_ino

    def _sync_directory(self, _, path):
        self.entries_kept[path] = dict(self.entries_now[path])

    @staticmethod
    def lay_out(moment, root, target, entries):
        """The folder `root` as it may be found after a power cut at `moment`, written to `target`.

        `entries` "kept": every entry that was not synced is lost. "now": all entries are there, but
        files that were not synced are empty.
        """
        _, kept, entries_now, entries_kept = moment
        folders = entries_kept if entries == "kept" else entries_now

        def write(path, to):
            to.mkdir()
            for name, inode in folders[path].items():
                if path / name in folders:
                    write(path / name, to / name)
                else:
                    (to / name).write_bytes(kept[inode])

        write(root, target)


@pytest.fixture
def medium(monkeypatch):
    return lambda root: Medium(monkeypatch, root)


@pytest.fixture
def lay_out():
    return Medium.lay_out


@pytest.fixture
def committed(store, tensors):
    """A store with a record of two steps, a bundle in between and two attestations; the record's hash."""
    bundles = {step: save_bundle(store, {**tensors, "step": np.array(step)}, {"step": step}) for step in (0, 1, 2)}
    record = write_record(
        store,
        Record(
            pipeline="a" * 64,
            lock={},
            configuration={"train": {"steps": 2}},
            specification="b" * 64,
            dataset="c" * 64,
            tokenizer="d" * 64,
            tier="portable",
            first_bundle=bundles[0],
            final_bundle=bundles[2],
            steps=2,
            digests=write_digests(store, [b"\x01" * 32, b"\x02" * 32]),
            results={"validation_loss": 2.0},
            sources={},
            sources_digest=sources_digest({}),
            hardware=None,
            tolerance=None,
        ),
        {1: bundles[1]},
    )
    for verdict in ("bit-exact", "differs"):
        write_attestation(
            store,
            Attestation(
                record=record,
                activity="verified",
                verdict={"verdict": verdict},
                environment={"cpu": "X"},
                started="2026-01-01T00:00:00Z",
                finished="2026-01-01T00:01:00Z",
            ),
        )
    return record
