"""The tier prod through the same stages and verdicts as every other: on the card every bit, elsewhere a tolerance."""

import json

import pytest

from artifacts import load_bundle
from engine.trainer import Trainer
from reproduce.configuration import check
from reproduce.diff import diff
from reproduce.diff.sides import find_side
from reproduce.errors import ConfigurationError, ReproduceError
from reproduce.project import Project
from reproduce.selftest.lab import Deviation, Lab, make_lab, quietly, settings_with
from reproduce.stages import train_stage
from reproduce.verification.distances import Tolerance
from tests.cuda import fake_card
from tests.cuda.emulation import COMPILER

ON_A_CARD = {"d_model": 64, "hidden": 128, "context": 32, "heads": 2, "dropout": 0.1}
EMULATED = {"d_model": 16, "hidden": 32, "context": 8, "heads": 2, "dropout": 0.1}
PROD = {
    "tier": "prod",
    "model": ON_A_CARD,
    "train": {"steps": 12, "batch": 4, "shards": 2, "warmup_steps": 4, "clip_norm": 1.0, "precision": "bf16"},
    "run": {"save_every_steps": 5, "device": "cuda"},
}


@pytest.fixture(params=[pytest.param("card", marks=pytest.mark.gpu), "emulated"])
def prod(request, monkeypatch):
    """Settings for the card, or for one made of host memory, on which the tier portable runs on the CPU."""
    if request.param == "card":
        return PROD
    if COMPILER is None:
        pytest.skip("no C++ compiler for the emulator")
    fake_card.install(monkeypatch)

    def trainer(model, train, tier, batches, **more):
        return Trainer(model, train, tier, batches, **(more if tier == "prod" else {**more, "device": "cpu"}))

    monkeypatch.setattr("reproduce.workbench.Trainer", trainer)
    return {**PROD, "model": EMULATED}


def on_the_cpu(lab: Lab, settings) -> Lab:
    settings = settings_with(settings)
    settings["run"]["device"] = "cpu"
    return Lab(lab.project, check(settings, "the same on a CPU"), lab.record)


def test_a_precision_is_part_of_the_identity_and_of_nothing_else_where_there_is_none():
    prod = check(settings_with(PROD), "it").identity()
    assert prod["train"]["precision"] == "bf16"
    portable = check(settings_with({}), "it").identity()
    assert "precision" not in portable["train"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tier": "prod"}, "needs one, found none"),
        ({"train": {"precision": "bf16"}}, "only the tier prod has one, found bf16 in the tier portable"),
        ({"tier": "prod", "train": {"precision": "fp4"}}, "precision"),
    ],
)
def test_tier_and_precision_have_to_fit(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        check(settings_with(changes), "it")


def test_training_on_a_cpu_is_refused(tmp_path):
    """By the stage `plan`, and by training itself for who goes past that."""
    settings = {**PROD, "run": {"device": "cpu"}}
    with pytest.raises(ReproduceError, match="the tier prod runs on a card"):
        make_lab(tmp_path / "project", settings)
    with pytest.raises(ConfigurationError, match="the tier prod trains on cuda, found cpu"):
        train_stage(Project(tmp_path / "project"), check(settings_with(settings), "it"))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_on_the_same_card_every_bit_is_the_same(prod, tmp_path, precision):
    lab = make_lab(tmp_path / "project", {**prod, "train": {**prod["train"], "precision": precision}})
    found = lab.verify()
    assert (found["code"], found["verdict"]) == (0, "bit-exact"), found
    found = lab.verify(steps="7:9")
    assert (found["code"], found["verdict"]) == (0, "bit-exact"), found


def test_bundles_name_the_algorithms_and_verifying_takes_them(prod, tmp_path):
    lab = make_lab(tmp_path / "project", prod)
    bundles = {step: load_bundle(lab.store, name) for step, name in lab.bundles().items()}
    choices = {step: json.loads(b.tensors["libraries/choices"].tobytes()) for step, b in bundles.items()}
    assert choices.pop(0)["products"] == {}
    assert all(found == choices[12] for found in choices.values())
    assert len(choices[12]["products"]) >= 6  # the library's; others are our own kernels'


def test_on_a_cpu_it_is_within_the_tolerance_and_another_rate_is_not(prod, tmp_path):
    lab = make_lab(tmp_path / "project", prod)
    assert Tolerance.read(lab.read().tolerance).changes == [
        "products, attention and sums in the arithmetic of the tier portable"
    ]
    here = on_the_cpu(lab, prod)
    found = here.verify()
    assert (found["code"], found["verdict"]) == (0, "within tolerance"), found
    rate = 1.5 * lab.configuration.train.learning_rate
    changed = {**prod, "train": {**prod["train"], "learning_rate": rate}}
    other = lab.forge_run(Deviation(settings=changed))
    found = here.verify(other)
    assert (found["code"], found["verdict"]) == (1, "differs"), found


def test_two_runs_are_compared_by_replays_on_the_card(prod, tmp_path):
    lab = make_lab(tmp_path / "project", prod)
    rate = 1.5 * lab.configuration.train.learning_rate
    other = make_lab(tmp_path / "other", {**prod, "train": {**prod["train"], "learning_rate": rate}})
    sides = find_side(lab.store, lab.record), find_side(lab.store, f"{other.store.path}:{other.record}")
    code, said = quietly(lambda: diff(lab.project, lab.configuration.run, *sides, True))
    found = json.loads(said)
    assert (code, found["step"]) == (1, 1)
    assert [state["origin"] for state in found["states"]] == ["replayed", "replayed"]
    assert found["tensors"] and all(entry["ulp"] > 0 for entry in found["tensors"])
