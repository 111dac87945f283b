"""The tier prod's program and plan, which need no card."""

from itertools import combinations
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from engine.backends.cuda.layout import CudaLayout
from engine.backends.cuda.mixed.layout import MixedLayout
from engine.backends.cuda.mixed.operations import Classifier, FlashAttention, Mlp, ResidualNorm
from engine.backends.cuda.opening import cuda_plan
from engine.errors import SpecError
from engine.plan import Plan
from engine.program import Program, build_program
from engine.spec import ModelSpec, TrainSpec
from reproduce.configuration import load_configuration
from reproduce.planning.devices import find_device
from reproduce.planning.report import plan_for

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
NAMES = sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))


def specs(name: str, **changes: object) -> tuple[ModelSpec, TrainSpec]:
    sections = YAML(typ="safe", pure=True).load(EXPERIMENTS / f"{name}.yaml")
    return ModelSpec(**(sections["model"] | changes)), TrainSpec(**(sections["train"] | {"precision": "bf16"}))


def planned(name: str, recompute: int = 0, capability: int = 90, **changes: object) -> tuple[Program, Plan]:
    model, train = specs(name, **changes)
    program, plan, _ = cuda_plan(build_program(model, recompute), train, "prod", capability=capability)
    return program, plan


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", NAMES)
def test_it_takes_less_memory_than_portable_and_less_still_with_blocks_computed_again(
    name: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For as many tokens at once: by itself the tier portable takes fewer.
    monkeypatch.setattr(CudaLayout, "tokens_at_once", MixedLayout.tokens_at_once)
    model, train = specs(name)
    _, plain = planned(name, capability=capability)
    _, again = planned(name, model.layers, capability)
    wide = cuda_plan(build_program(model), train.model_copy(update={"precision": None}), "portable")[1]
    assert again.arena_bytes < plain.arena_bytes
    if name != "tiny":  # whose workspaces outweigh its model
        assert plain.arena_bytes < wide.arena_bytes


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("recompute", [0, 2])
def test_buffers_that_live_at_one_time_share_no_byte(recompute: int, capability: int) -> None:
    _, plan = planned("tiny", recompute, capability)
    places = {(b.offset, b.type.bytes, b.first, b.last) for b in plan.buffers.values() if b.type.bytes}
    for (a, a_size, a_first, a_last), (b, b_size, b_first, b_last) in combinations(sorted(places), 2):
        apart_in_time = a_last < b_first or b_last < a_first
        assert apart_in_time or a == b or a + a_size <= b or b + b_size <= a


def test_neighbours_are_joined_and_parameters_stay_as_they_are() -> None:
    program, _ = planned("tiny")
    common = build_program(specs("tiny")[0])
    kinds = [type(operation) for operation in program.operations]
    layers = common.spec.layers
    assert kinds.count(Mlp) == kinds.count(FlashAttention) == layers
    assert kinds.count(ResidualNorm) == 2 * layers
    assert kinds[-1] is Classifier
    assert program.parameters == common.parameters
    used = {name for o in program.operations for name in o.parameters.values()}
    assert used == {parameter.name for parameter in common.parameters}
    assert [o.index for o in program.operations] == list(range(len(program.operations)))


@pytest.mark.parametrize(("card", "capability"), [("h200", 90), ("a100-80", 80)])
def test_what_plan_shows_for_a_card_is_what_the_engine_makes_there(card: str, capability: int) -> None:
    settings = ["tier=prod", "train.precision=bf16", "run.device=cuda"]
    for name in NAMES:
        configuration = load_configuration(EXPERIMENTS / f"{name}.yaml", settings)
        shown = plan_for(configuration, find_device(card))[1]
        _, made, _ = cuda_plan(
            build_program(configuration.model, configuration.recomputed_blocks),
            configuration.train,
            "prod",
            capability=capability,
        )
        assert shown == made


def test_every_bias_has_one_that_sums_its_gradient() -> None:
    program, _ = planned("tiny")
    biases = {o.branch_bias for o in program.operations if isinstance(o, ResidualNorm)}
    assert biases == {f"block{n}.{name}.bias" for n in range(4) for name in ("attn_out", "mlp_down")}


def test_logits_are_padded_and_stand_where_their_gradient_will() -> None:
    program, plan = planned("tiny")
    assert program.tensors[program.logits].shape[-1] == 128
    assert plan.buffers[program.logits].offset == plan.buffers[f"d({program.logits})"].offset


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"d_model": 124, "heads": 4}, "model.d_model"),
        ({"hidden": 509}, "model.hidden"),
        ({"d_model": 128, "heads": 32}, "head"),
        ({"d_model": 512, "heads": 2}, "heads at most 128"),
    ],
)
def test_widths_without_a_fast_kernel_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        planned("tiny", **changes)


def test_packing_is_a_function_of_the_configuration() -> None:
    model, train = specs("gpt2-124m")
    _, _, layout = cuda_plan(build_program(model), train, "prod")
    assert isinstance(layout, MixedLayout)
    assert layout.shards_at_once(train.shards) == 4
    assert layout.gradient_sets(train.shards) == 1
    assert layout.shards_within(1024, 2**40) == 64
