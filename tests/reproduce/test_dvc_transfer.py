"""The final bundle travels with `dvc push` and `dvc pull`, and is taken up again where it arrives."""

import json
import shutil
import subprocess

import pytest

from artifacts import list_runs, read_folder


@pytest.fixture
def clone(prepared):
    """The project as a fresh clone finds it after its owner's `dvc push`: what Git has, and a remote to pull from.

    It takes the place of the owner's, so that kernels are not compiled again.
    """
    root = prepared.root
    # Relative: DVC cannot write a path outside ASCII into its settings.
    prepared.dvc("remote", "add", "-d", "shelf", "../shelf")
    prepared.dvc("push")
    prepared.git("add", "-A")
    prepared.git("commit", "-q", "-m", "a run")
    owner = root.with_name("owner")
    shutil.rmtree(owner, ignore_errors=True)
    root.rename(owner)
    subprocess.run(["git", "clone", "-q", str(owner), str(root)], check=True)
    yield prepared
    shutil.rmtree(owner)
    shutil.rmtree(root.parent / "shelf")


def test_a_bundle_is_taken_up_again_from_a_dvc_remote(clone):
    for command in (("sample", "final"), ("show", "final"), ("resume", "final", "--fork", "-S", "train.steps=20")):
        assert "get it with `dvc pull`" in clone.call(*command, code=3).stderr
    clone.dvc("pull")
    assert clone.dvc("status").stdout.startswith("Data and pipelines are up to date")
    final = json.loads(clone.read("run/run.json"))["final_bundle"]
    assert read_folder(clone.root / "run" / "bundle", final).state["step"] == 12
    assert clone.read("run/sample.txt").rstrip("\n") in clone.call("sample", "final").stdout
    said = clone.reproduce("resume", "final", "--fork", "-S", "train.steps=20").stdout
    record = said.split("record ")[1].split()[0]
    (run,) = list_runs(clone.store())
    assert run.bundles[12] != run.bundles[20]
    assert "verdict: bit-exact" in clone.reproduce("verify", record).stdout
    assert "verdict: bit-exact" in clone.reproduce("verify", clone.record()).stdout
    assert "0 missing, 0 corrupt" in clone.call("fsck").stdout


def test_a_damaged_pull_is_noticed(clone):
    clone.dvc("pull")
    tensor = clone.root / "run" / "bundle" / "tensors" / "00003.bin"
    data = bytearray(tensor.read_bytes())
    data[0] ^= 1
    tensor.unlink()  # it may be a link to DVC's cache
    tensor.write_bytes(data)
    for command in (("sample", "final"), ("resume", "final", "--fork", "-S", "train.steps=20")):
        assert "00003.bin" in clone.call(*command, code=4).stderr
