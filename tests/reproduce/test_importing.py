"""A record that Git brought, beside a run that was trained here."""

import shutil

from artifacts import record_bundles
from reproduce.stages import train_stage


def test_the_bundles_of_the_same_run_serve_a_record_that_came_with_git(lab, tmp_path):
    """After `dvc repro` in a clone DVC skips `commit`, whose output is there: verifying must not begin at step 0."""
    here = lab.copy(tmp_path / "clone")
    shutil.rmtree(here.store.path)
    train_stage(here.project, here.configuration)
    found = here.verify(steps="7:9")
    assert (found["code"], found["verdict"]) == (0, "bit-exact"), found
    assert record_bundles(here.store, here.record) == lab.bundles()


def test_without_such_a_run_the_first_and_the_final_bundle_do(lab, tmp_path):
    here = lab.copy(tmp_path / "clone")
    shutil.rmtree(here.store.path)
    found = here.verify(steps="7:9")
    assert (found["code"], found["verdict"]) == (0, "bit-exact"), found
    steps = lab.read().steps
    assert record_bundles(here.store, here.record) == {0: lab.bundles()[0], steps: lab.bundles()[steps]}
