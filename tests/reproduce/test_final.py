"""`final` is the last run's bundle, also after params.yaml has become another experiment's."""

import contextlib
import io
import json
import shutil

import pytest

from reproduce import cli
from reproduce.selftest.lab import settings_with


def call(lab, *words, code=0):
    """What is said on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(lab.project.root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = cli.main(words)
    assert found == code, out.getvalue() + err.getvalue()
    return out.getvalue(), err.getvalue()


def use_another(lab):
    settings = settings_with({"model": {"d_model": 32}, "sampling": {"tokens": 7, "seed": 2}})
    lab.project.params.write_text(json.dumps(settings), encoding="utf-8", newline="")


@pytest.mark.parametrize("lost", [None, "record.json", "store"])
def test_final_is_sampled_with_its_own_configuration(spoilt, lost):
    before = call(spoilt, "sample", "final")
    use_another(spoilt)
    if lost == "record.json":
        (spoilt.project.outputs / lost).unlink()
    if lost == "store":
        shutil.rmtree(spoilt.project.private())
    assert call(spoilt, "sample", "final") == before


def test_where_nothing_tells_its_configuration_another_is_refused(spoilt):
    before = call(spoilt, "sample", "final")
    (spoilt.project.outputs / "record.json").unlink()
    shutil.rmtree(spoilt.project.private())
    assert call(spoilt, "sample", "final") == before
    use_another(spoilt)
    _, said = call(spoilt, "sample", "final", code=2)
    assert "another configuration" in said
