"""The first command on a machine compiles for a minute, and says so: once, to standard error, and only then."""

import os
import subprocess
import sys

import pytest

from engine.numerics import kernel_cache
from reproduce import workbench
from reproduce.normative import ROOT

SAID = "compiling the CPU kernels for this machine: about a minute, "


@pytest.fixture(name="fresh")
def _fresh(monkeypatch):
    """As if no kernel had been compiled yet."""
    monkeypatch.setattr(workbench, "nothing_compiled", lambda: True)


def test_it_is_said_where_a_trainer_is_made(spoilt, fresh, capfd):
    assert spoilt.verify()["code"] == 0
    assert capfd.readouterr() == ("", f"{SAID}once\n")


def test_it_is_said_once_for_all_jobs(spoilt, fresh, capfd):
    assert spoilt.verify(jobs=2)["code"] == 0
    assert capfd.readouterr() == ("", f"{SAID}once\n")


def test_nothing_is_said_of_what_is_compiled_or_not_needed(spoilt, monkeypatch, capfd):
    assert spoilt.verify()["code"] == 0
    monkeypatch.setattr(workbench, "nothing_compiled", lambda: True)
    workbench.announce_compilation(spoilt.configuration.run.model_copy(update={"device": "cuda"}))
    assert capfd.readouterr() == ("", "")


def test_without_a_cache_it_says_what_helps(lab, fresh, monkeypatch, capfd):
    monkeypatch.setattr(workbench, "FOLDER", None)
    workbench.announce_compilation(lab.configuration.run)
    said = capfd.readouterr().err
    assert said.startswith(f"{SAID}every time")
    assert "SAMEBITS_CACHE" in said


def test_one_kept_kernel_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "FOLDER", tmp_path)
    (tmp_path / "half.0123").touch()
    assert kernel_cache.nothing_compiled()
    (tmp_path / "whole.kernel").touch()
    assert not kernel_cache.nothing_compiled()


@pytest.mark.slow
def test_only_the_first_command_says_it(lab, tmp_path):
    said = [
        subprocess.run(
            [sys.executable, "-m", "reproduce", "sample", "final"],
            cwd=lab.project.root,
            env={**os.environ, "SAMEBITS_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        for _ in range(2)
    ]
    assert [done.stderr for done in said] == [f"{SAID}once\n", ""]
    assert said[0].stdout == said[1].stdout != ""
