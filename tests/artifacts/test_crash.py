"""A save that is stopped anywhere leaves the old state or the new one."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from artifacts import Store, durable, load_bundle, open_run, save_bundle
from artifacts.errors import ArtifactError, NoSpace, ReadOnly
from artifacts.fsck import fsck
from artifacts.gc import gc

FIRST = {"w": np.arange(100, dtype=np.float32), "same": np.ones(10, np.int64)}
SECOND = {
    "w": np.arange(100, dtype=np.float32) + 1,
    "same": np.ones(10, np.int64),
    **{f"new{number}": np.float32([number, 0.5]) for number in range(3)},
}


def save(store, step, tensors):
    with open_run(store, "r") as run, store.using():
        name = save_bundle(store, tensors, {"step": step}, threads=1)
        run.record_bundle(step, name)
    return name


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A store with one bundle, and the hashes of that and of the one saved next, whose files are named partly while
    others are still to be written."""
    monkeypatch.setattr(durable, "_MOST_WAITING", 2)
    store = Store(tmp_path / "base")
    first = save(store, 1, FIRST)
    scratch = Store(tmp_path / "scratch")
    return store.path, first, save(scratch, 2, SECOND)


def check_whole(path, first, second):
    """The store opens, the first bundle is whole, the second one can be saved, nothing is left."""
    store = Store(path)
    assert load_bundle(store, first).tensors["w"].tobytes() == FIRST["w"].tobytes()
    with open_run(store, "r") as run:
        assert run.bundles() in ({1: first}, {1: first, 2: second})
        step, last = run.last_bundle()
        assert run.bundles()[step] == last
    report = fsck(store)
    assert (report.missing, report.corrupt) == ((), ())
    assert save(store, 2, SECOND) == second
    gc(store)
    report = fsck(store)
    assert (report.missing, report.corrupt, report.dangling, report.leftovers) == ((), (), (), ())
    assert load_bundle(store, second).tensors["w"].tobytes() == SECOND["w"].tobytes()


@pytest.mark.parametrize("kind", ["crash", errno.EIO, errno.ENOSPC, errno.EACCES])
def test_a_save_stopped_at_any_call(base, tmp_path, disk, crash, kind):
    path, first, second = base
    disk.arm(None, None)
    shutil.copytree(path, tmp_path / "counting")
    save(Store(tmp_path / "counting"), 2, SECOND)
    calls = list(disk.calls)
    assert {"open_new", "write", "sync", "rename", "make_directory", "sync_directory"} <= set(calls)
    for number, call in enumerate(calls):
        target = tmp_path / f"{number}"
        shutil.copytree(path, target)
        disk.arm(number, kind)
        if kind == errno.EACCES and call == "open_lock":
            with suppress(ReadOnly):  # a lock that is shared is opened for reading then
                save(Store(target), 2, SECOND)
            disk.arm(None, None)
            check_whole(target, first, second)
            continue
        with pytest.raises((crash, ArtifactError, OSError)) as error:
            save(Store(target), 2, SECOND)
        disk.arm(None, None)
        if kind == errno.ENOSPC:
            assert isinstance(error.value, NoSpace), call
        if kind == errno.EACCES:
            assert isinstance(error.value, ReadOnly), call
        if kind != "crash":
            assert list((target / "tmp").iterdir()) == []
        check_whole(target, first, second)
        shutil.rmtree(target)


def test_making_a_store_stopped_at_any_call(base, tmp_path, disk, crash):
    disk.arm(None, None)
    Store(tmp_path / "counting")
    for number in range(len(disk.calls)):
        disk.arm(number, "crash")
        with pytest.raises(crash):
            Store(tmp_path / f"{number}")
        disk.arm(None, None)
        save(Store(tmp_path / f"{number}"), 2, SECOND)


def test_collecting_stopped_at_any_call(base, tmp_path, disk, crash):
    path, first, _ = base
    disk.arm(None, None)
    store = Store(path)
    for step in (2, 3, 4):
        save(store, step, {"w": np.arange(step, dtype=np.float32)})
    save_bundle(store, {"x": np.float32([5])}, {})
    shutil.copytree(path, tmp_path / "counting")
    disk.arm(None, None)
    gc(Store(tmp_path / "counting"), keep_last=1)
    assert {"unlink", "rename"} <= set(disk.calls)
    for number in range(len(disk.calls)):
        target = tmp_path / f"{number}"
        shutil.copytree(path, target)
        disk.arm(number, "crash")
        with pytest.raises(crash):
            gc(Store(target), keep_last=1)
        disk.arm(None, None)
        report = fsck(Store(target))
        assert (report.missing, report.corrupt) == ((), ())
        assert load_bundle(Store(target), first).state == {"step": 1}
        gc(Store(target), keep_last=1)
        report = fsck(Store(target))
        assert (report.dangling, report.leftovers) == ((), ())


@pytest.mark.parametrize("entries", ["kept", "now"])
def test_a_power_cut_at_any_moment(base, tmp_path, medium, lay_out, monkeypatch, entries):
    path, first, second = base
    followed = medium(path)
    assert save(Store(path), 2, SECOND) == second
    monkeypatch.undo()
    moments = followed.moments
    assert len(moments) > 30
    for number, moment in enumerate(moments):
        target = tmp_path / f"{number}"
        lay_out(moment, path, target, entries)
        check_power_cut(target, first, second)
        shutil.rmtree(target)
    # What was reported as saved is there, whatever was not synced.
    lay_out(moments[-1], path, tmp_path / "end", entries)
    assert load_bundle(Store(tmp_path / "end"), second).state == {"step": 2}
    with open_run(Store(tmp_path / "end"), "r") as run:
        assert run.last_bundle() == (2, second)


def check_power_cut(path, first, second):
    store = Store(path)
    assert load_bundle(store, first).state == {"step": 1}
    with open_run(store, "r") as run:
        assert run.bundles() in ({1: first}, {1: first, 2: second})
        run.last_bundle()
    report = fsck(store)
    assert report.missing == ()
    assert report.corrupt == ()


SAVER = textwrap.dedent(
    """
    import sys
    import numpy as np
    from artifacts import Store, open_run, save_bundle

    store = Store(sys.argv[1])
    step = int(sys.argv[2])
    with open_run(store, "r") as run:
        print("open", flush=True)
        while True:
            step += 1
            tensors = {name: np.random.default_rng(step).standard_normal(3000) for name in "abc"}
            with store.using():
                run.record_bundle(step, save_bundle(store, tensors, {"step": step}))
            print(step, flush=True)
    """
)


def run_python(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize("moments", [20, pytest.param(200, marks=pytest.mark.slow)], ids=["20", "200"])
def test_killed_at_random_moments(store, moments):
    """kill -9: whatever was reported as saved is there and whole, and the next process goes on."""
    moment = random.Random(1)
    said = 0
    for _ in range(moments):
        process = run_python(SAVER, store.path, said)
        assert process.stdout.readline() == "open\n"
        try:
            process.wait(moment.uniform(0.0, 0.1))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        lines = process.communicate()[0].split("\n")
        assert process.returncode == -signal.SIGKILL
        said = max([said, *(int(line) for line in lines[:-1])])
        with open_run(store, "r") as run:
            steps = sorted(run.bundles())
            assert steps == list(range(1, len(steps) + 1))
            assert len(steps) in (said, said + 1)
            if steps:
                assert run.last_bundle() == (steps[-1], run.bundles()[steps[-1]])
        said = len(steps)
    report = fsck(store)
    assert (report.missing, report.corrupt) == ((), ())
    gc(store)
    report = fsck(store)
    assert (report.dangling, report.leftovers) == ((), ())
