"""Saving in the background: what is said to be saved is, and no failure goes unheard."""

import fcntl
import threading
import time

import numpy as np
import pytest

from artifacts import load_bundle, open_run, save_bundle
from artifacts.errors import InvalidInput, NoSpace, SaveFailed
from artifacts.saver import BackgroundSaver


@pytest.fixture
def arrays():
    return {"w": np.zeros(100, np.float32)}


def test_bundles_are_those_of_a_plain_save(store, arrays):
    names = {}
    with BackgroundSaver(store) as saver:
        for step in range(5):
            saver.wait_free()
            arrays["w"][:] = step
            saver.submit(arrays, {"step": step}, lambda name, step=step: names.update({step: name}))
    assert saver.last == names[4]
    for step in range(5):
        assert load_bundle(store, names[step]).state == {"step": step}
        arrays["w"][:] = step
        assert save_bundle(store, arrays, {"step": step}) == names[step]


def test_training_goes_on_meanwhile_and_the_next_save_waits(store, arrays, monkeypatch):
    gate, begun = threading.Event(), []

    def slow(store, tensors, state, threads):
        begun.append(state["step"])
        assert gate.wait(60)
        return save_bundle(store, tensors, state, threads)

    monkeypatch.setattr("artifacts.saver.save_bundle", slow)
    done = []
    with BackgroundSaver(store) as saver:
        state = {"step": 1}
        saver.submit(arrays, state, done.append)
        state["step"] = 99  # the caller's again
        assert done == []
        waiting = threading.Thread(target=saver.submit, args=(arrays, {"step": 2}, done.append))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        assert 2 not in begun
        gate.set()
        waiting.join()
        saver.drain()
        assert begun == [1, 2]
        assert load_bundle(store, done[0]).state == {"step": 1}


@pytest.mark.parametrize("then", ["submit", "wait_free", "drain", "leave"])
def test_a_failure_is_raised_by_whatever_comes_next(store, arrays, monkeypatch, then):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    saver = BackgroundSaver(store, last="a" * 64)
    names = []
    saver.submit(arrays, {"step": 1}, names.append)
    saver.drain()
    monkeypatch.setattr("artifacts.filesystem.write", full)
    arrays["w"][:] = 2
    saver.submit(arrays, {"step": 2}, names.append)
    with pytest.raises(SaveFailed, match=f"no space left.*\n.*whole bundle is {names[0]}") as error:
        match then:
            case "submit":
                saver.submit(arrays, {"step": 3}, names.append)
            case "leave":
                with saver:
                    pass
            case _:
                getattr(saver, then)()
    assert isinstance(error.value.cause, NoSpace)
    assert error.value.exit_code == 6
    assert error.value.last == names[0]
    monkeypatch.undo()
    with pytest.raises(SaveFailed):  # it does not go on as if nothing had been
        saver.submit(arrays, {"step": 3}, names.append)
    assert len(names) == 1


def test_a_failure_is_noticed_without_waiting(store, arrays, monkeypatch):
    """`check` never waits for a save, and raises as soon as one has failed."""
    go_on = threading.Event()

    def full(descriptor, data):
        assert go_on.wait(60)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("artifacts.filesystem.write", full)
    with pytest.raises(SaveFailed, match="No bundle was saved before"), BackgroundSaver(store) as saver:
        saver.check()
        saver.submit(arrays, {}, print)
        saver.check()  # still being saved
        go_on.set()
        while True:
            saver.check()
            time.sleep(0.001)


def test_a_failure_in_on_done_is_a_failure(store, arrays):
    def fail(name):
        raise RuntimeError("no list")

    with pytest.raises(SaveFailed, match="no list\n.*whole bundle is " + "a" * 64) as error:  # noqa: SIM117
        with BackgroundSaver(store, last="a" * 64) as saver:
            saver.submit(arrays, {}, fail)
    assert error.value.exit_code == 4


def test_a_state_that_is_not_json_is_refused_at_once(store, arrays):
    with BackgroundSaver(store) as saver, pytest.raises(InvalidInput):
        saver.submit(arrays, {"loss": float("nan")}, print)


def test_leaving_by_an_error_still_drains(store, arrays):
    names = []
    with pytest.raises(KeyboardInterrupt), BackgroundSaver(store) as saver:
        saver.submit(arrays, {}, names.append)
        raise KeyboardInterrupt
    load_bundle(store, names[0])


def test_bundles_are_recorded_before_gc_can_run(store, arrays):
    """`on_done` runs while the store is in use."""
    with open_run(store, "r") as run, BackgroundSaver(store) as saver:

        def record(name):
            with pytest.raises(BlockingIOError):
                collect_now(store)
            run.record_bundle(1, name)

        saver.submit(arrays, {}, record)
        saver.drain()
        collect_now(store)


def collect_now(store):
    with (store.path / "locks" / "store").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
