"""What the card asks of the planner; no GPU is needed."""

import pytest

from engine.backends.cuda import layout as layout_module
from engine.backends.cuda.layout import CudaLayout
from engine.backends.cuda.opening import cuda_plan
from engine.program import build_program
from tests.cuda.pairs import model, train


@pytest.mark.parametrize(
    ("shards", "limit", "at_once", "sets"),
    [(8, 10**6, 8, 8), (8, 44, 4, 5), (8, 22, 2, 4), (8, 1, 1, 4), (6, 10**6, 2, 4), (3, 10**6, 1, 3), (1, 1, 1, 1)],
)
def test_shards_taken_together(
    shards: int, limit: int, at_once: int, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "TOKENS_AT_ONCE", limit)
    layout = CudaLayout(build_program(model()), train(batch=shards, shards=shards), "portable")
    assert layout.shards_at_once(shards) == at_once
    assert layout.gradient_sets(shards) == sets


def test_gradient_sets_stand_side_by_side() -> None:
    _, plan, _ = cuda_plan(build_program(model()), train(batch=8, shards=8), "portable")
    offsets = [plan.buffers[f"gradients{i}"].offset for i in range(plan.gradient_sets)]
    size = plan.buffers["gradients0"].type.bytes
    assert offsets == [offsets[0] + i * size for i in range(plan.gradient_sets)]


def test_neither_the_saved_copy_nor_attention_weights_are_in_the_arena() -> None:
    _, plan, _ = cuda_plan(build_program(model(attention="stored")), train(), "portable")
    assert not {"saving", "attention"} & plan.totals().keys()


def test_buffers_stay_while_weight_gradients_run_beside() -> None:
    program, plan, layout = cuda_plan(build_program(model()), train(), "portable")
    count = len(program.operations)
    for time, step in enumerate(program.backward):
        if step.operation.kind == "linear":
            name = f"{step.operation.name}/backward/dy"
            assert plan.buffers[name].last >= min(count + time + layout.lingers, 2 * count - 1)


def test_zeroed_buffers_do_not_overlap() -> None:
    layout = CudaLayout(build_program(model()), train(), "portable")
    places = sorted(layout.zero_places.values())
    assert len(set(places)) == len(places)
    assert layout.zero_bytes > places[-1]
