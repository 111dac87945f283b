"""The object store: put, get, and the conditions it has to work under."""

import os
import shutil
import stat

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from artifacts import Store, encoding, filesystem, load_bundle, open_run, save_bundle
from artifacts.errors import Corrupt, InvalidInput, Missing, NoSpace, ReadOnly, UnknownVersion
from artifacts.hashing import hash_bytes

HEADER = b"SBOB\x01\x01\x01\x00"


@given(st.binary(max_size=100), st.integers(1, 200), st.sampled_from([1, 2, 4, 8]))
def test_encoding_round_trips(part, repeats, width):
    content = part * repeats
    file = b"".join(bytes(piece) for piece in encoding.encode(memoryview(content), width, 1))
    assert bytes(encoding.decode(file, len(content), "it")) == content
    assert len(file) <= len(content) + encoding.HEADER_SIZE


@given(st.binary(max_size=60))
def test_any_bytes_after_a_header_are_read_or_refused(rest):
    for file in (rest, HEADER + rest, HEADER + len(rest).to_bytes(8, "little") + rest):
        try:
            content = encoding.decode(file, 1000, "it")
        except Corrupt:
            continue
        assert len(content) <= 1000


def frame(content, **options):
    return zstandard.ZstdCompressor(**options).compress(content)


def header(length, code=1, width=1, version=1, reserved=0):
    return b"SBOB" + bytes([version, code, width, reserved]) + length.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "shorter"),
        (b"SBOC" + HEADER[4:] + bytes(8), "not an object"),
        (header(0, version=2), "version 2"),
        (header(0, code=3), "unknown encoding"),
        (header(0, code=2), "split numbers of 1 bytes"),
        (header(4, code=2, width=4) + b"\0\0\0\0", "too few"),
        (header(0, width=3), "width 3"),
        (header(0, reserved=1), "reserved 1"),
        (header(2**63), "at most"),
        (header(3, code=0) + b"ab", "holds 2"),
        (header(3, code=0) + b"abcd", "holds 4"),
        (header(3, code=0, width=4) + b"abc", "raw"),
        (header(3), "no zstd frame"),
        (header(3) + frame(b"abcd"), "frame 4"),
        (header(3) + frame(b"abc") + b"x", "damaged|extra|unused"),
        (header(3) + frame(b"abc") + frame(b""), "damaged|extra|unused"),
        (header(3) + frame(b"abc", write_content_size=False), "frame"),
        (header(3) + b"\x50\x2a\x4d\x18\x00\x00\x00\x00" + frame(b"abc"), "no zstd frame"),
        # A frame that declares 2^62 bytes, and one whose declared size is a lie.
        (header(3) + b"\x28\xb5\x2f\xfd\xe0" + (2**62).to_bytes(8, "little"), "frame"),
        (header(900) + b"\x28\xb5\x2f\xfd\x60" + (900 - 256).to_bytes(2, "little"), "damaged"),
    ],
)
def test_malformed_objects(file, message):
    with pytest.raises(Corrupt, match=message):
        encoding.decode(file, 1000, "it")


def test_a_declared_length_is_not_allocated_before_it_is_checked(store):
    """A bomb: 64 MiB of zeros in 2 KB, where a record of at most 8 MiB is expected."""
    name = store.put(bytes(encoding.MAX_CONTENT))
    assert store.object_path(name).stat().st_size < 10_000
    with pytest.raises(Corrupt, match="at most 8388608"):
        store.get(name, limit=8 * 2**20)
    with pytest.raises(InvalidInput, match="at most"):
        store.put(bytes(encoding.MAX_CONTENT + 1))


@pytest.mark.parametrize("content", [b"", b"x", bytes(1000), bytes(range(256))], ids=len)
def test_put_and_get(store, content):
    name = store.put(content)
    assert name == hash_bytes(content)
    assert store.has(name)
    assert store.get(name) == content
    assert list(store.objects()) == [name]
    mode = store.object_path(name).stat().st_mode
    assert not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)


def test_all_names_are_lower_case(store, tensors):
    with open_run(store, "r") as run:
        run.record_bundle(0, save_bundle(store, tensors, {}))
    names = [path.name for path in store.path.rglob("*") if path.name != "STORE_FORMAT"]
    assert names == [name.lower() for name in names]


@pytest.mark.parametrize("name", ["", "ab", "g" * 64, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n"])
def test_names_that_are_no_hashes(store, name):
    for ask in (store.get, store.has):
        with pytest.raises(InvalidInput, match="64 lower-case"):
            ask(name)


def test_what_is_not_a_store(tmp_path):
    with pytest.raises(Missing, match="no store"):
        Store(tmp_path / "nothing", read_only=True)
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "notes.txt").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"neither a store .* nor empty \(notes.txt\)"):
        Store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "notes.txt").rename(tmp_path / "STORE_FORMAT")
    with pytest.raises(Corrupt, match="STORE_FORMAT"):
        Store(tmp_path)
    (tmp_path / "STORE_FORMAT").write_bytes(b"samebits store 2\n")
    with pytest.raises(UnknownVersion, match="samebits store 2"):
        Store(tmp_path)


def test_a_store_is_made_below_missing_folders(tmp_path):
    store = Store(tmp_path / "a" / "b c" / "ö")
    assert Store(store.path).get(store.put(b"x")) == b"x"


def test_read_only_use_changes_nothing(store, tensors):
    name = save_bundle(store, tensors, {})
    before = sorted(store.path.rglob("*"))
    reader = Store(store.path, read_only=True)
    load_bundle(reader, name)
    for write in (
        lambda: reader.put(b"new"),
        lambda: save_bundle(reader, tensors, {}),
        lambda: open_run(reader, "r"),
    ):
        with pytest.raises(ReadOnly, match="read-only"):
            write()
    assert sorted(store.path.rglob("*")) == before


@pytest.mark.parametrize("read_only", [True, False])
def test_a_folder_that_cannot_be_written(store, tensors, monkeypatch, read_only):
    name = save_bundle(store, tensors, {})

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    for call in ("open_new", "make_directory", "rename", "unlink", "sync_directory"):
        monkeypatch.setattr(f"artifacts.filesystem.{call}", refuse)
    monkeypatch.setattr("artifacts.filesystem.open_lock", refuse)
    reader = Store(store.path, read_only)
    with reader.using():
        load_bundle(reader, name)
    with pytest.raises(ReadOnly):
        reader.put(b"new")


@pytest.mark.parametrize("lock", ["missing", "unreadable", "no folder"])
def test_a_lock_that_cannot_be_opened_is_done_without_to_read_and_never_to_write(store, tensors, monkeypatch, lock):
    name = save_bundle(store, tensors, {})
    if lock != "unreadable":
        (store.path / "locks" / "store").unlink()
    if lock == "no folder":
        shutil.rmtree(store.path / "locks")
    real = filesystem.open_read

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    def open_read(path):
        return refuse(path) if path.name == "store" and lock == "unreadable" else real(path)

    monkeypatch.setattr("artifacts.filesystem.open_lock", refuse)
    monkeypatch.setattr("artifacts.filesystem.open_read", open_read)
    if lock == "no folder":
        monkeypatch.setattr("artifacts.filesystem.make_directory", refuse)
    reader = Store(store.path)
    load_bundle(reader, name)
    for write in (lambda: reader.put(b"new"), lambda: reader.write_file(store.path / "runs" / "x", b"new")):
        with pytest.raises(ReadOnly, match="cannot write"):
            write()
    assert not list(reader.temporary_files())


@pytest.mark.parametrize("number", [28, 122])
def test_a_full_disk_or_quota_is_said(store, monkeypatch, number):
    def full(descriptor, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("artifacts.filesystem.write", full)
    with pytest.raises(NoSpace, match="no space left") as error:
        store.put(b"x")
    assert error.value.exit_code == 6
    assert list(store.temporary_files()) == []


def test_short_writes_and_reads_are_completed(store, monkeypatch):
    monkeypatch.setattr("artifacts.filesystem.write", lambda descriptor, data: os.write(descriptor, data[:7]))
    monkeypatch.setattr("artifacts.filesystem.read", lambda descriptor, size: os.read(descriptor, min(size, 5)))
    content = np.random.default_rng(0).bytes(1000)
    assert store.get(store.put(content)) == content


def test_a_reading_error_names_the_object(store, monkeypatch):
    name = store.put(b"x")

    def broken(descriptor, size):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("artifacts.filesystem.read", broken)
    with pytest.raises(Corrupt, match=rf"object {name}: cannot read .*Input/output error"):
        store.get(name)
