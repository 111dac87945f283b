"""The tier prod through the same stages and verdicts as every other: on the card every bit, elsewhere a tolerance."""

import pytest

from reproduce.configuration import check
from reproduce.errors import ConfigurationError
from reproduce.selftest.lab import Deviation, Lab, make_lab, settings_with
from reproduce.verification.distances import Tolerance

PROD = {
    "tier": "prod",
    "model": {"d_model": 64, "hidden": 128, "context": 32, "heads": 2, "dropout": 0.1},
    "train": {"steps": 24, "batch": 8, "shards": 4, "warmup_steps": 4, "clip_norm": 1.0, "precision": "bf16"},
    "run": {"save_every_steps": 8, "device": "cuda"},
}


def with_precision(precision: str) -> dict[str, object]:
    return {**PROD, "train": {**PROD["train"], "precision": precision}}


def on_the_cpu(lab: Lab) -> Lab:
    settings = settings_with(PROD)
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
        ({"tier": "prod", "train": {"precision": "fp8"}}, "precision"),
    ],
)
def test_tier_and_precision_have_to_fit(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        check(settings_with(changes), "it")


def test_training_on_a_cpu_is_refused(tmp_path):
    settings = {**PROD, "run": {"device": "cpu"}}
    with pytest.raises(ConfigurationError, match="the tier prod trains on cuda, found cpu"):
        make_lab(tmp_path / "project", settings)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_the_same_card_every_bit_is_the_same(tmp_path, precision):
    lab = make_lab(tmp_path / "project", with_precision(precision))
    found = lab.verify()
    assert (found["code"], found["verdict"]) == (0, "bit-exact")
    found = lab.verify(steps="10:14")
    assert (found["code"], found["verdict"]) == (0, "bit-exact")


@pytest.mark.gpu
def test_on_a_cpu_it_is_within_the_tolerance_and_another_rate_is_not(tmp_path):
    lab = make_lab(tmp_path / "project", PROD)
    assert Tolerance.read(lab.read().tolerance).changes == [
        "products, attention and sums in the arithmetic of the tier portable"
    ]
    here = on_the_cpu(lab)
    found = here.verify()
    assert (found["code"], found["verdict"]) == (0, "within tolerance"), found
    rate = 1.01 * lab.configuration.train.learning_rate
    changed = {**PROD, "train": {**PROD["train"], "learning_rate": rate}}
    other = lab.forge_run(Deviation(settings=changed))
    found = here.verify(other)
    assert (found["code"], found["verdict"]) == (1, "differs"), found
