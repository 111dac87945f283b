"""A capsule in an empty folder, without network, Git and project: a verdict, or exactly what is missing."""

import json
import os
import subprocess
import sys

import pytest

from artifacts import find_records
from artifacts.attestation import loads
from reproduce.capsules import write_capsule
from reproduce.normative import ROOT


@pytest.fixture(scope="module")
def capsules(lab, tmp_path_factory):
    """With the dataset and the bundles in between, and without."""
    folder = tmp_path_factory.mktemp("capsules")
    write_capsule(lab.project, lab.store, lab.record, folder / "whole.tar", True, True)
    write_capsule(lab.project, lab.store, lab.record, folder / "bare.tar", False, False)
    return folder


def verify(path, folder, *words, code):
    """In a process that finds no Git, no proxy and no home."""
    done = subprocess.run(
        [sys.executable, "-m", "reproduce", "verify", str(path), *words],
        cwd=folder,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": str(folder),
            "SAMEBITS_CACHE": os.environ.get("SAMEBITS_CACHE", os.path.expanduser("~/.cache/samebits")),
            "HOME": str(folder),
        },
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_whole_capsule_is_enough(lab, capsules, tmp_path):
    said = verify(capsules / "whole.tar", tmp_path, code=0).stdout
    assert "verdict: bit-exact: 12 step digests, 4 bundles and 4 evaluations" in said
    (statement,) = capsules.glob("whole.tar.*.json")
    assert loads(statement.read_bytes(), lab.record, "it").verdict["verdict"] == "bit-exact"
    assert list(tmp_path.iterdir()) == []


def test_without_data_it_names_what_is_missing(lab, capsules, tmp_path):
    done = verify(capsules / "bare.tar", tmp_path, "--json", code=3)
    found = json.loads(done.stdout)
    assert found["verdict"] == "inconclusive"
    assert lab.read().dataset in found["reason"]
    assert "corpus/*.txt" in found["reason"]


def test_a_damaged_capsule_is_corrupt(capsules, tmp_path):
    whole = (capsules / "whole.tar").read_bytes()
    (tmp_path / "damaged.tar").write_bytes(whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
    said = verify(tmp_path / "damaged.tar", tmp_path, code=4).stderr
    assert "capsule" in said
    assert "Traceback" not in said


def test_the_lab_keeps_its_only_record(lab):
    assert find_records(lab.store) == [lab.record]
