"""What the card asks of the planner; no GPU is needed."""

from types import SimpleNamespace

import pytest

from engine.backends.cuda.attention import AttentionTwin, Shape, shape_within
from engine.backends.cuda.layout import CudaLayout
from engine.backends.cuda.opening import cuda_plan
from engine.errors import PlanRefused
from engine.operations.attention import Attention
from engine.operations.base import BufferType
from engine.program import build_program
from tests.cuda.pairs import model, train


@pytest.mark.parametrize(
    ("shards", "limit", "at_once", "sets"),
    [(8, 10**6, 8, 1), (8, 44, 4, 1), (8, 22, 2, 2), (8, 1, 1, 3), (6, 10**6, 2, 2), (3, 10**6, 1, 2), (1, 1, 1, 1)]
    + [(64, 10**6, 16, 2)],
)
def test_shards_taken_together(
    shards: int, limit: int, at_once: int, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaLayout, "tokens_at_once", limit)
    layout = CudaLayout(build_program(model()), train(batch=shards, shards=shards), "portable")
    assert layout.shards_at_once(shards) == at_once
    assert layout.gradient_sets(shards) == sets


def test_what_is_made_as_planes_is_not_kept() -> None:
    program = build_program(model(d_model=16, heads=2, hidden=32))
    fused = CudaLayout(program, train(), "portable")
    plain = CudaLayout(program, train(), "portable", fused=False)
    for step in (s for s in program.backward if s.operation.kind == "linear"):
        kept = [] if step.operation.name != "block0.attn_out" else ["block0.attn.y"]
        assert fused.kept_tensors(step) == kept
        assert plain.kept_tensors(step) == [step.operation.inputs["x"]]
    stored = fused.tensor_type("norm.y", BufferType((2, 11, 16), "float32"))
    assert stored.bytes == 2 * 11 * (2 * 128 + 4)
    assert fused.tensor_type("norm.mean", BufferType((2, 11), "float32")).dtype == "float32"


def test_neither_the_saved_copy_nor_attention_weights_are_in_the_arena() -> None:
    _, plan, _ = cuda_plan(build_program(model(attention="stored")), train(), "portable")
    assert not {"saving", "attention"} & plan.totals().keys()


def test_buffers_stay_while_weight_gradients_run_beside() -> None:
    program, plan, layout = cuda_plan(build_program(model()), train(), "portable")
    count = len(program.operations)
    for time, step in enumerate(program.backward):
        if step.operation.kind == "linear":
            name = f"{step.operation.name}/backward/dy"
            later = range(time + 1, len(program.backward))
            waiting = next((n for n in later if layout.waits(program.backward[n])), len(program.backward))
            assert plan.buffers[name].last >= min(count + time + layout.lingers(step), count + waiting - 1)


def test_zeroed_buffers_do_not_overlap() -> None:
    layout = CudaLayout(build_program(model()), train(), "portable")
    places = sorted(layout.zero_places.values())
    assert len(set(places)) == len(places)
    assert layout.zero_bytes > places[-1]


KIB = 1024


@pytest.mark.parametrize(
    ("limit", "wide", "shape"),
    [
        (227 * KIB, 32, Shape(2, 1)), (227 * KIB, 64, Shape(2, 1)), (227 * KIB, 256, Shape(2, 0)),
        (163 * KIB, 64, Shape(2, 1)), (163 * KIB, 256, Shape(1, 0)), (99 * KIB, 32, Shape(2, 1)),
        (99 * KIB, 64, Shape(1, 1)), (99 * KIB, 128, Shape(1, 0)), (99 * KIB, 256, None),
        (64 * KIB, 32, Shape(1, 1)), (64 * KIB, 64, Shape(1, 0)), (64 * KIB, 128, None),
    ],
)  # fmt: skip
def test_attention_fits_the_shared_memory_of_each_architecture(limit: int, wide: int, shape: Shape | None) -> None:
    assert shape_within(wide, limit) == shape


def test_heads_too_wide_for_a_card_are_refused_by_name() -> None:
    operation = next(o for o in build_program(model(d_model=512, heads=2)).operations if isinstance(o, Attention))
    card = SimpleNamespace(shared_limit=99 * KIB, name="Some Card")
    with pytest.raises(PlanRefused, match=r"heads of width 256 need 1[0-9]+ KiB .* Some Card has 99 KiB"):
        AttentionTwin().check(operation, card)  # type: ignore[arg-type]
