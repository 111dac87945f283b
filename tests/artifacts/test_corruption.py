"""Damage of every kind is found when the damaged thing is read, and named."""

import os
import shutil

import numpy as np
import pytest

from artifacts import (
    Attestation,
    Record,
    Store,
    find_records,
    load_bundle,
    open_run,
    read_attestations,
    read_digests,
    read_folder,
    read_record,
    read_run,
    record_bundles,
    save_bundle,
    sources_digest,
    write_attestation,
    write_digests,
    write_folder,
    write_record,
)
from artifacts.bundle import load_manifest
from artifacts.errors import Corrupt, Missing


@pytest.fixture
def bundle(store):
    """Compressed, shuffled and raw chunks are among them."""
    tensors = {
        "m/w": np.linspace(1, 2, 60, dtype=np.float32),
        "v/w": np.linspace(3, 4, 60, dtype=np.float32),
        "history/digest": np.arange(32, dtype=np.uint8),
        "zero": np.zeros(40, np.int64),
    }
    return save_bundle(store, tensors, {"step": 1})


@pytest.fixture
def record(store, bundle):
    record = Record(
        **dict.fromkeys(("pipeline", "specification", "dataset", "tokenizer"), "a" * 64),
        lock=[],
        configuration={},
        tier="portable",
        first_bundle=bundle,
        final_bundle=bundle,
        steps=1,
        digests=write_digests(store, [bytes(range(32))]),
        results={"loss": 1.25},
        sources={},
        sources_digest=sources_digest({}),
        hardware=None,
        tolerance=None,
    )
    return write_record(store, record, {1: bundle})


@pytest.fixture
def full(store, bundle, record):
    """A store with one of everything."""
    write_attestation(store, Attestation(record, "trained", {"verdict": "x"}, {}, "", ""))
    with open_run(store, "r") as run:
        run.record_bundle(1, bundle)
        run.set_state("complete")
        run.set_lineage({"from": None})
    return store


def reader_of(store, path):
    """What reads the file at `path`, as a function without arguments."""
    match path.relative_to(store.path).parts:
        case ["STORE_FORMAT"]:
            return lambda: Store(store.path, read_only=True).path
        case ["objects", shard, rest]:
            return lambda: store.get(shard + rest)
        case ["index", "records", record]:
            return lambda: (find_records(store), record_bundles(store, record))
        case ["attestations", record, _]:
            return lambda: read_attestations(store, record)
        case ["runs", run_id, _]:
            return lambda: read_run(store, run_id)
    raise AssertionError(path)


def flips(path):
    """Flips every bit of a file in turn, and restores it."""
    os.chmod(path, 0o644)
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(path.read_bytes()):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)
                yield at, bit
            os.pwrite(file.fileno(), bytes([byte]), at)


def test_every_bit_flip_is_found_or_changes_nothing(full):
    found = harmless = 0
    for path in sorted(full.path.rglob("*")):
        if path.is_dir() or path.stat().st_size == 0:  # locks are empty
            continue
        read = reader_of(full, path)
        before = read()
        for _ in flips(path):
            try:
                after = read()
            except Corrupt as error:
                assert error.exit_code == 4
                found += 1
            else:
                assert after == before
                harmless += 1
        assert read() == before
    assert found > 10_000
    assert harmless < 0.001 * found  # bits of a zstd frame that mean nothing


def test_every_bit_flip_in_a_folder_is_found(store, tmp_path):
    folder = tmp_path / "folder"
    bundle = save_bundle(store, {"x": np.arange(3, dtype=np.float32)}, {"step": 1})
    write_folder(store, bundle, folder)
    for path in sorted(folder.rglob("*.*")):
        for _ in flips(path):
            with pytest.raises(Corrupt):
                read_folder(folder, bundle)
    read_folder(folder, bundle)


def chunk_path(store, bundle, tensor):
    return store.object_path(load_manifest(store, bundle).tensor(tensor).chunks[0])


def test_truncated_and_lengthened_files(full, bundle, record):
    for path in sorted(full.path.rglob("*")):
        if path.is_dir() or path.stat().st_size == 0:
            continue
        read, data = reader_of(full, path), path.read_bytes()
        os.chmod(path, 0o644)
        for longer in (data + b"\0", data + data):
            path.write_bytes(longer)
            with pytest.raises(Corrupt):
                read()
        for size in reversed(range(len(data))):
            os.truncate(path, size)
            with pytest.raises(Corrupt):
                read()
        path.write_bytes(data)


def test_swapped_moments(store, bundle):
    """Adam's m in the place of v: both are whole objects, of the same size, under a wrong name."""
    m, v = chunk_path(store, bundle, "m/w"), chunk_path(store, bundle, "v/w")
    m.rename(m.with_suffix(".tmp"))
    v.rename(m)
    m.with_suffix(".tmp").rename(v)
    with pytest.raises(Corrupt, match=f"tensor m/w, chunk 0: object {m.parent.name}{m.name}"):
        load_bundle(store, bundle)


def test_a_duplicate_in_the_place_of_another(store, bundle):
    m, v = chunk_path(store, bundle, "m/w"), chunk_path(store, bundle, "v/w")
    v.unlink()
    shutil.copy(m, v)
    with pytest.raises(Corrupt, match="tensor v/w, chunk 0"):
        load_bundle(store, bundle)


def test_a_manifest_with_swapped_chunks_is_another_bundle(store, bundle):
    manifest = load_manifest(store, bundle)
    m, v = (manifest.tensor(name).chunks[0].encode() for name in ("m/w", "v/w"))
    data = store.get(bundle).replace(m, b"X").replace(v, m).replace(b"X", v)
    assert store.put(data) != bundle


@pytest.mark.parametrize("how", ["removed", "renamed", "upper case", "a folder", "unreadable"])
def test_a_missing_object_is_named_with_its_tensor(store, bundle, how):
    path = chunk_path(store, bundle, "m/w")
    match how:
        case "removed":
            path.unlink()
        case "renamed":
            path.rename(path.with_name("0" * 62))
        case "upper case":
            path.rename(path.with_name(path.name.upper()))
        case "a folder":
            path.unlink()
            path.mkdir()
        case "unreadable":
            path.unlink()
            path.symlink_to(path)
    with pytest.raises(Corrupt, match="tensor m/w, chunk 0: object " + path.parent.name) as error:
        load_bundle(store, bundle)
    assert error.value.exit_code == 4


def test_a_missing_manifest_record_and_digests(full, bundle, record):
    digests = read_record(full, record).digests
    for name, read in (
        (bundle, lambda: load_bundle(full, bundle)),
        (digests, lambda: read_digests(full, read_record(full, record))),
        (record, lambda: read_record(full, record)),
    ):
        full.object_path(name).unlink()
        with pytest.raises(Missing, match=name):
            read()


def test_saving_heals_a_damaged_object(store, bundle, caplog):
    path = chunk_path(store, bundle, "m/w")
    content = store.get(path.parent.name + path.name)
    os.chmod(path, 0o644)
    path.write_bytes(path.read_bytes()[:-1])
    again = Store(store.path)
    assert again.put(content, width=4) == path.parent.name + path.name
    assert "damaged object" in caplog.text
    load_bundle(again, bundle)
