"""Forks: new runs that say where they come from, and that can be verified; and no change without one."""

import json
import os
from contextlib import chdir

import pytest

from artifacts import list_runs, load_bundle, read_record
from engine.backends.cuda.errors import DeviceUnavailable
from reproduce import cli
from reproduce.diff.sides import find_side
from reproduce.lineage import Lineage


def call(lab, capsys, *words, code=0):
    """`reproduce` in the lab's folder: what it prints, and what it complains of."""
    with chdir(lab.project.root):
        assert cli.main(words) == code
    return capsys.readouterr()


def forked(lab, capsys, *words):
    said = call(lab, capsys, "resume", *words).out
    return said.split("record ")[1].split()[0]


def test_a_fork_of_a_finished_run_goes_on_and_verifies(spoilt, capsys):
    outputs = (spoilt.project.outputs / "run.json").read_bytes()
    name = forked(spoilt, capsys, "--fork", "-S", "train.steps=20")
    record, parent = read_record(spoilt.store, name), spoilt.read()
    assert record.lock["fork"] == {"bundle": parent.final_bundle, "step": 12}
    (run,) = (r for r in list_runs(spoilt.store) if record.final_bundle in r.bundles.values())
    lineage = Lineage.read(run.lineage, run.run_id)
    assert (lineage.fork.bundle, lineage.fork.step) == (parent.final_bundle, 12)
    assert lineage.fork.changes == ["train.steps: was 12, is 20"]
    assert sorted(run.bundles) == [12, 15, 20]
    before, after = (load_bundle(spoilt.store, b).tensors for b in (parent.final_bundle, record.first_bundle))
    assert all((before[key] == after[key]).all() for key in before)
    found = spoilt.verify(name)
    assert (found["verdict"], found["steps"], found["compared"]["digests"]) == ("bit-exact", [13, 20], 8)
    assert spoilt.verify(name, jobs=2)["compared"] == found["compared"]
    said, _ = call(spoilt, capsys, "verify", name)
    assert "fork: this run begins at step 12, at the state of bundle " + parent.final_bundle in said
    assert (spoilt.project.outputs / "run.json").read_bytes() == outputs
    assert find_side(spoilt.store, name).first_step == 12
    assert f"fork of bundle {parent.final_bundle[:12]} at step 12" in call(spoilt, capsys, "log").out
    assert "\n  step           12\n" in call(spoilt, capsys, "show", name).out


def test_a_fork_of_an_earlier_bundle_with_another_recipe(spoilt, capsys):
    middle = spoilt.bundles()[5]
    name = forked(spoilt, capsys, middle[:12], "--fork", "-S", "train.learning_rate=0.001", "-S", "model.dropout=0.0")
    assert spoilt.verify(name)["verdict"] == "bit-exact"
    assert (
        forked(spoilt, capsys, middle[:12], "--fork", "-S", "train.learning_rate=0.001", "-S", "model.dropout=0.0")
        == name
    )
    said, _ = call(spoilt, capsys, "diff", spoilt.record, name, code=1)
    assert "the states differ first after step 6" in said
    assert "train.learning_rate: was 0.002, is 0.001" in said


def test_a_fork_whose_first_state_is_not_its_parents_is_corrupt(spoilt, capsys):
    name = forked(spoilt, capsys, "--fork", "-S", "train.steps=14")
    record = read_record(spoilt.store, name)
    lock = {**record.lock, "fork": {"bundle": spoilt.bundles()[5], "step": 12}}
    forged = record.model_copy(update={"lock": lock})
    from artifacts import write_record

    found = spoilt.verify(write_record(spoilt.store, forged, {}))
    assert (found["verdict"], found["code"]) == ("corrupt", 4)
    assert "has not the tensors" in found["reason"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fork"], "nothing would change"),
        (["--fork", "-S", "train.steps=12"], "nothing would change"),
        (["--fork", "-S", "train.steps=8"], "is at step 12, and the fork would end at train.steps=8"),
        (["--fork", "-S", "model.layers=2"], "model.layers: was 1, is 2"),
        (["--fork", "-S", "tier=debug"], "tier: was the text 'portable'"),
        (["--fork", "-S", "train.stepz=8"], "did you mean 'steps'"),
        (["-S", "train.steps=20"], "add --fork"),
    ],
)
def test_forks_that_are_none(spoilt, capsys, words, says):
    assert says in call(spoilt, capsys, "resume", *words, code=2).err
    assert len(list_runs(spoilt.store)) == 1


def test_resuming_under_another_configuration_lists_what_changed(spoilt, capsys):
    params = spoilt.project.params
    value = json.loads(params.read_bytes())
    value["train"]["learning_rate"] = 0.001
    params.write_text(json.dumps(value), encoding="utf-8")
    said = call(spoilt, capsys, "resume", code=2).err
    assert "train.learning_rate: was 0.002, is 0.001" in said
    assert "--fork" in said
    assert len(list_runs(spoilt.store)) == 1


@pytest.mark.parametrize(
    ("section", "key", "value", "may"),
    [
        ("train", "learning_rate", 0.001, True),
        ("model", "dropout", 0.2, True),
        ("model", "layers", 2, False),
        (None, "tier", "debug", False),
    ],
)
def test_a_fork_is_offered_where_it_works(spoilt, capsys, section, key, value, may):
    params = spoilt.project.params
    whole = json.loads(params.read_bytes())
    (whole if section is None else whole[section])[key] = value
    params.write_text(json.dumps(whole), encoding="utf-8")
    said = call(spoilt, capsys, "resume", code=2).err
    assert f"{key}: was" in said
    assert (f"resume {spoilt.bundles()[12][:12]} --fork" in said) == may


def test_a_fork_that_cannot_be_trained_here_leaves_no_run(spoilt, capsys, monkeypatch):
    def absent(name):
        raise DeviceUnavailable("there is no card")

    monkeypatch.setattr("reproduce.forking.find_device", absent)
    assert "there is no card" in call(spoilt, capsys, "resume", "--fork", "-S", "train.steps=14", code=3).err
    assert len(list_runs(spoilt.store)) == 1


def test_resuming_a_finished_run_changes_nothing(spoilt, capsys):
    call(spoilt, capsys, "resume")
    assert len(list_runs(spoilt.store)) == 1
    assert os.listdir(spoilt.store.path / "attestations") == [spoilt.record]
