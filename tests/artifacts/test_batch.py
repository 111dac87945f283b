"""Files that are written together: all or none in place, each synced before it is named, none left open."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from artifacts import Store, durable, filesystem, load_bundle, save_bundle
from artifacts.errors import NoSpace


@pytest.fixture(autouse=True)
def few_waiting(monkeypatch):
    monkeypatch.setattr(durable, "_MOST_WAITING", 4)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 50])
def test_all_are_in_place_at_the_end(folder, count, threads):
    with durable.FileBatch(folder / "tmp") as batch, ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda n: batch.write(folder / str(n), [b"%d" % n, bytes(n)]), range(count)))
    assert {path.name for path in folder.iterdir()} == {"tmp", *map(str, range(count))}
    assert all((folder / str(n)).read_bytes() == b"%d" % n + bytes(n) for n in range(count))
    assert list((folder / "tmp").iterdir()) == []


def test_each_is_synced_before_it_is_named_and_few_are_open(folder, monkeypatch):
    events = []
    for name in ("open_new", "write", "sync", "close", "rename"):
        real = getattr(filesystem, name)

        def call(*arguments, name=name, real=real):
            result = real(*arguments)
            events.append((name, result, arguments))
            return result

        monkeypatch.setattr(filesystem, name, call)
    with durable.FileBatch(folder / "tmp") as batch:
        for number in range(20):
            batch.write(folder / str(number), [b"content"])
    # `dirty` by descriptor until synced, `synced` by descriptor until closed, `ready` by path until named.
    dirty, synced, ready, path_of = set(), set(), set(), {}
    for name, result, arguments in events:
        if name == "open_new":
            path_of[result] = arguments[0]
            dirty.add(result)
        elif name == "write":
            dirty.add(arguments[0])
        elif name == "sync":
            dirty.discard(arguments[0])
            synced.add(arguments[0])
        elif name == "close":
            synced.remove(arguments[0])
            ready.add(path_of[arguments[0]])
        else:
            assert arguments[0] in ready
        assert len(dirty | synced) <= 5
    assert len(ready) == 20


@pytest.mark.parametrize("call", ["open_new", "write", "sync", "rename"])
@pytest.mark.parametrize("at", [0, 2, 7])
def test_an_error_leaves_nothing_open_and_nothing_behind(folder, monkeypatch, call, at):
    real = getattr(filesystem, call)
    calls = iter(range(1000))

    def failing(*arguments):
        if next(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(filesystem, call, failing)
    before = psutil.Process().num_fds()
    with pytest.raises(NoSpace), durable.FileBatch(folder / "tmp") as batch:
        for number in range(8):
            batch.write(folder / str(number), [b"content"])
    assert psutil.Process().num_fds() == before
    assert list((folder / "tmp").iterdir()) == []
    assert all(path.read_bytes() == b"content" for path in folder.iterdir() if path.name != "tmp")


def test_a_system_that_cannot_start_early_writes_the_same(folder, monkeypatch):
    monkeypatch.setattr(filesystem, "_sync_file_range", None)
    with durable.FileBatch(folder / "tmp") as batch:
        batch.write(folder / "a", [b"content"])
    assert (folder / "a").read_bytes() == b"content"


def test_equal_contents_of_a_bundle_are_written_once(store, monkeypatch):
    written = []
    real = filesystem.open_new
    monkeypatch.setattr(filesystem, "open_new", lambda *a: written.append(a) or real(*a))
    name = save_bundle(store, {f"t{n}": np.zeros(1000, np.float32) for n in range(40)}, {})
    assert len(written) == 2  # the chunk and the manifest
    assert not load_bundle(store, name).tensors["t39"].any()


def test_few_files_may_be_open(tmp_path):
    """Saving keeps to what the process may open, with other files open beside it."""
    program = """
import resource, sys
import numpy as np
from artifacts import Store, load_bundle, save_bundle
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
tensors = {f"t{n}": np.full(50, n, np.float32) for n in range(300)}
store = Store(sys.argv[1])
name = save_bundle(store, tensors, {}, threads=4)
print(len(load_bundle(store, name).tensors))
"""
    for limit in (24, 40, 64, 256):
        command = [sys.executable, "-c", program, str(tmp_path / f"{limit}"), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == "300\n", (limit, done.stderr)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_ends_a_write_leaves_nothing_open(folder, error):
    def parts():
        yield b"x"
        raise error

    before = psutil.Process().num_fds()
    with pytest.raises(error), durable.FileBatch(folder / "tmp") as batch:
        batch.write(folder / "whole", [b"x"])
        batch.write(folder / "half", parts())
    assert psutil.Process().num_fds() == before
    assert sorted(path.name for path in folder.iterdir()) == ["tmp"]
    assert list((folder / "tmp").iterdir()) == []


def test_closing_that_fails_keeps_the_first_error_and_cleans_up(folder, monkeypatch):
    real, calls = filesystem.close, []

    def close(descriptor):
        real(descriptor)
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(filesystem, "close", close)
    before = psutil.Process().num_fds()
    with pytest.raises(NoSpace, match="first"), durable.FileBatch(folder / "tmp") as batch:
        for number in range(3):
            batch.write(folder / str(number), [b"x"])
        raise NoSpace("first")
    assert psutil.Process().num_fds() == before
    assert list((folder / "tmp").iterdir()) == []


def test_an_error_of_the_system_names_the_file(folder, monkeypatch):
    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(filesystem, "sync", broken)
    with pytest.raises(OSError, match=r"Input/output error.*target"):
        durable.write_whole(folder / "target", [b"x"], folder / "tmp")


def test_nothing_is_written_after_the_end(folder):
    with durable.FileBatch(folder / "tmp") as batch:
        pass
    with pytest.raises(AssertionError, match="after its batch had ended"):
        batch.write(folder / "late", [b"x"])
    assert list((folder / "tmp").iterdir()) == []


def test_an_object_whose_write_failed_is_written_when_tried_again(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    real, calls = filesystem.open_new, []

    def open_new(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(filesystem, "open_new", open_new)
    with store.using(), store.writing() as writer:
        with pytest.raises(OSError, match="Input/output error"):
            writer.write_object(b"content")
        name = writer.write_object(b"content")
    assert store.get(name) == b"content"


def test_a_store_without_a_folder_for_temporary_files_gets_one(tmp_path):
    store = Store(tmp_path / "store")
    (store.path / "tmp").rmdir()
    assert store.get(store.put(b"x")) == b"x"
    (store.path / "tmp").rmdir()
    store.write_file(store.path / "runs" / "r" / "note", b"y")


def test_too_many_open_files_is_not_taken_for_damage(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    name = store.put(b"x")

    def open_read(path):
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(filesystem, "open_read", open_read)
    with pytest.raises(OSError, match="Too many open files"):
        store.get(name)
    with pytest.raises(OSError, match="Too many open files"), Store(store.path, read_only=True).using():
        pass
