"""Exact parameter counts, against a formula of their own."""

from math import log, prod
from pathlib import Path

import pytest
from hypothesis import given, settings

from engine.program import build_program
from engine.spec import ModelSpec
from reproduce.configuration import load_configuration
from reproduce.model.code import graph_of
from reproduce.planning.devices import Device
from reproduce.planning.items import parameters_of
from reproduce.planning.report import report
from tests.plan.models import EXPERIMENTS, specs

# Counted by hand from the published shapes: the experiment's own choice and the other, tied and untied.
COUNTS = {
    "andrea-120m": {True: 12 * 12 * 768**2 + (8449 + 1024) * 768, False: 98_698_752},
    "char-4.8m": {True: 4_829_184, False: 4_853_760},
}


def formula(spec: ModelSpec) -> int:
    """Parameters of a pre-norm GPT, added up without the engine."""
    d, h, bias, norm = spec.d_model, spec.hidden, int(spec.linear_bias), 2 * int(spec.norm_parameters)
    embeddings = (spec.vocab + spec.context) * d
    attention = 3 * d * d + d * d + bias * 4 * d
    mlp = 2 * d * h + bias * (h + d)
    head = 0 if spec.tied else spec.vocab * d
    return embeddings + spec.layers * (attention + mlp + 2 * norm * d) + norm * d + head


def count(spec: ModelSpec) -> int:
    return sum(item.elements for item in parameters_of(build_program(spec)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_counts_of_the_experiments(path: Path, tied: bool) -> None:
    spec = load_configuration(path, [f"model.tied={str(tied).lower()}"]).model
    assert count(spec) == formula(spec) == graph_of(spec).parameter_count
    assert count(spec) == COUNTS.get(path.stem, {}).get(tied, formula(spec))


def test_the_published_count() -> None:
    """andrea-120m: untied, without biases of linear layers and without parameters of norms."""
    [path] = [path for path in EXPERIMENTS if path.stem == "andrea-120m"]
    spec = load_configuration(path).model
    assert (spec.tied, spec.linear_bias, spec.norm_parameters) == (False, False, False)
    assert count(spec) == 98_698_752


@settings(max_examples=50)
@given(specs())
def test_counts_of_any_model(spec: ModelSpec) -> None:
    items = parameters_of(build_program(spec))
    assert sum(item.elements for item in items) == formula(spec) == graph_of(spec).parameter_count
    for item in items:
        assert item.elements == item.count * prod(item.shape)
        assert item.count in (1, spec.layers)


def test_report_has_count_and_first_loss() -> None:
    [path] = [path for path in EXPERIMENTS if path.stem == "char-4.8m"]
    found = report(load_configuration(path), Device("cpu", "cpu", 2**33, "there is"))
    assert found.parameter_count == 4_829_184
    assert found.initial_loss == log(96)
    assert found.to_json()["parameters"]["total"] == 4_829_184
