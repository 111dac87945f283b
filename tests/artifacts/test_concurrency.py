"""Several processes save, read and collect at once: nothing is lost, nothing half-read."""

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from artifacts import Store, list_runs, load_bundle, save_bundle, verify_bundle
from artifacts.fsck import fsck
from artifacts.gc import gc

WRITER = """
import sys
import numpy as np
from artifacts import Store, load_bundle, open_run, save_bundle

path, run_id, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = Store(path)
with open_run(store, run_id) as run:
    for step in range(rounds):
        # The same tensors in every process: they race for the same objects, which gc removes
        # whenever the last list that held them has been shortened.
        tensors = {name: np.full(2000, step % 5 + n, np.float32) for n, name in enumerate("abc")}
        with store.using():
            name = save_bundle(store, tensors, {"step": step})
            run.record_bundle(step, name)
        bundle = load_bundle(store, name)
        assert all((bundle.tensors[key] == tensors[key]).all() for key in tensors)
        assert run.last_bundle() == (step, name)
    run.set_state("complete")
"""

READER = """
import sys
from artifacts import Store, list_runs, load_bundle
from artifacts.fsck import fsck

store = Store(sys.argv[1], read_only=True)
for _ in range(int(sys.argv[3])):
    with store.using():
        for run in list_runs(store):
            for step, name in run.bundles.items():
                assert load_bundle(store, name).state == {"step": step}
    report = fsck(store)
    assert (report.missing, report.corrupt) == ((), ()), report
"""

COLLECTOR = """
import sys
from artifacts import Store
from artifacts.gc import gc

store = Store(sys.argv[1])
for _ in range(int(sys.argv[3])):
    gc(store, keep_last=2)
"""

COMMITTER = """
import sys
from artifacts import *

store = Store(sys.argv[1])
for round in range(int(sys.argv[3])):
    with store.using():
        bundle = save_bundle(store, {}, {"of": sys.argv[2], "round": round})
        record = Record(
            **dict.fromkeys(("pipeline", "specification", "dataset", "tokenizer"), "a" * 64),
            lock=[], configuration={"of": sys.argv[2], "round": round}, tier="portable",
            first_bundle=bundle, final_bundle=bundle, steps=1,
            digests=write_digests(store, [bytes(32)]), results={}, sources={},
            sources_digest=sources_digest({}), hardware=None, tolerance=None,
        )
        name = write_record(store, record, {})
    assert read_record(store, name) == record
    assert name in find_records(store)
"""


def start(script, store, name, rounds):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(store.path), name, str(rounds)],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_eight_processes(store, rounds):
    scripts = [WRITER, WRITER, WRITER, COMMITTER, COMMITTER, READER, COLLECTOR, COLLECTOR]
    children = [start(script, store, f"p{n}", rounds) for n, script in enumerate(scripts)]
    for child in children:
        errors = child.communicate()[1]
        assert child.returncode == 0, errors
    report = fsck(store)
    assert (report.missing, report.corrupt) == ((), ())
    runs = list_runs(store)
    assert [run.status for run in runs] == ["complete"] * 3
    assert all(max(run.bundles) == rounds - 1 for run in runs)
    for run in runs:
        for name in run.bundles.values():
            verify_bundle(store, name)
    gc(store)
    report = fsck(store)
    assert (report.dangling, report.leftovers) == ((), ())


def test_two_processes_make_and_fill_a_store_at_once(tmp_path):
    store = Store.__new__(Store)
    store.path = tmp_path / "new"
    children = [start(WRITER, store, f"p{n}", 3) for n in range(2)]
    for child in children:
        errors = child.communicate()[1]
        assert child.returncode == 0, errors
    assert len(list_runs(Store(store.path))) == 2


def test_threads_of_one_store_save_and_collect(store, tensors):
    names, stop = [], threading.Event()

    def collect():
        while not stop.is_set():
            gc(store)
            time.sleep(0.001)

    collector = threading.Thread(target=collect)
    collector.start()
    for step in range(20):
        with store.using():
            name = save_bundle(store, tensors, {"step": step})
            with store.using():
                names.append(load_bundle(store, name).state["step"])
    stop.set()
    collector.join()
    assert names == list(range(20))
