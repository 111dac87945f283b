"""Records pushed to and pulled from a local folder, memory and an S3-compatible server."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from artifacts import (
    Record,
    Store,
    find_records,
    load_bundle,
    read_attestations,
    read_digests,
    read_record,
    record_bundles,
    save_bundle,
    write_record,
)
from artifacts.errors import Ambiguous, Corrupt, InvalidInput, Missing, RemoteFailed, RunDiffers, UnknownVersion
from artifacts.fsck import fsck
from artifacts.gc import gc
from artifacts.transfer import pull, push

SERVER = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@pytest.fixture
def memory():
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://shelf/store"
    MemoryFileSystem.store.clear()


@pytest.fixture
def local(tmp_path):
    return str(tmp_path / "ein Regal 倉庫" / "store")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An S3-compatible server on the loopback interface, with the bucket `shelf`."""
    pytest.importorskip("s3fs")
    if SERVER is None:
        pytest.skip("no rclone to serve S3 with")
    root = tmp_path_factory.mktemp("buckets")
    (root / "shelf").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [SERVER, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "key,secret", str(root)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "RCLONE_CONFIG": os.devnull},
    )
    try:
        _await(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _await(port):
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail("the S3 server did not begin to listen")


@pytest.fixture
def s3(server, monkeypatch, request):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": server,
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://shelf/{request.node.name.partition('[')[0]}/store"


@pytest.fixture(params=["local", "memory", "s3"])
def url(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def other(tmp_path):
    return Store(tmp_path / "other")


def check_same(store, other, record):
    assert read_record(other, record) == read_record(store, record)
    assert record_bundles(other, record) == record_bundles(store, record)
    assert read_attestations(other, record) == read_attestations(store, record)
    assert len(read_digests(other, read_record(other, record))) == 2
    for bundle in record_bundles(store, record).values():
        mine, its = load_bundle(store, bundle), load_bundle(other, bundle)
        assert mine.state == its.state
        assert {name: t.tobytes() for name, t in mine.tensors.items()} == {
            name: t.tobytes() for name, t in its.tensors.items()
        }
    report = fsck(other)
    assert (report.missing, report.corrupt, report.dangling, report.leftovers) == ((), (), (), ())


def files_below(url):
    """All files of a remote store by their path in it."""
    files, root = fsspec.url_to_fs(url)
    files.invalidate_cache()
    return {str(path).removeprefix(root).lstrip("/"): files.cat_file(path) for path in files.find(root)}


def change(url, path, data):
    """Replaces a file of a remote store, or removes it."""
    files, root = fsspec.url_to_fs(url)
    if data is None:
        files.rm_file(f"{root}/{path}")
    else:
        files.pipe_file(f"{root}/{path}", data)


def some_chunk(url):
    """The largest object there, which is a tensor's."""
    found = files_below(url)
    return max((path for path in found if path.startswith("objects/")), key=lambda path: len(found[path]))


def test_there_and_back(store, other, committed, url):
    objects = len(list(store.objects()))
    first = push(store, url)
    assert (first.records, first.sent, first.present) == ((committed,), objects, 0)
    again = push(store, url, [committed])
    assert (again.sent, again.present, again.bytes) == (0, objects, 0)
    pulled = pull(other, url, [committed[:10]])
    assert (pulled.records, pulled.sent, pulled.present) == ((committed,), objects, 0)
    check_same(store, other, committed)
    again = pull(other, url)
    assert (again.sent, again.present) == (0, objects)


def test_only_what_is_missing_moves(store, other, committed, url, tensors):
    push(store, url)
    pull(other, url)
    record = read_record(store, committed)
    later = save_bundle(store, {**tensors, "weights/ln_f.bias": tensors["weights/ln_f.bias"] + 1}, {"step": 3})
    second = write_record(store, Record(**{**record.model_dump(), "final_bundle": later}), {})
    # The record, the bundle's manifest, the changed tensor, and `step`, which is as in no other bundle.
    assert push(store, url).sent == pull(other, url).sent == 4 - (load_step(store, record) == 2)
    assert find_records(other) == sorted([committed, second])
    check_same(store, other, second)


def load_step(store, record):
    return int(load_bundle(store, record.final_bundle).tensors["step"])


def test_an_interrupted_push_goes_on(store, other, committed, url):
    push(store, url)
    whole = files_below(url)
    chunk = some_chunk(url)
    # Neither the record's listing nor a manifest have arrived, and one object only half.
    change(url, f"index/records/{committed}", None)
    change(url, f"objects/{committed[:2]}/{committed[2:]}", None)
    change(url, chunk, whole[chunk][:-5])
    assert push(store, url).sent == 2
    assert files_below(url) == whole
    pull(other, url)
    check_same(store, other, committed)


def test_an_interrupted_pull_goes_on(store, other, committed, memory):
    push(store, memory)
    chunk = some_chunk(memory)
    data = files_below(memory)[chunk]
    change(memory, chunk, None)
    with pytest.raises(Missing, match="tensor"):
        pull(other, memory)
    assert find_records(other) == []
    arrived = len(list(other.objects()))
    change(memory, chunk, data)
    assert pull(other, memory).present >= arrived > 0
    check_same(store, other, committed)


@pytest.mark.parametrize("how", ["altered", "shortened", "lengthened", "swapped"])
def test_what_arrives_damaged_is_refused(store, other, committed, url, how):
    push(store, url)
    chunk = some_chunk(url)
    data = files_below(url)[chunk]
    match how:
        case "altered":
            data = data[:-1] + bytes([data[-1] ^ 1])
        case "shortened":
            data = data[:-1]
        case "lengthened":
            data += bytes(100_000)
        case "swapped":
            data = files_below(url)[f"objects/{committed[:2]}/{committed[2:]}"]
    change(url, chunk, data)
    with pytest.raises(Corrupt, match=r"tensor .* of bundle .* of step"):
        pull(other, url)
    assert find_records(other) == []
    gc(other)
    assert list(other.objects()) == []


@pytest.mark.parametrize(
    ("path", "data", "error"),
    [
        ("STORE_FORMAT", b"samebits store 2\n", UnknownVersion),
        ("STORE_FORMAT", b"something\n", Corrupt),
        ("STORE_FORMAT", None, Missing),
        ("index/records/RECORD", b"", Corrupt),
        ("index/records/notes.txt", b"", Corrupt),
        ("attestations/RECORD/notes.txt", b"", Corrupt),
        ("attestations/RECORD/" + "0" * 64 + ".json", b"{}", Corrupt),
    ],
)
def test_other_damage_is_refused(store, other, committed, memory, path, data, error):
    push(store, memory)
    change(memory, path.replace("RECORD", committed), data)
    with pytest.raises(error):
        pull(other, memory)
    assert find_records(other) == []


def test_a_damaged_object_does_not_leave(store, committed, memory):
    name = max(store.objects(), key=lambda name: store.object_path(name).stat().st_size)
    path = store.object_path(name)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(Corrupt, match=name):
        push(store, memory)
    assert f"index/records/{committed}" not in files_below(memory)


def test_what_is_damaged_on_the_way_is_noticed(store, committed, memory, monkeypatch):
    put = MemoryFileSystem.put_file

    def put_half(self, source, target, *rest, **more):
        put(self, source, target, *rest, **more)
        self.pipe_file(target, self.cat_file(target)[:-1])

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_half)
    with pytest.raises(Corrupt, match="record"):
        push(store, memory)
    assert f"index/records/{committed}" not in files_below(memory)


def test_bundles_in_between_are_gathered(store, other, committed, memory, tensors):
    push(store, memory)
    pull(other, memory)
    record = read_record(store, committed)
    # The other one forgot the bundle in between; pushing does not take it from the list there.
    (other.path / "index" / "records" / committed).unlink()
    write_record(other, record, {})
    push(other, memory)
    pull(other, memory)
    assert record_bundles(other, committed) == record_bundles(store, committed)
    (store.path / "index" / "records" / committed).unlink()
    write_record(store, record, {1: save_bundle(store, tensors, {"step": 1, "other": True})})
    with pytest.raises(RunDiffers, match="step 1"):
        push(store, memory)
    with pytest.raises(RunDiffers, match="step 1"):
        pull(store, memory)


def test_a_local_folder_is_a_store(store, committed, local):
    push(store, local)
    check_same(store, Store(local), committed)


def test_nobody_collects_garbage_in_a_local_folder_meanwhile(store, committed, local, monkeypatch):
    put = LocalFileSystem.put_file
    waited = []

    def put_and_look(self, source, target, *rest, **more):
        script = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        lock = Path(local) / "locks" / "store"
        waited.append(subprocess.run([sys.executable, "-c", script, str(lock)], capture_output=True).returncode)
        return put(self, source, target, *rest, **more)

    Store(local)
    monkeypatch.setattr(LocalFileSystem, "put_file", put_and_look)
    monkeypatch.setattr("artifacts.transfer._THREADS", 1)
    push(store, local)
    assert set(waited) == {1}


def test_wrong_use(store, other, committed, memory, tmp_path):
    with pytest.raises(InvalidInput, match="STORE_FORMAT is missing there: `reproduce push"):
        pull(other, memory)
    with pytest.raises(InvalidInput, match="0000"):
        push(store, memory, ["0" * 64])
    push(store, memory)
    for prefix in ("0000", ""):
        with pytest.raises(InvalidInput, match="no record"):
            pull(other, memory, [prefix])
    with pytest.raises(InvalidInput, match="nonsense"):
        push(store, "nonsense://x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"")
    with pytest.raises(InvalidInput, match="nor empty"):
        push(store, str(tmp_path / "full"))
    with pytest.raises(InvalidInput, match="read-only"):
        pull(Store(other.path, read_only=True), memory)


def test_an_ambiguous_prefix_lists_all(store, other, committed, memory):
    record = read_record(store, committed)
    number = 0
    while len({name[0] for name in find_records(store)}) == len(find_records(store)):
        number += 1
        write_record(store, Record(**{**record.model_dump(), "results": {"number": number}}), {})
    push(store, memory)
    names = find_records(store)
    prefix = next(name[0] for name in names if sum(other[0] == name[0] for other in names) > 1)
    with pytest.raises(Ambiguous) as error:
        pull(other, memory, [prefix])
    assert error.value.candidates == tuple(name for name in names if name[0] == prefix)


def test_a_bucket_that_is_not_there(store, other, committed, s3):
    with pytest.raises(RemoteFailed, match="goes on"):
        push(store, "s3://nosuchbucket/x")
    with pytest.raises(InvalidInput, match="is not a store"):
        pull(other, "s3://nosuchbucket/x")


def test_a_place_that_cannot_be_written(store, committed, memory, monkeypatch):
    def refuse(self, *rest, **more):
        raise PermissionError("no")

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    with pytest.raises(RemoteFailed, match="PermissionError: no"):
        push(store, memory)


def test_a_place_that_cannot_be_reached(store, other, committed, s3, monkeypatch):
    push(store, s3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        files, _ = fsspec.url_to_fs(s3)
        files.clear_instance_cache()
        with pytest.raises(RemoteFailed, match="goes on"):
            pull(other, s3)
        files.clear_instance_cache()
