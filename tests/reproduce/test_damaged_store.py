"""A store that has lost objects: what is left is still listed, and every refusal names a way out that exists."""

import contextlib
import io

import pytest

from reproduce import cli


def call(lab, *words, code):
    """What is said on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(lab.project.root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = cli.main(words)
    assert found == code, out.getvalue() + err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture
def emptied(spoilt):
    """Without any object."""
    for name in list(spoilt.store.objects()):
        spoilt.store.object_path(name).unlink()
    return spoilt


def test_log_marks_a_damaged_record_and_lists_the_rest(spoilt):
    spoilt.store.object_path(spoilt.record).unlink()
    said, _ = call(spoilt, "log", code=0)
    assert f"record {spoilt.record[:12]}  damaged: `reproduce fsck`" in said
    assert "complete  bundle" in said


def test_log_marks_a_damaged_run_and_lists_the_rest(spoilt):
    (path,) = (spoilt.store.path / "runs").iterdir()
    (path / "bundles").write_bytes(b"spoilt")
    said, _ = call(spoilt, "log", code=0)
    assert f"run {path.name[:12]}  damaged: `reproduce fsck`" in said
    assert f"record {spoilt.record[:12]}  12 steps" in said


@pytest.mark.parametrize("words", [("train",), ("resume",), ("gc",)])
def test_the_way_out_is_named(emptied, words):
    _, said = call(emptied, *words, code=4)
    assert "`reproduce pull URL` or `reproduce import CAPSULE`" in said
    assert f"move {emptied.store.path} away" in said


def test_training_anew_comes_to_the_same_bundle(emptied):
    before = emptied.project.outputs.joinpath("run.json").read_bytes()
    emptied.store.path.rename(emptied.store.path.with_name("away"))
    call(emptied, "train", code=0)
    call(emptied, "commit", code=0)
    assert emptied.project.outputs.joinpath("run.json").read_bytes() == before
    assert call(emptied, "verify", emptied.record, "--steps", "1:2", code=0)
