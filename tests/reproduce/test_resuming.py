"""Going on from a bundle that somebody names: only where it belongs."""

from artifacts import list_runs


def bundle(project, step):
    """The hash of the bundle of a step."""
    (run,) = list_runs(project.store())
    return run.bundles[step]


def test_another_configuration_lists_what_changed(prepared):
    prepared.write_params({"train": {"learning_rate": 0.001, "steps": 20}})
    said = prepared.call("resume", bundle(prepared, 5), code=2).stderr
    assert "train.learning_rate: was 0.002, is 0.001" in said
    assert "train.steps: was 12, is 20" in said


def test_another_text_is_named(prepared):
    text = prepared.root / "corpus" / "fox.txt"
    text.write_bytes(text.read_bytes() + b"One more line.\n")
    for stage in ("fetch", "prepare"):
        prepared.call("stage", stage)
    said = prepared.call("resume", bundle(prepared, 5), code=2).stderr
    assert "another dataset" in said


def test_an_earlier_bundle_comes_to_the_same_end(prepared):
    before = prepared.read("run/run.json")
    prepared.call("resume", bundle(prepared, 5)[:12])
    assert prepared.read("run/run.json") == before
    assert "up to date" in prepared.dvc("status").stdout


def test_a_bundle_of_other_sources_is_of_another_run(prepared):
    """Its losses on the way are not known here, and would be missing from the curves."""
    of_other_sources = bundle(prepared, 5)
    path = prepared.root / "data_pipeline" / "order.py"
    path.write_bytes(path.read_bytes() + b"# without effect\n")
    said = prepared.reproduce("resume", of_other_sources, code=2).stderr
    assert "of another run, made with other sources" in said


def test_a_hash_that_nobody_knows(prepared):
    assert "begins with 0123abcd" in prepared.call("resume", "0123abcd", code=2).stderr
    assert "expected 4 to 64" in prepared.call("resume", "xyz", code=2).stderr


def test_a_damaged_newest_bundle_is_not_skipped_without_a_word(prepared):
    """The newest whole one is named, and going on from it is a decision."""
    store = prepared.store()
    final = bundle(prepared, 12)
    path = store.object_path(final)
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:-1])
    said = prepared.call("resume", code=4).stderr
    assert f"reproduce resume {bundle(prepared, 10)}" in said
    before = prepared.read("run/run.json")
    prepared.call("resume", bundle(prepared, 10))
    assert prepared.read("run/run.json") == before
    assert path.read_bytes() == whole
