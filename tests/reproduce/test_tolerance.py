"""The tolerance of the tier `debug`: measured, declared, compared, never widened."""

import json
import math
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from artifacts import load_bundle
from engine.numerics.blas import WAYS, product, rounding
from engine.program import build_program
from reproduce.environment import hardware_class
from reproduce.errors import CorruptOutput
from reproduce.normative import ROOT
from reproduce.planning.report import disk_of
from reproduce.selftest.lab import Deviation, Lab, bits, make_lab
from reproduce.verification.distances import Tolerance, relative_distance

# Wide enough that BLAS kernels sum in different orders.
DEBUG = {
    "tier": "debug",
    "model": {"d_model": 64, "hidden": 256, "context": 32, "heads": 4, "dropout": 0.0},
    "train": {"steps": 24, "batch": 8, "warmup_steps": 4, "clip_norm": 1.0},
    "run": {"save_every_steps": 8},
}
X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 kernels of OpenBLAS")


@pytest.fixture(scope="module")
def debug(tmp_path_factory):
    return make_lab(tmp_path_factory.mktemp("debug") / "project", DEBUG)


def another_kernel():
    """One of OpenBLAS that is not this processor's, but that it has the instructions for: those with a newer one than
    Haswell's have Haswell's, too."""
    return "Nehalem" if hardware_class()["blas"][0]["kernel"] == "Haswell" else "Haswell"


def verify_with(lab, kernel, record=None, code=0):
    """In a process whose OpenBLAS takes the named kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "reproduce", "verify", record or lab.record, "--json"],
        cwd=lab.project.root,
        env={**os.environ, "OPENBLAS_CORETYPE": kernel, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def elsewhere(monkeypatch):
    """As if this were another class of machine."""
    there = {**hardware_class(), "cpu": "another processor"}
    monkeypatch.setattr("reproduce.verification.expectation.hardware_class", lambda device: there)


def test_the_record_states_it_with_its_method(debug):
    found = Tolerance.read(debug.read().tolerance)
    assert found.method == "rounding envelope 1"
    assert found.changes == list(WAYS)
    assert found.steps == len(found.loss) == 8
    assert found.windows == [[0, 8], [16, 8]]
    assert found.loss == sorted(found.loss)
    assert 0 < found.loss[-1] < 1e-2
    assert {name.split("/")[0] for name in found.tensors} == {"weights", "m", "v"}
    assert debug.read().hardware == hardware_class()


def test_on_the_same_class_every_bit_is_expected(debug):
    found = debug.verify()
    assert (found["verdict"], found["expected"], found["distances"]) == ("bit-exact", "bit-exact", [])


def _other_weight(tensors):
    bits(tensors["weights/embed.token"])[0] ^= 1


def _other_hash(tensors):
    tensors["history/tensors"][3, 0, 0] ^= 1


SPOILT_CONTENTS = {
    "final tensors": (_other_weight, "its last step digest"),
    "a hash": (_other_hash, "step digest of step 4"),
    "no hashes": (lambda tensors: tensors.pop("history/tensors"), "does not hold the hashes"),
}


@pytest.mark.parametrize("case", SPOILT_CONTENTS)
def test_hashes_of_contents_fit_the_step_digests_and_the_tensors(debug, tmp_path, case):
    change, message = SPOILT_CONTENTS[case]
    spoilt = debug.copy(tmp_path / "spoilt")
    found = spoilt.verify(spoilt.forge_final(change))
    assert (found["verdict"], found["code"]) == ("corrupt", 4)
    assert message in found["reason"]


def test_the_plan_counts_the_history_of_contents(debug):
    model = build_program(debug.configuration.model).parameters
    final = load_bundle(debug.store, debug.read().final_bundle).tensors
    planned = disk_of(debug.configuration, sum(math.prod(p.shape) for p in model), len(model))
    assert planned.largest == sum(array.nbytes for array in final.values())


@pytest.mark.parametrize("way", WAYS)
def test_other_rounding_on_the_same_class_differs(debug, way):
    with rounding(way):
        found = debug.verify()
    assert found["verdict"] == "differs"
    assert "every bit should be the same" in found["reason"]


@pytest.mark.parametrize("way", WAYS)
def test_other_rounding_on_another_class_is_within(debug, way, monkeypatch):
    elsewhere(monkeypatch)
    with rounding(way):
        found = debug.verify()
    assert (found["verdict"], found["expected"], found["code"]) == ("within tolerance", "within tolerance", 0)
    assert all(entry["distance"] <= entry["bound"] for entry in found["distances"])
    assert any(entry["distance"] > 0 for entry in found["distances"])
    assert {entry["what"].split()[0] for entry in found["distances"]} == {"loss", "tensor", "validation"}


def test_the_same_bits_on_another_class_are_called_bit_exact(debug, monkeypatch):
    elsewhere(monkeypatch)
    assert debug.verify()["verdict"] == "bit-exact"


@X86
def test_another_kernel_is_within_its_tolerance_and_prints_the_distances(debug):
    other = another_kernel()
    found = verify_with(debug, other)
    assert found["verdict"] == "within tolerance"
    assert found["environment"]["blas"][0]["kernel"] == other
    assert all(entry["distance"] <= entry["bound"] for entry in found["distances"])


@X86
def test_a_learning_rate_one_percent_off_differs(debug, tmp_path):
    copy = debug.copy(tmp_path / "copy")
    forged = copy.forge_run(Deviation(settings={**DEBUG, "train": {**DEBUG["train"], "learning_rate": 2.02e-3}}))
    found = verify_with(copy, another_kernel(), forged, code=1)
    assert found["verdict"] == "differs"
    assert any(entry["distance"] > entry["bound"] for entry in found["distances"])


def test_jobs_do_not_change_the_distances(debug, monkeypatch):
    elsewhere(monkeypatch)
    with rounding(next(iter(WAYS))):
        found = debug.verify(steps="10:20")
    assert [segment["first"] for segment in found["segments"]] == [9, 17]


def test_a_record_with_bundles_further_apart_than_its_tolerance_says_is_refused(debug, tmp_path, monkeypatch):
    """Nothing is made of a bound that is not declared."""
    elsewhere(monkeypatch)
    copy: Lab = debug.copy(tmp_path / "copy")
    forged = copy.forge()
    assert forged == copy.record
    tolerance = {**copy.read().tolerance, "steps": 4, "loss": copy.read().tolerance["loss"][:4]}
    with rounding(next(iter(WAYS))):
        name = copy.forge(tolerance=tolerance)
        found = copy.verify(name)
        assert (found["verdict"], found["code"]) == ("inconclusive", 3)
        assert "--steps 1:4" in found["reason"]
        assert copy.verify(name, steps="1:4")["verdict"] == "within tolerance"


@pytest.mark.parametrize("change", [{"steps": 9}, {"factor": -1.0}, {"more": 1}, {"method": "trust me"}])
def test_a_tolerance_that_is_none_is_corrupt(debug, change):
    with pytest.raises(CorruptOutput, match="tolerance"):
        Tolerance.read({**debug.read().tolerance, **change})


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_round_are_products_all_the_same(way):
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((33, 257), (257, 19)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    out = np.empty((33, 19), np.float32)
    with rounding(way):
        assert relative_distance(exact, product(a, b, out)) < 1e-6
    plain = product(a, b, np.empty_like(out))
    assert 0 < relative_distance(plain, out) < 1e-6


def test_rounding_ends_with_its_block_also_after_an_error():
    a = np.ones((2, 3), np.float32)
    with pytest.raises(RuntimeError), rounding(next(iter(WAYS))):
        raise RuntimeError
    assert np.array_equal(product(a, a.T, np.empty((2, 2), np.float32)), a @ a.T)
