"""fsck names what is missing, corrupt and unused; gc removes the unused and nothing else."""

import os

import numpy as np
import pytest

from artifacts import (
    Attestation,
    Record,
    Store,
    find_records,
    list_runs,
    load_bundle,
    open_run,
    read_record,
    record_bundles,
    save_bundle,
    sources_digest,
    verify_bundle,
    write_attestation,
    write_digests,
    write_record,
)
from artifacts.bundle import load_manifest
from artifacts.errors import Corrupt, InvalidInput
from artifacts.fsck import fsck
from artifacts.gc import gc
from artifacts.manifest import CHUNK_SIZE


def bundle(store, step):
    return save_bundle(store, {"w": np.full(50, step + 1, np.float32)}, {"step": step})


def commit(store, bundles, steps):
    record = Record(
        **dict.fromkeys(("pipeline", "specification", "dataset", "tokenizer"), "a" * 64),
        lock=[],
        configuration={},
        tier="portable",
        first_bundle=bundles[0],
        final_bundle=bundles[steps],
        steps=steps,
        digests=write_digests(store, [bytes(32)] * steps),
        results={},
        sources={},
        sources_digest=sources_digest({}),
        hardware=None,
        tolerance=None,
    )
    return write_record(store, record, bundles)


@pytest.fixture
def bundles(store):
    return {step: bundle(store, step) for step in range(6)}


@pytest.fixture
def record(store, bundles):
    return commit(store, {step: bundles[step] for step in range(5)}, 4)


@pytest.fixture
def run(store, bundles):
    with open_run(store, "r") as run:
        for step in (0, 3, 5):
            run.record_bundle(step, bundles[step])
    return "r"


def chunk(store, name):
    return load_manifest(store, name).tensor("w").chunks[0]


def overwrite(path, data):
    os.chmod(path, 0o644)
    path.write_bytes(data)


def test_a_whole_store(store, record, run):
    report = fsck(store)
    assert (report.missing, report.corrupt, report.dangling, report.leftovers) == ((), (), (), ())
    assert report.checked == report.objects == len(list(store.objects()))
    assert report.exit_code == 0
    assert fsck(Store(store.path, read_only=True)) == report


@pytest.mark.parametrize("sample", [0.0, 1.0])
@pytest.mark.parametrize("which", ["record", "digests", "first", "listed", "of run", "chunk"])
def test_missing_objects_are_found_whatever_the_sample(store, bundles, record, run, sample, which):
    name = {
        "record": record,
        "digests": read_record(store, record).digests,
        "first": bundles[0],
        "listed": bundles[2],
        "of run": bundles[5],
        "chunk": chunk(store, bundles[1]),
    }[which]
    store.object_path(name).unlink()
    report = fsck(store, sample)
    assert any(name in fault.message for fault in report.missing)
    assert report.corrupt == ()
    assert report.exit_code == 4
    if which == "chunk":
        [fault] = report.missing
        assert f"tensor w of bundle {bundles[1]} of record {record}" in fault.subject
    if which not in ("chunk", "digests"):  # these reach nothing further
        with pytest.raises(Corrupt, match="nothing was collected"):
            gc(store)


def test_corrupt_objects_are_found(store, bundles, record):
    victims = [bundles[1], chunk(store, bundles[2]), chunk(store, bundles[3])]
    for name in victims:
        overwrite(store.object_path(name), store.object_path(name).read_bytes()[:-1] + b"?")
    report = fsck(store)
    assert report.missing == ()
    assert len(report.corrupt) == 3
    for name in victims:
        assert sum(name in fault.message for fault in report.corrupt) == 1
    assert report.exit_code == 4
    assert len(fsck(store, 0.0).corrupt) == 1  # manifests are always read


def test_a_sample_reads_that_part(store):
    names = [store.put(bytes([n])) for n in range(100)]
    assert fsck(store, 0.05).checked == 5
    for name in names[:50]:
        overwrite(store.object_path(name), b"")
    assert 0 < len(fsck(store, 0.5).corrupt) < 50
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidInput, match="sample"):
            fsck(store, wrong)


def test_damaged_small_files_are_found(store, record, run):
    write_attestation(store, Attestation(record, "trained", {}, {}, "", ""))
    folder = store.path
    files = [
        folder / "index" / "records" / record,
        *(folder / "runs" / "r" / name for name in ("state", "bundles", "lineage")),
        *(folder / "attestations" / record).iterdir(),
    ]
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        report = fsck(store)
        assert len(report.corrupt) == 1, path
        assert report.missing == ()
        path.write_bytes(data)
    (folder / "index" / "records" / "notes").write_bytes(b"")
    assert len(fsck(store).corrupt) == 1


def test_gc_removes_only_what_nothing_reaches(store, bundles, record, run):
    unused = bundle(store, 77)
    (store.path / "tmp" / "left").write_bytes(b"half")
    (store.path / "objects" / "stray").write_bytes(b"?")
    removed = {unused, chunk(store, unused)}
    report = fsck(store)
    assert set(report.dangling) == removed
    assert {path.name for path in report.leftovers} == {"left", "stray"}
    assert report.exit_code == 0
    tried = gc(store, dry_run=True)
    assert set(tried.objects) == removed
    assert removed <= set(store.objects())
    done = gc(store)
    assert (done.objects, done.leftovers) == (tried.objects, tried.leftovers)
    assert done.freed == tried.freed > 0
    assert not removed & set(store.objects())
    report = fsck(store)
    assert (report.missing, report.corrupt, report.dangling, report.leftovers) == ((), (), (), ())
    for name in bundles.values():
        verify_bundle(store, name)
    assert gc(store).objects == ()


def test_keep_policies(store, bundles, record, run):
    tried = gc(store, dry_run=True, keep_last=2, keep_every=5)
    assert tried.dropped == {f"record {record}": (bundles[1], bundles[2])}
    assert set(record_bundles(store, record)) == {0, 1, 2, 3, 4}
    assert gc(store, keep_last=2, keep_every=5).dropped == tried.dropped
    assert set(record_bundles(store, record)) == {0, 3, 4}
    for step in (1, 2):
        with pytest.raises(Corrupt):
            load_bundle(store, bundles[step])
    dropped = gc(store, keep_last=1).dropped
    assert dropped == {f"record {record}": (bundles[3],), "run r": (bundles[3],)}
    [info] = list_runs(store)
    assert set(info.bundles) == {0, 5}
    assert fsck(store).exit_code == 0
    for policy in ({"keep_last": 0}, {"keep_every": 0}):
        with pytest.raises(InvalidInput, match="at least 1"):
            gc(store, **policy)


def test_a_run_that_was_only_about_to_be_made_is_no_obstacle(store, run):
    (store.path / "runs" / "new").mkdir()
    assert fsck(store).exit_code == 0
    gc(store)
    assert [info.run_id for info in list_runs(store)] == ["r"]


def test_a_chunk_that_holds_a_manifest(store):
    """The bundle inside is followed though its manifest is known as a chunk already."""
    inner = bundle(store, 1)
    data = np.frombuffer(store.get(inner), np.uint8)
    outer = save_bundle(store, {"a": data}, {})
    with open_run(store, "r") as run:
        run.record_bundle(0, outer)
        run.record_bundle(1, inner)
    gc(store)
    verify_bundle(store, inner)


def test_a_record_removed_from_the_index_is_collected(store, bundles, record):
    (store.path / "index" / "records" / record).unlink()
    assert find_records(store) == []
    gc(store)
    assert list(store.objects()) == []


def test_fsck_of_chunks(store):
    name = save_bundle(store, {"w": np.arange(CHUNK_SIZE // 2, dtype=np.uint32)}, {})
    with open_run(store, "r") as run:
        run.record_bundle(0, name)
    assert fsck(store).checked == 3
