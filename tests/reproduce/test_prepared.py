"""What belongs together is used together: a configuration, the dataset made from it, its run and its lock."""

import json
import shutil

import pytest

from artifacts import find_records
from data_pipeline import open_dataset
from reproduce.committing import commit
from reproduce.configuration import check
from reproduce.errors import ConfigurationError, Inconclusive
from reproduce.history import sample_text
from reproduce.importing import find_or_import
from reproduce.prepared import first_difference, open_prepared
from reproduce.selftest.lab import settings_with
from reproduce.stages import evaluate_stage, plan_stage, prepare_stage, train_stage

OTHER_DATA = {
    "sources": {"sources": [{"kind": "file", "paths": ["other/*.txt"]}]},
    "cleaning": {"cleaning": ["nfc"]},
    "tokenizer.kind": {"tokenizer": {"kind": "bpe", "vocabulary": 300}},
    "validation_permille": {"validation_permille": 60},
}


@pytest.mark.parametrize("key", OTHER_DATA)
@pytest.mark.parametrize("stage", [plan_stage, train_stage, evaluate_stage])
def test_a_dataset_of_another_data_section_is_refused(lab, stage, key):
    configuration = check(settings_with({"data": OTHER_DATA[key]}), "changed")
    with pytest.raises(ConfigurationError, match=rf"\(data\.{key} differs\): run `dvc repro`"):
        stage(lab.project, configuration)


def test_another_size_of_vocabulary_is_a_difference(lab):
    manifest = open_dataset(lab.project.dataset).manifest
    entry = manifest.tokenizer.model_copy(update={"kind": "bpe", "size": 300})
    bpe = manifest.model_copy(update={"tokenizer": entry})
    for vocabulary, expected in ((300, None), (301, "tokenizer.vocabulary")):
        settings = settings_with({"data": {"tokenizer": {"kind": "bpe", "vocabulary": vocabulary}}})
        assert first_difference(bpe, check(settings, "bpe").data) == expected


def test_its_own_dataset_is_taken(lab):
    assert open_prepared(lab.project.dataset, lab.configuration.data).hash == lab.read().dataset


@pytest.mark.parametrize("stage", [prepare_stage, plan_stage, train_stage, evaluate_stage])
def test_what_no_stage_has_made_yet_is_not_called_damaged(lab, tmp_path, stage):
    project = type(lab.project)(tmp_path)
    with pytest.raises(Inconclusive, match="has not run yet: run `dvc repro`"):
        stage(project, lab.configuration)


def test_without_a_dataset_a_bundle_is_not_called_damaged(spoilt):
    shutil.rmtree(spoilt.project.dataset)
    with pytest.raises(Inconclusive, match="run `dvc repro`"):
        sample_text(spoilt.project, spoilt.configuration, "final", {})
    shutil.rmtree(spoilt.project.private())
    with pytest.raises(Inconclusive, match="run `dvc repro`"):
        find_or_import(spoilt.project, spoilt.configuration.run, spoilt.record)


def test_a_run_that_the_store_has_not_is_missing_not_damaged(spoilt):
    shutil.rmtree(spoilt.project.private())
    with pytest.raises(Inconclusive, match="`reproduce train` makes it anew"):
        commit(spoilt.project, spoilt.configuration)


@pytest.mark.parametrize(
    "changes",
    [{"train": {"steps": 13}}, {"train": {"learning_rate": 1e-3}}, {"data": OTHER_DATA["sources"]}],
)
def test_a_changed_configuration_commits_nothing(lab, changes):
    before = find_records(lab.store)
    with pytest.raises(ConfigurationError, match=r"params\.yaml has changed since run"):
        commit(lab.project, check(settings_with(changes), "changed"))
    assert find_records(lab.store) == before


@pytest.mark.parametrize("fault", ["configuration", "dataset"])
def test_a_lock_of_another_run_commits_nothing(spoilt, fault):
    lock = json.loads(spoilt.project.lock.read_text(encoding="utf-8"))
    stage = lock["stages"]["evaluate"]
    if fault == "configuration":
        stage["params"]["params.yaml"]["train"]["steps"] = 13
    else:
        stage["deps"][0]["md5"] = "0" * 32
    spoilt.project.lock.write_text(json.dumps(lock), encoding="utf-8", newline="")
    before = find_records(spoilt.store)
    with pytest.raises(ConfigurationError, match=r"dvc\.lock is not of run .*Run `dvc repro`"):
        commit(spoilt.project, spoilt.configuration)
    assert find_records(spoilt.store) == before
