"""The plan, itemised; what does not fit; and what would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.plan import make_plan
from engine.program import build_program
from reproduce.configuration import Configuration, load_configuration
from reproduce.errors import ConfigurationError, PlanRefused, ReproduceError
from reproduce.planning.devices import CARDS, Device, find_device
from reproduce.planning.items import TITLES, memory_of
from reproduce.planning.remedies import FAMILIES, Remedy, apply_remedy, changed, choose, find_remedies
from reproduce.planning.report import (
    Limit,
    Report,
    describe_largest,
    disk_of,
    limit_of,
    plan_for,
    portable_summary,
    refusal,
    refuse_early,
    report,
    require_memory,
)
from reproduce.planning.sizes import parse_size, size
from reproduce.planning.work import work_of
from tests.plan.models import EXPERIMENTS

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 2**30
CPU = Device("cpu", "cpu", 8 * GIB, "this machine has free")
CARD = find_device("rtx3060")
PATHS = {path.stem: path for path in EXPERIMENTS}
CLASSIC = ("train.batch=64", "model.context=512", "model.attention=stored", "run.threads=2")


def configured(name: str, *overrides: str) -> Configuration:
    return load_configuration(PATHS[name], overrides)


def planned(name: str, *overrides: str, device: Device = CPU) -> Report:
    return report(configured(name, *overrides), device)


@pytest.mark.parametrize("device", [CPU, CARD], ids=["cpu", "card"])
@pytest.mark.parametrize("name", ["tiny", "char-4.8m", "andrea-12m"])
@pytest.mark.parametrize("more", [(), ("run.recompute=2", "run.threads=3")], ids=["plain", "recomputed"])
def test_items_are_the_arena_at_its_fullest(name: str, more: tuple[str, ...], device: Device) -> None:
    """The items of that moment and the gaps make up the arena; at no time is more in use."""
    found = planned(name, *more, device=device)
    memory, plan = found.memory, found.plan
    assert sum(item.bytes for item in memory.items) + memory.gaps == found.peak == plan.arena_bytes
    assert 0 <= memory.gaps <= found.peak // 20
    assert sum(memory.by_category().values()) == sum(item.bytes for item in memory.items)
    assert list(memory.by_category()) == [c for c in TITLES if c in memory.by_category()]
    places = {(b.offset, b.first, b.last): b for b in plan.buffers.values()}.values()
    last = max(b.last for b in places)
    in_use = [sum(b.type.bytes for b in places if b.first <= time <= b.last) for time in range(last + 1)]
    assert max(in_use) == found.peak - memory.gaps
    assert memory.shared == sum(b.type.bytes for b in plan.buffers.values())


def test_items_of_a_known_model() -> None:
    found = planned("char-4.8m", *CLASSIC, "train.shards=1")
    items = {item.kind: item for item in found.memory.items}
    weights = items["attn.weights"]
    assert (weights.category, weights.shape) == ("attention", (64, 8, 512, 512))
    assert (weights.count, weights.layered) == (6, True)
    assert weights.each == 64 * 8 * 512 * 512 * 4 == 512 * 2**20
    assert found.memory.by_category()["attention"] == 6 * 512 * 2**20
    assert items["saved"].count == 3 and items["gradients"].count == 1
    assert found.memory.moment.startswith(("forward ", "backward "))


def test_the_classic_is_refused() -> None:
    """The whole batch at once with stored attention weights: 4 GiB do not hold them."""
    found = planned("char-4.8m", *CLASSIC, "train.shards=1")
    problem = refusal(found, limit_of(CPU, 4 * GIB))
    assert problem is not None and problem.exit_code == 5
    assert str(problem) == (
        f"the plan needs {size(found.peak)} of memory, the budget is 4.0 GiB. Largest item: attention buffers "
        "(attn.weights: 64·8·512·512 floats, 512.0 MiB a layer, 3.0 GiB in all)"
    )


def test_the_classic_in_shards_fits() -> None:
    """One shard at a time holds an eighth of it."""
    found = planned("char-4.8m", *CLASSIC)
    assert found.memory.by_category()["attention"] == 6 * 512 * 2**20 // 8
    assert refusal(found, limit_of(CPU, 4 * GIB)) is None
    assert describe_largest(found) == (
        "attention buffers (attn.weights: 8·8·512·512 floats, 64.0 MiB a layer, 384.0 MiB in all), as 8 of the 64 rows "
        "of a batch are computed at once. The whole batch at once would take 64·8·512·512 floats, 512.0 MiB a layer, "
        "3.0 GiB in all"
    )


@pytest.mark.parametrize("name", ["tiny", "char-4.8m", "gpt2-124m"])
def test_the_whole_batch_at_once_takes_what_is_said(name: str) -> None:
    """What is said of the largest item of a shard is what the plan of one shard has."""
    one = planned(name, "train.shards=1")
    parts = planned(name)
    item = parts.memory.largest()
    if "whole batch" in (said := describe_largest(parts)):
        (same,) = [i for i in one.memory.items if (i.kind, i.category) == (item.kind, item.category)]
        assert f"{size(same.each)} a layer, {size(same.bytes)} in all" in said
    else:
        assert item.category not in ("activations", "attention")
    assert "whole batch" not in describe_largest(one)


def test_a_small_batch_fits_two_gibibytes() -> None:
    assert refusal(planned("char-4.8m", "train.batch=32", "model.context=256"), limit_of(CPU, 2 * GIB)) is None


def test_the_stage_refuses_what_does_not_fit() -> None:
    small = Device("cpu", "cpu", 2**20, "this machine has free")
    with pytest.raises(PlanRefused, match=r"this machine has free 1\.0 MiB\. .* `reproduce plan` lists"):
        require_memory(configured("tiny"), small)
    assert require_memory(configured("tiny"), CPU).peak == planned("tiny").peak


def test_a_deep_model_is_refused_without_planning() -> None:
    deep = configured("tiny", "model.layers=200", "model.d_model=8192", "model.heads=64")
    with pytest.raises(PlanRefused, match=r"optimizer state alone, the budget is 4\.0 GiB: use a smaller"):
        refuse_early(deep, Limit(4 * GIB, "the budget is"))
    refuse_early(configured("tiny"), Limit(1, "the budget is"))


def test_summary_is_the_same_on_every_machine() -> None:
    assert portable_summary(configured("tiny", "run.threads=7", "run.recompute=3")) == portable_summary(
        configured("tiny", "run.threads=1")
    )


# --- remedies ---


@pytest.fixture(scope="module")
def classic() -> tuple[Configuration, list[Remedy]]:
    configuration = configured("char-4.8m", *CLASSIC, "train.shards=1")
    return configuration, find_remedies(configuration, CPU, Limit(4 * GIB, "the budget is"))


def test_remedies_are_planned(classic: tuple[Configuration, list[Remedy]]) -> None:
    configuration, remedies = classic
    for remedy in remedies:
        _, plan = plan_for(changed(configuration, remedy.changes), CPU)
        assert plan.arena_bytes == remedy.peak
        assert remedy.fits == (remedy.peak <= 4 * GIB)


def test_remedies_change_bits_as_they_say(classic: tuple[Configuration, list[Remedy]]) -> None:
    configuration, remedies = classic
    for remedy in remedies:
        assert remedy.changes_bits == (changed(configuration, remedy.changes).identity() != configuration.identity())


def test_remedies_say_what_they_cost(classic: tuple[Configuration, list[Remedy]]) -> None:
    configuration, remedies = classic
    now = report(configuration, CPU).work.operations
    for remedy in remedies:
        then = report(changed(configuration, remedy.changes), CPU).work.operations
        assert remedy.more_operations == then / now - 1
    by_key = {path: remedy.more_operations for remedy in remedies for path in remedy.changes}
    assert by_key["run", "recompute"] > 0 and by_key["model", "attention"] > 0
    assert by_key["train", "shards"] == 0
    assert by_key["train", "batch"] == -0.5


def test_remedies_are_ranked(classic: tuple[Configuration, list[Remedy]]) -> None:
    _, remedies = classic
    order = [(not r.fits, r.changes_bits, len(r.changes)) for r in remedies if r.fits]
    assert order == sorted(order)
    assert [r.fits for r in remedies] == sorted((r.fits for r in remedies), reverse=True)
    kinds = {path for remedy in remedies for path in remedy.changes}
    assert kinds >= {
        ("model", "attention"),
        ("model", "context"),
        ("run", "recompute"),
        ("train", "batch"),
        ("train", "shards"),
    }


def test_remedies_are_the_gentlest(classic: tuple[Configuration, list[Remedy]]) -> None:
    """The member of a family before the one that is offered does not fit."""
    configuration, remedies = classic
    for family in FAMILIES:
        members = [dict(m) for m in family.members(configuration, CPU)]
        offered = [members.index(dict(r.changes)) for r in remedies if r.fits and dict(r.changes) in members]
        for number in offered:
            if number:
                _, plan = plan_for(changed(configuration, members[number - 1]), CPU)
                assert plan.arena_bytes > 4 * GIB


def test_remedies_together_where_one_does_not_suffice() -> None:
    """With fewer changes of bits than by those alone."""
    configuration = configured("char-4.8m", *CLASSIC, "train.shards=64", "run.threads=1")
    limit = Limit(300 * 2**20, "the budget is")
    remedies = find_remedies(configuration, CPU, limit)
    together = [r for r in remedies if r.fits and len(r.changes) > 1]
    assert together
    for remedy in together:
        _, plan = plan_for(changed(configuration, remedy.changes), CPU)
        assert plan.arena_bytes == remedy.peak <= limit.bytes


def test_nothing_helps() -> None:
    remedies = find_remedies(configured("tiny"), CPU, Limit(1000, "the budget is"))
    assert not any(remedy.fits for remedy in remedies)
    with pytest.raises(ReproduceError, match="--apply 1: expected the number of a remedy, there is none that makes"):
        choose(remedies, 1)


def test_no_remedy_of_attention_on_a_card() -> None:
    configuration = configured("char-4.8m", *CLASSIC)
    remedies = find_remedies(configuration, CARD, Limit(200 * 2**20, "the budget is"))
    assert remedies
    assert not any(("model", "attention") in remedy.changes for remedy in remedies)


@pytest.mark.parametrize(("card", "offered"), [("t4", False), ("a100-40", True), ("cpu", False)])
def test_the_tier_prod_is_a_remedy_where_the_card_runs_it(card: str, offered: bool) -> None:
    configuration = configured("gpt2-124m", "train.batch=18", "train.shards=1")
    remedies = find_remedies(configuration, find_device(card), Limit(12 * GIB, "the budget is"))
    assert any(("tier",) in remedy.changes for remedy in remedies) == offered


def test_apply(classic: tuple[Configuration, list[Remedy]], tmp_path: Path) -> None:
    """Overrides and remedy are written; comments and all the rest stay."""
    configuration, remedies = classic
    path = tmp_path / "params.yaml"
    text = PATHS["char-4.8m"].read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8", newline="")
    remedy = choose(remedies, 1)
    after = apply_remedy(path, configuration, remedy)
    path.write_text(after, encoding="utf-8", newline="")
    assert load_configuration(path) == changed(configuration, remedy.changes)
    differing = [(a, b) for a, b in zip(text.splitlines(), after.splitlines(), strict=True) if a != b]
    assert {b.split(":")[0].strip() for _, b in differing} <= {"attention", "batch", "context", "shards", "threads"}


@pytest.mark.parametrize("number", [0, -1, 99])
def test_apply_of_a_number_there_is_not(classic: tuple[Configuration, list[Remedy]], number: int) -> None:
    with pytest.raises(ReproduceError, match=f"--apply {number}: expected the number of a remedy, there is 1 to"):
        choose(classic[1], number)


def test_apply_to_a_file_that_differs_in_more(tmp_path: Path) -> None:
    configuration = configured("tiny", "train.decayed=[matrix, norm]")
    path = tmp_path / "params.yaml"
    path.write_bytes(PATHS["tiny"].read_bytes())
    remedy = Remedy({("train", "shards"): 4}, "more shards", 0, True, True, 0.0)
    with pytest.raises(ConfigurationError, match="expected to change single values in it, more differs"):
        apply_remedy(path, configuration, remedy)


# --- devices, sizes, disk, work ---


def test_devices() -> None:
    assert find_device("RTX 3060") == find_device("rtx_3060") == CARD
    assert CARD.memory == 45 * GIB // 4  # of 12: a sixteenth is kept
    assert all(find_device(name).backend == "cuda" for name in CARDS)
    assert find_device("cpu").memory > 0
    with pytest.raises(ReproduceError, match="no 'rtx3061' in the list of devices: did you mean rtx3060"):
        find_device("rtx3061")
    with pytest.raises(ReproduceError, match=r"no 'a100' in the list of devices: did you mean a100-40 or a100-80\?"):
        find_device("a100")
    with pytest.raises(ReproduceError, match="expected cpu, cuda or one of"):
        find_device("ä" * 1000)


def test_the_lower_of_budget_and_device_holds() -> None:
    assert limit_of(CARD, 4 * GIB) == Limit(4 * GIB, "the budget is")
    left = Limit(45 * GIB // 4, "an NVIDIA GeForce RTX 3060 leaves")
    assert limit_of(CARD, 100 * GIB) == limit_of(CARD, None) == left
    assert limit_of(CPU, 100 * GIB) == Limit(100 * GIB, "the budget is")


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("4GiB", 4 * GIB), ("512 MiB", 2**29), ("1000000B", 10**6), ("1.5GiB", 3 * 2**29), ("7B", 7), ("0.5KiB", 512)],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize(
    "text", ["", "GiB", "4GB", "-1", "4 G", "1e9", "1.GiB", ".5GiB", "٤GiB", "9" * 5000, "inf", "9" * 30 + "GiB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ReproduceError, match=r"^expected a size with its unit, such as 4GiB or 512MiB \(.*, found "):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "meant"), [("4GB", "4GiB"), ("4 gb", "4GiB"), ("1.5G", "1.5GiB"), ("512mib", "512MiB"), ("9k", "9KiB")]
)
def test_a_unit_as_others_write_it_is_no_size(text: str, meant: str) -> None:
    """It would be powers of ten to one reader and of two to another."""
    with pytest.raises(ReproduceError, match=rf"did you mean {meant}\?$"):
        parse_size(text)
    assert parse_size(meant) > 0


@pytest.mark.parametrize("number", ["4", "4.5", " 512 "])
def test_a_number_without_its_unit_is_no_size(number: str) -> None:
    """It would be bytes to one reader and gibibytes to another."""
    with pytest.raises(ReproduceError, match=f"found '{number}': write {number.strip()}GiB or whatever the unit is"):
        parse_size(number)


@given(st.integers(0, 2**60))
@example(1023)
def test_sizes_for_people(value: int) -> None:
    text = size(value).replace(",", "")
    assert abs(parse_size(text) - value) <= max(value // 15, 1)


@settings(max_examples=30)
@given(
    st.integers(1, 300), st.integers(1, 400), st.integers(0, 10**6), st.sampled_from([("portable", 36), ("debug", 708)])
)
def test_disk_is_the_sum_over_saved_steps(steps: int, every: int, parameters: int, kept: tuple[str, int]) -> None:
    """Of each step a loss and a digest, in the tier debug also three hashes for each of seven parameters."""
    tier, per_step = kept
    base = configured("tiny", f"tier={tier}")
    configuration = base.model_copy(
        update={
            "train": base.train.model_copy(update={"steps": steps}),
            "run": base.run.model_copy(update={"save_every_steps": every}),
        }
    )
    saved = {0, steps, *range(0, steps, every)}
    disk = disk_of(configuration, parameters, 7)
    assert disk.bundles == len(saved)
    assert disk.total == sum(12 * parameters + per_step * step for step in saved)
    assert disk.largest == 12 * parameters + per_step * steps


def test_work_counts_the_products() -> None:
    configuration = configured("char-4.8m", "model.attention=stored")
    found = work_of(build_program(configuration.model), configuration.train)
    tokens = 32 * 256
    matrices = 6 * 12 * 256 * 256 + 96 * 256  # weights that meet every token, the tied head among them
    pairs = 32 * 8 * 256 * 257 // 2
    assert found.tokens == tokens
    assert found.operations == 6 * tokens * matrices + 6 * 6 * 2 * pairs * 32
    tiled = work_of(build_program(configured("char-4.8m", "model.attention=tiled").model), configuration.train)
    assert tiled.operations - found.operations == 6 * 2 * pairs * 32
    again = work_of(build_program(configuration.model, 6), configuration.train)
    # All products of the forward pass but the head, and but the last of each block, whose output is kept.
    forward = 2 * tokens * (matrices - 96 * 256) + 6 * 4 * pairs * 32
    assert again.operations - found.operations == again.again == forward
    assert found.again == tiled.again == 0
    assert again.bytes > found.bytes > tiled.bytes


def test_every_time_has_its_name() -> None:
    configuration = configured("tiny", "run.recompute=2")
    program, plan = plan_for(configuration, CPU)
    assert plan == make_plan(build_program(configuration.model, 2), configuration.train, "portable", plan.sizes.threads)
    assert memory_of(plan, program).moment.split()[0] in ("forward", "backward")


@pytest.mark.parametrize("features", ["", "+avx2", "+avx2,+avx512f,+avx512bw"])
def test_every_machine_plans_the_same(features: str) -> None:
    """Whatever vectors its processor has: the committed plan."""
    code = (
        "import json, sys; from pathlib import Path; from reproduce.configuration import load_configuration; "
        "from reproduce.planning.report import portable_summary; "
        "print(json.dumps(portable_summary(load_configuration(Path(sys.argv[1])))))"
    )
    target = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", code, str(PATHS["tiny"])],
        env={**os.environ, **target},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == json.loads((ROOT / "run" / "plan.json").read_text(encoding="utf-8"))
