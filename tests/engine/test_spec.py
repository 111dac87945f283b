"""What a configuration may not say: clear errors, never a wrong model or an endless wait."""

from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import PlanRefused
from engine.plan import make_plan
from engine.program import build_program
from engine.spec import Section
from engine.trainer import Trainer
from tests.engine.training import MODEL, TRAIN, Tokens, model_spec, train_spec

NOT_NUMBERS: list[Any] = ["1e-3", None, float("nan"), float("inf"), -float("inf"), [1], True]
COUNTS: list[Any] = [0, -1, 2.0, 2**31, "4", None, True, 10**30]

BAD_MODEL: list[tuple[str, Any]] = [
    *((field, value) for field in ("vocab", "context", "d_model", "heads", "layers", "hidden") for value in COUNTS),
    *(("dropout", value) for value in (-0.1, 1.0, 1.5, *NOT_NUMBERS)),
    *(("init_std", value) for value in (0.0, -1.0, 1e-40, 1e39, *NOT_NUMBERS)),
    ("activation", "swish"),
    ("activation", "GELU"),
    ("attention", "flash"),
    ("tied", "yes"),
    ("linear_bias", 1),
    ("norm_parameters", None),
    ("heads", 5),  # does not divide 12
    ("heads", 24),
    ("d_model", 257 * 3),  # heads of 257
    ("vocab", 2**24 + 1),
    ("layers", 257),
    ("n_layer", 2),  # a misspelt key
]
BAD_TRAIN: list[tuple[str, Any]] = [
    *((field, value) for field in ("steps", "batch", "shards") for value in COUNTS),
    *(
        (field, value)
        for field in ("learning_rate", "final_learning_rate", "weight_decay", "clip_norm")
        for value in (-1e-9, 1e39, *NOT_NUMBERS)
    ),
    *((field, value) for field in ("beta1", "beta2") for value in (-0.1, 1.0, *NOT_NUMBERS)),
    *(("epsilon", value) for value in (0.0, -1e-8, 1e-40, 1e39, *NOT_NUMBERS)),
    *(("seed", value) for value in (-1, 2**63, 1.0, "1", None)),
    *(("warmup_steps", value) for value in (-1, 7, 1.5, None)),
    ("shards", 4),  # does not divide 6
    ("shards", 12),
    ("final_learning_rate", 0.02),  # above the peak
    ("decayed", ["weights"]),
    ("decayed", ["matrix", "matrix"]),
    ("decayed", "matrix"),
    ("lr", 1e-3),
]


@pytest.mark.parametrize(
    ("make", "good", "field", "value"),
    [(model_spec, MODEL, *bad) for bad in BAD_MODEL] + [(train_spec, TRAIN, *bad) for bad in BAD_TRAIN],
)
def test_bad_values_are_named(make: Any, good: Any, field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        make(**{field: value})
    assert field in str(error.value)


@pytest.mark.parametrize(("make", "good"), [(model_spec, MODEL), (train_spec, TRAIN)])
def test_nothing_has_a_default(make: Any, good: dict[str, Any]) -> None:
    cls = type(make())
    assert issubclass(cls, Section)
    for field in good:
        with pytest.raises(ValidationError, match=field):
            cls(**{name: value for name, value in good.items() if name != field})


def test_specs_do_not_change() -> None:
    for spec in (model_spec(), train_spec()):
        with pytest.raises(ValidationError):
            spec.batch = 1  # type: ignore[union-attr]


def test_identity_leaves_out_what_decides_no_bit() -> None:
    assert model_spec(attention="stored").identity() == model_spec(attention="tiled").identity()
    assert model_spec(dropout=0.2).identity() != model_spec().identity()


@pytest.mark.parametrize(
    "changes",
    [
        {"d_model": 2**30, "heads": 2**22, "layers": 1},
        {"context": 2**31 - 1, "attention": "stored", "layers": 1},
        {"hidden": 2**31 - 1, "d_model": 2**31 - 2, "heads": 2**30 - 1, "layers": 1},
        {"vocab": 2**24, "d_model": 2**28, "heads": 2**20, "layers": 3},
    ],
)
def test_a_model_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    """Sizes are counted exactly, however large: none wraps around and slips through."""
    model, train = model_spec(**changes), train_spec()
    with pytest.raises(PlanRefused, match=r"needs [\d,]+ MiB.*has [\d,]+ MiB.*Use a smaller"):
        Trainer(model, train, "portable", Tokens(model_spec(), 6), threads=1)
    assert make_plan(build_program(model), train, "portable", 1).arena_bytes > 2**40
