"""What the card asks of the planner; no GPU is needed."""

from types import SimpleNamespace

import pytest

from engine.backends.cuda.attention import AttentionTwin, Shape, shape_within
from engine.backends.cuda.layout import CudaLayout
from engine.backends.cuda.mixed.hopper_norm import STAGES
from engine.backends.cuda.mixed.layout import MixedLayout
from engine.backends.cuda.mixed.weight_gradients import chains_of
from engine.backends.cuda.opening import cuda_plan
from engine.errors import PlanRefused
from engine.operations.attention import Attention
from engine.operations.base import BufferType
from engine.program import again_name, build_program
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


def squares_on_the_way(tokens_at_once: int, monkeypatch: pytest.MonkeyPatch, **changes: object) -> set[str]:
    """Weights whose gradients' squares our own kernel adds up."""
    monkeypatch.setattr(MixedLayout, "tokens_at_once", tokens_at_once)
    spec, recipe = model(context=64, layers=1, **changes), train(batch=8, shards=8, precision="bf16")
    _, _, layout = cuda_plan(build_program(spec), recipe, "prod", capability=90)
    assert isinstance(layout, MixedLayout)
    return set(layout.squares.shapes)


@pytest.mark.parametrize("tokens_at_once", [1 << 20, 256, 64])
def test_squares_are_added_up_on_the_way_where_there_is_one_chain(
    tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many shards are taken at once: which squares are added up where is part of what the norm is."""
    large = {"d_model": 768, "heads": 12, "hidden": 3072, "vocab": 8200}
    block = {f"block0.{name}.weight" for name in ("attn_qkv", "attn_out", "mlp_up", "mlp_down")}
    assert chains_of([(768, 768)], 8) > 1, "alone it would be cut"
    assert squares_on_the_way(tokens_at_once, monkeypatch, **large, tied=False) == block | {"head.weight"}
    assert squares_on_the_way(tokens_at_once, monkeypatch, **large, tied=True) == block
    small = {"d_model": 384, "heads": 6, "hidden": 1536, "vocab": 8200}
    assert squares_on_the_way(tokens_at_once, monkeypatch, **small, tied=False) == {"head.weight"}


@pytest.mark.parametrize("width", STAGES)
@pytest.mark.parametrize("recompute", [0, 1, 3])
@pytest.mark.parametrize("shards", [1, 8])
def test_what_the_end_of_a_branch_reads_is_there_while_it_writes(width: int, recompute: int, shards: int) -> None:
    """Its blocks write rows while others still read theirs."""
    spec = model(d_model=width, heads=4, hidden=4 * width, context=64, layers=3)
    recipe = train(batch=8, shards=shards, precision="bf16")
    program, plan, _ = cuda_plan(build_program(spec, recompute), recipe, "prod", capability=90)
    operations = [(o, False) for o in program.operations]
    operations += [(o, True) for step in program.backward for o in step.again]
    ends = [(o, again) for o, again in operations if o.kind == "residual_norm"]
    assert len(ends) == 6 + recompute and all("operand" in o.inputs for o, _ in ends)
    for operation, again in ends:
        places = {}
        for role, tensor in (operation.inputs | operation.outputs).items():
            buffer = plan.buffers[again_name(tensor) if again and tensor in program.recomputed else tensor]
            places[role] = range(buffer.offset, buffer.offset + buffer.type.bytes)
        for read in (places["x"], places["operand"]):
            for written in (places[role] for role in operation.outputs):
                assert read.stop <= written.start or written.stop <= read.start


def test_ends_of_branches_are_with_products_only_where_our_own_kernels_serve() -> None:
    for precision, capability, width, joined in (
        ("bf16", 90, 128, True), ("fp16", 90, 384, True), ("bf16", 80, 128, False), ("bf16", 0, 128, False),
        ("fp8", 90, 128, False), ("bf16", 90, 120, False), ("bf16", 90, 512, False),
    ):  # fmt: skip
        recipe = train(precision=precision)
        spec = model(d_model=width, heads=width // (128 if width % 128 == 0 else width), hidden=64)
        program, _, _ = cuda_plan(build_program(spec), recipe, "prod", capability=capability)
        ends = [o for o in program.operations if o.kind == "residual_norm"]
        assert len(ends) == 2 and all(("operand" in o.inputs) == joined for o in ends)


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
