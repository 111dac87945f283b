"""Runs: one writer, a list of bundles, and a state that tells a dead run from a running one."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from artifacts import Store, list_runs, open_run, process, read_run, save_bundle
from artifacts.errors import (
    Corrupt,
    DamagedBundle,
    InvalidInput,
    Missing,
    RunDiffers,
    RunLocked,
    UnknownVersion,
)
from artifacts.process import Process, this_process
from artifacts.sealed import read_sealed, seal

HOLDER = """
import sys, time
from artifacts import Store, open_run
run = open_run(Store(sys.argv[1]), "r")
print("open", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(store):
    """A process that has run `r` open."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store.path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"open\n"
    yield child
    child.kill()
    child.communicate()


def bundle(store, step):
    return save_bundle(store, {"w": np.full(5, step, np.float32)}, {"step": step})


def test_bundles_are_listed_and_kept(store):
    first, second = bundle(store, 1), bundle(store, 2)
    with open_run(store, "tiny-1") as run:
        assert run.last_bundle() is None
        run.record_bundle(1, first)
        run.record_bundle(2, second)
        run.record_bundle(1, first)
        assert run.last_bundle() == (2, second)
        run.set_lineage({"resumed": [1]})
        run.set_state("complete")
    [info] = list_runs(Store(store.path, read_only=True))
    assert info.bundles == {1: first, 2: second}
    assert (info.run_id, info.status, info.lineage) == ("tiny-1", "complete", {"resumed": [1]})
    with open_run(store, "tiny-1") as run:
        assert run.last_bundle() == (2, second)
        assert read_run(store, "tiny-1").status == "running"


def test_the_same_step_with_other_bits_is_an_error(store):
    first, second = bundle(store, 1), bundle(store, 2)
    with open_run(store, "r") as run:
        run.record_bundle(1, first)
        with pytest.raises(RunDiffers, match=f"step 1 .* {first} .* {second}") as error:
            run.record_bundle(1, second)
        assert error.value.exit_code == 1
        assert run.bundles() == {1: first}


def test_what_is_not_there_is_not_listed(store):
    with open_run(store, "r") as run:
        with pytest.raises(Missing, match="0" * 64):
            run.record_bundle(1, "0" * 64)
        with pytest.raises(InvalidInput, match="step -1"):
            run.record_bundle(-1, bundle(store, 1))
        with pytest.raises(InvalidInput, match="status"):
            run.set_state("verified")


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_a_damaged_newest_bundle_is_said_and_not_skipped(store, damage):
    names = {step: bundle(store, step) for step in (1, 2, 3)}
    with open_run(store, "r") as run:
        for step, name in names.items():
            run.record_bundle(step, name)
        for step in (3, 2):
            path = store.object_path(names[step])
            if damage == "missing":
                path.unlink()
            else:
                os.chmod(path, 0o644)
                path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DamagedBundle, match=f"resume {names[1]}") as error:
            run.last_bundle()
        assert error.value.fallback == (1, names[1])
        assert error.value.exit_code == 4
        assert names[3] in str(error.value)
        store.object_path(names[1]).unlink()
        with pytest.raises(DamagedBundle, match="none of its bundles") as error:
            run.last_bundle()
        assert error.value.fallback is None


def test_one_writer(store, holder):
    with pytest.raises(RunLocked, match=f"process {holder.pid} on "):
        open_run(store, "r")
    open_run(store, "other").close()
    assert read_run(store, "r").status == "running"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert read_run(store, "r").status == "interrupted"
    open_run(store, "r").close()


def test_one_writer_within_a_process(store):
    with open_run(store, "r"), pytest.raises(RunLocked, match=f"process {os.getpid()} on "):
        open_run(store, "r")


def test_who_is_alive():
    me = this_process()
    assert me.may_be_alive()
    assert dataclasses.replace(me, host="another").may_be_alive()
    for gone in ({"boot": "another"}, {"started": "1.00"}, {"pid": 2**22 + 1}):
        assert not dataclasses.replace(me, **gone).may_be_alive()


def test_a_killed_process_that_was_not_waited_for_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    seen = dataclasses.replace(this_process(), pid=child.pid, started=process._started(child.pid))
    assert seen.may_be_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not seen.may_be_alive()
    child.wait()


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "A", "a.b", "-a", "a-", "a" * 65, "é", "a\n"])
def test_names_that_are_not_allowed(store, run_id):
    for use in (open_run, read_run):
        with pytest.raises(InvalidInput, match="expected 1 to 64"):
            use(store, run_id)


def test_a_run_that_is_not_there(store):
    with pytest.raises(Missing, match="no run r"):
        read_run(store, "r")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("state", {"value": {"status": "running"}}),
        ("state", {"value": {"status": "tired", "process": this_process().to_json()}}),
        ("state", {"value": {"status": "failed", "process": {"pid": 1}}}),
        ("state", {"format": "samebits run lineage"}),
        ("state", {"more": 1}),
        ("lineage", {"format": "?"}),
        ("bundles", {"format": "samebits record index"}),
        ("bundles", {"more": 1}),
        ("bundles", {"bundles": {}}),
        ("bundles", {"bundles": [{"step": 1}]}),
        ("bundles", {"bundles": [{"step": 1, "bundle": "x"}]}),
        ("bundles", {"bundles": [{"step": True, "bundle": "0" * 64}]}),
        ("bundles", {"bundles": [{"step": n, "bundle": "0" * 64} for n in (2, 1)]}),
        ("bundles", {"bundles": [{"step": 1, "bundle": "0" * 64}] * 2}),
    ],
)
def test_sealed_files_of_another_form(store, file, change):
    open_run(store, "r").close()
    path = store.path / "runs" / "r" / file
    path.write_bytes(seal({**read_sealed(path, "it"), **change}))
    with pytest.raises(Corrupt, match="run r"):
        read_run(store, "r")
    path.write_bytes(seal({**read_sealed(path, "it"), **change, "version": 2}))
    with pytest.raises(Corrupt, match="run r"):
        read_run(store, "r")


@pytest.mark.parametrize("file", ["state", "lineage", "bundles"])
def test_unknown_versions(store, file):
    open_run(store, "r").close()
    path = store.path / "runs" / "r" / file
    path.write_bytes(seal({**read_sealed(path, "it"), "version": 2}))
    with pytest.raises(UnknownVersion, match="version 2"):
        read_run(store, "r")


def test_a_process_is_read_back():
    me = this_process()
    assert Process.from_json(me.to_json(), "it") == me
