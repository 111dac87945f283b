"""The fingerprint: complete, plain JSON, and only what a tier's promise depends on decides what is expected."""

import json

import pytest

from artifacts import canonical
from reproduce import environment
from reproduce.verification.expectation import class_differences, expectation


def test_it_names_everything_that_may_explain_a_difference(tmp_path):
    found = environment.fingerprint(tmp_path, 3)
    assert set(found) == {
        "blas", "cores", "cpu", "float", "git", "gpu", "hash_seed", "libraries", "locale", "os", "python", "switches",
        "threads",
    }  # fmt: skip
    assert found["cpu"]["model"]
    assert found["threads"] == 3
    assert found["float"] == "IEEE-754"
    assert found["git"] is None
    assert {"numpy", "numba", "llvmlite"} <= set(found["libraries"])
    assert all({"kernel", "library", "threads", "version"} == set(entry) for entry in found["blas"])
    assert json.loads(canonical.dumps(found)) == found


def test_switches_of_libraries_are_named_and_nothing_else_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = environment.fingerprint(tmp_path, 1)
    assert found["switches"]["OPENBLAS_CORETYPE"] == "Haswell"
    assert "hidden" not in json.dumps(found)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, []),
        ("", []),
        ("NVIDIA RTX, 8192 MiB, 570.1, 8.6", [("NVIDIA RTX", "570.1")]),
        ("A, 1 MiB, 1, 9.0\nB, 2 MiB, 1, 9.0\nno devices were found", [("A", "1"), ("B", "1")]),
    ],
)
def test_cards(monkeypatch, listed, expected):
    monkeypatch.setattr(environment, "_output", lambda command: listed)
    assert [(card["name"], card["driver_version"]) for card in environment.gpu()] == expected


@pytest.mark.parametrize("name", ["OPENBLAS_CORETYPE", "LC_ALL", "PYTHONHASHSEED"])
def test_only_the_class_decides(monkeypatch, name):
    here = environment.hardware_class()
    monkeypatch.setenv(name, "changed")
    assert class_differences(here) == []


@pytest.mark.parametrize(
    ("key", "value"), [("cpu", "another"), ("machine", "sparc"), ("blas", []), ("libraries", {"numpy": "1.0"})]
)
def test_every_part_of_the_class_decides(key, value):
    there = {**environment.hardware_class(), key: value}
    assert class_differences(there)


def test_another_device_is_another_class():
    assert class_differences(environment.hardware_class(), "cuda")


def test_a_portable_record_never_asks_for_the_class(lab, monkeypatch):
    monkeypatch.setattr("reproduce.verification.expectation.hardware_class", lambda device: pytest.fail("asked"))
    assert expectation(lab.read()).tolerance is None
