"""Stopped at any moment, in any way, and gone on with: the same final bundle as a run left alone."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import wait

import psutil
import pytest

from artifacts import list_runs, load_bundle, saver
from artifacts.errors import NoSpace
from artifacts.saver import BackgroundSaver
from engine.trainer import Trainer

STEPS = 400
LONG = {
    "train": {"steps": STEPS},
    "run": {"save_every_steps": 37},
    "evaluation": {"every_steps": 150},
    "sampling": {"every_steps": 130},
}


def outputs(project):
    """Everything the pipeline came to, by path."""
    files = sorted(path for path in (project.root / "run").rglob("*") if path.is_file())
    return {path.relative_to(project.root).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def left_alone(committed):
    """What a run without interruptions comes to."""
    committed.clean()
    committed.write_params(LONG)
    committed.dvc("repro")
    return outputs(committed)


@pytest.fixture
def long_project(left_alone, project):
    project.write_params(LONG)
    return project


def trainer_of(process):
    """The process below `process` that trains; None if there is none (any more)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.cmdline()[-2:] == ["stage", "train"]:
                    return child
    return None


def wait_for_bundle(project, process, after=0):
    """Waits until `process` has saved a bundle of a step above `after`; gives the trainer's process."""
    project.wait_until(
        lambda: project.last_step() > after or process.poll() is not None, f"a bundle after step {after}"
    )
    trainer = trainer_of(process) or psutil.Process(process.pid)
    assert trainer.cmdline()[-1] in ("train", "resume"), project.log
    return trainer


def test_several_interruptions_in_one_run(long_project, left_alone):
    """By SIGTERM and by kill -9, of the command and of a stage of `dvc repro`, at seeded random moments."""
    project = long_project
    choose = random.Random(5)
    project.dvc("repro", "plan")
    ways = [
        ("reproduce", signal.SIGTERM),
        ("reproduce", signal.SIGKILL),
        ("dvc", signal.SIGKILL),
        ("dvc", signal.SIGTERM),
        ("reproduce", signal.SIGINT),
    ]
    choose.shuffle(ways)
    for way, how in ways:
        before = project.last_step()
        process = project.start_dvc("repro") if way == "dvc" else project.start_reproduce("resume")
        victim = wait_for_bundle(project, process, max(before, 0))
        time.sleep(choose.random() / 20)
        victim.send_signal(how)
        code = process.wait(60)
        if way == "dvc":
            assert code != 0, project.log
        else:
            assert code == (-how if how == signal.SIGKILL else 128 + how), project.log
        if how != signal.SIGKILL:
            assert "saved as bundle" in project.log
        assert project.status() == "interrupted"
        assert before < project.last_step() < STEPS
    project.dvc("repro")
    assert outputs(project) == left_alone


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_when_dvc_dies_nothing_writes_beside_the_next_run(long_project, left_alone, how):
    project = long_project
    dvc = project.start_dvc("repro")
    orphan = wait_for_bundle(project, dvc)
    dvc.send_signal(how)
    dvc.wait(60)
    # At once, so that the next run finds the orphan still saving, if it is slow enough.
    project.dvc("repro")
    assert not orphan.is_running()
    (run,) = list_runs(project.store())
    assert run.status == "complete"
    assert any(step % 37 for step in run.bundles if step != STEPS), "the orphan saved before it went"
    assert outputs(project) == left_alone


def test_a_signal_to_the_whole_group_saves_too(long_project):
    """Ctrl-C, a closing terminal, a batch system: DVC and the trainer get it both, which must not count as two."""
    project = long_project
    dvc = project.start_dvc("repro")
    orphan = wait_for_bundle(project, dvc)
    os.killpg(dvc.pid, signal.SIGTERM)
    dvc.wait(60)
    project.wait_until(lambda: not orphan.is_running(), "the trainer's end")
    assert "saved as bundle" in project.log
    assert project.last_step() % 37 != 0 or "interrupted after step" in project.log


def test_a_second_dvc_repro_beside_the_first_does_no_harm(long_project, left_alone):
    project = long_project
    first = project.start_dvc("repro")
    wait_for_bundle(project, first)
    second = project.dvc("repro", code=None)
    assert first.wait(300) == 0, project.log
    assert second.returncode == 0 or "ERROR" in second.stderr
    assert outputs(project) == left_alone


def test_sigusr1_saves_and_goes_on(long_project):
    project = long_project
    for stage in ("fetch", "prepare", "plan"):
        project.call("stage", stage)
    process = project.start_reproduce("train")
    wait_for_bundle(project, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(300) == 0, project.log
    (run,) = list_runs(project.store())
    extra = [step for step in run.bundles if step % 37 and step != STEPS]
    assert len(extra) == 1
    assert load_bundle(project.store(), run.bundles[extra[0]]).state["step"] == extra[0]


def test_a_second_sigterm_ends_at_once_and_leaves_the_store_whole(long_project, left_alone):
    project = long_project
    for stage in ("fetch", "prepare", "plan"):
        project.call("stage", stage)
    process = project.start_reproduce("train")
    wait_for_bundle(project, process)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert "0 missing, 0 corrupt" in project.call("fsck").stdout
    project.dvc("repro")
    assert outputs(project) == left_alone


def test_numbers_that_are_not_finite_end_the_run_with_its_last_good_bundle(project):
    project.write_params(
        {"train": {"learning_rate": 1e25, "final_learning_rate": 0.0, "warmup_steps": 0, "clip_norm": 0.0}}
    )
    for stage in ("fetch", "prepare", "plan"):
        project.call("stage", stage)
    said = project.reproduce("train", code=7).stderr
    assert "is good: " in said
    good = said.split("is good: ")[1].strip()[:64]
    assert project.status() == "failed"
    assert "all verified" in project.call("show", good).stdout
    assert not (project.root / "run" / "run.json").exists()
    # Trying again fails the same way: nothing was smoothed over.
    assert project.reproduce("train", code=7).stderr.split("is good: ")[1].strip()[:64] == good


# Within a user and mount namespace, so that no privilege is needed where the kernel allows these.
FULL_DISK = textwrap.dedent(
    """
    set -e
    mount -t tmpfs -o size=16m tmpfs .samebits
    head -c $1 /dev/zero >.samebits/filler
    code=0
    "$2" -m reproduce train || code=$?
    "$2" -m reproduce log
    rm .samebits/filler
    "$2" -m reproduce fsck
    "$2" -m reproduce train
    exit $code
    """
)


def test_a_full_disk_ends_the_run_and_loses_nothing(long_project, left_alone):
    project = long_project
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no user and mount namespaces here")
    for stage in ("fetch", "prepare", "plan"):
        project.call("stage", stage)
    done = project.run("unshare", "-rm", "sh", "-c", FULL_DISK, "sh", str(16 * 2**20 - 600_000), sys.executable, code=6)
    assert "last whole bundle" in done.stderr
    assert "failed" in done.stdout
    assert "0 missing, 0 corrupt" in done.stdout
    final = json.loads(project.read("run/run.json"))["final_bundle"]
    assert final == json.loads(left_alone["run/run.json"])["final_bundle"]


def test_a_failed_save_stops_the_run_before_the_next_step(long_project, monkeypatch):
    """Not only when the next bundle is due, which may be hours later."""
    real_submit, real_save, real_step, steps = BackgroundSaver.submit, saver.save_bundle, Trainer.train_step, []

    def submit(self, tensors, state, on_done):
        real_submit(self, tensors, state, on_done)
        wait([self._pending])

    def save(store, tensors, state, threads):
        if state["step"] == 37:
            raise NoSpace("no space left")
        return real_save(store, tensors, state, threads)

    def step(trainer):
        result = real_step(trainer)
        steps.append(trainer.step)
        return result

    for stage in ("fetch", "prepare", "plan"):
        long_project.call("stage", stage)
    monkeypatch.setattr(BackgroundSaver, "submit", submit)
    monkeypatch.setattr(saver, "save_bundle", save)
    monkeypatch.setattr(Trainer, "train_step", step)
    said = long_project.call("train", code=6).stderr
    assert steps == list(range(1, 38))
    (first,) = (run.bundles[0] for run in list_runs(long_project.store()))
    assert f"The last whole bundle is {first}" in said
