"""The plan: no two live buffers overlap, nothing lies outside the arena, nothing is allocated beside it.

Lifetimes are found again here from what each operation says it touches, without the planner's code.
"""

import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.operations.base import Operation
from engine.plan import make_plan
from engine.program import Program, build_program
from tests.engine.training import digests, make_trainer, model_spec, train_spec

# (model, train, tier, threads, blocks computed again)
CASES: list[tuple[dict[str, Any], dict[str, Any], str, int, int]] = [
    ({}, {}, "portable", 1, 0),
    ({}, {}, "portable", 1, 2),
    ({"attention": "stored", "layers": 3}, {"shards": 1}, "portable", 3, 1),
    ({"tied": False, "norm_parameters": False, "linear_bias": False}, {"shards": 6}, "portable", 2, 0),
    ({"activation": "relu", "context": 70, "dropout": 0.0}, {"shards": 2}, "debug", 1, 2),
    ({"layers": 1, "heads": 1, "d_model": 33, "hidden": 7, "vocab": 1}, {}, "debug", 2, 0),
]


def stages(program: Program) -> Iterator[tuple[str, Operation]]:
    """What runs, in order: the forward half, then each backward after what it has computed again."""
    for operation in program.operations:
        yield "forward", operation
    for step in program.backward:
        for operation in step.again:
            yield "again", operation
        yield "backward", step.operation


def touches(program: Program, sizes: Any, tier: str) -> Iterator[tuple[int, str]]:
    """(time, buffer name): every buffer that each stage reads or writes."""
    recomputed = {n for step in program.backward for o in step.again for n in o.outputs.values()}
    for time, (phase, operation) in enumerate(stages(program)):
        for role, name in [*operation.inputs.items(), *operation.outputs.items()]:
            if phase != "backward" or role in operation.kept:
                yield time, f"again({name})" if phase != "forward" and name in recomputed else name
            if phase == "backward" and role not in operation.constant and name != program.losses:
                yield time, f"d({name})"
        work = operation.backward_work if phase == "backward" else operation.forward_work
        for role in work(sizes, tier):
            yield time, f"{operation.name}/{phase}/{role}"


def handed_over(program: Program) -> set[tuple[str, str]]:
    """(old, new): `new` is declared to take the place of `old`."""
    pairs = set()
    for phase, operation in stages(program):
        if phase == "backward":
            for role, taken in operation.backward_in_place.items():
                pairs.add((f"d({operation.outputs[taken]})", f"d({operation.inputs[role]})"))
            if operation.gradient_over_input is not None:
                name = operation.inputs[operation.gradient_over_input]
                pairs.add((name, f"d({name})"))
        for role, taken in operation.forward_in_place.items():
            old, new = operation.inputs[taken], operation.outputs[role]
            pairs.add((old, new) if phase == "forward" else (f"again({old})", f"again({new})"))
    return pairs


@pytest.mark.parametrize(("model", "train", "tier", "threads", "recompute"), CASES)
def test_no_two_live_buffers_overlap(
    model: dict[str, Any], train: dict[str, Any], tier: str, threads: int, recompute: int
) -> None:
    program = build_program(model_spec(**model), recompute)
    plan = make_plan(program, train_spec(**train), tier, threads)
    life: dict[str, tuple[int, int]] = {}
    for time, name in touches(program, plan.sizes, tier):
        first, last = life.get(name, (time, time))
        life[name] = min(first, time), max(last, time)
    end = len(list(stages(program))) - 1
    for name, buffer in plan.buffers.items():
        if buffer.category in ("weights", "moments", "gradients", "derived", "saving"):
            life[name] = 0, end
    life["ids"] = life["targets"] = 0, end  # written before the pass
    life[program.losses] = life[program.losses][0], end  # read after the forward half
    assert life.keys() == plan.buffers.keys()

    pairs = handed_over(program)
    names = sorted(life)
    for i, a in enumerate(names):
        buffer = plan.buffers[a]
        assert buffer.offset >= 0 and buffer.offset + buffer.type.bytes <= plan.arena_bytes
        assert buffer.offset % 64 == 0
        assert buffer.first <= life[a][0] and life[a][1] <= buffer.last
        for b in names[i + 1 :]:
            other = plan.buffers[b]
            common = min(life[a][1], life[b][1]) - max(life[a][0], life[b][0]) + 1
            if common <= 0:
                continue
            apart = (
                buffer.offset + buffer.type.bytes <= other.offset or other.offset + other.type.bytes <= buffer.offset
            )
            if not apart:
                # Only as declared, in the one stage that reads the old and writes the new.
                assert common == 1 and ((a, b) in pairs or (b, a) in pairs), (a, b)
                assert buffer.offset == other.offset and buffer.type.bytes == other.type.bytes


def arrays_of(thing: Any, seen: set[int]) -> Iterator[np.ndarray[Any, Any]]:
    """All arrays that a backend holds, in containers and in its frames."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from arrays_of(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from arrays_of(value, seen)
    elif type(thing).__name__ in ("Frame", "CpuBackend"):
        yield from arrays_of(vars(thing), seen)


def test_everything_the_program_touches_lies_in_the_arena() -> None:
    """Beside it only small things: flags and partial sums."""
    trainer = make_trainer({"context": 64, "d_model": 48, "hidden": 192, "vocab": 97}, {"batch": 12}, threads=2)
    digests(trainer, 2)
    trainer.next_logits(np.zeros(7, np.int32))
    arena = trainer.backend._arena
    assert arena.nbytes == trainer.plan.arena_bytes > 2**20
    first, last = np.lib.array_utils.byte_bounds(arena)
    inside = outside = 0
    for array in arrays_of(trainer.backend, set()):
        start, stop = np.lib.array_utils.byte_bounds(array)
        if first <= start and stop <= last:
            inside += 1
        else:
            assert array.base is None and array.nbytes <= 8192
            outside += array.nbytes
    assert inside > 100
    assert outside < 2**15
    trainer.close()


@pytest.mark.parametrize("recompute", [0, 2])
def test_what_is_not_live_may_hold_anything(recompute: int) -> None:
    """Every place that no live buffer holds is overwritten after every stage of the program: the bits stay."""
    changes = {"context": 33, "layers": 3}
    clean, dirty = make_trainer(changes), make_trainer(changes, recompute=recompute)
    backend, plan = dirty.backend, dirty.plan
    arena, end = backend._arena, max(buffer.last for buffer in plan.buffers.values())
    order = [operation.name for phase, operation in stages(dirty.program) if phase != "again"]
    times = [t for t, (phase, _) in enumerate(stages(dirty.program)) if phase != "again"]
    frame = backend.frame(plan.sizes.batch, plan.sizes.context)
    forward, backward = frame.forward, frame.backward
    spoiled = 0

    def after(place: int, name: str) -> None:
        nonlocal spoiled
        assert order[place] == name
        free = np.ones(arena.size, bool)
        for buffer in plan.buffers.values():
            goes_on = buffer.last > times[place] or buffer.last == end  # the trainer reads on after the end
            if buffer.first <= times[place] and goes_on:
                free[buffer.offset : buffer.offset + buffer.type.bytes] = False
        arena[free] = 0xFF
        spoiled += int(free.sum())

    def spoiling(half: Any, start: int) -> Any:
        def run() -> None:
            places = itertools.count(start)
            half(lambda name: after(next(places), name))

        return run

    count = len(dirty.program.operations)
    frame.forward, frame.backward = spoiling(forward, 0), spoiling(backward, count)  # type: ignore[method-assign]
    assert digests(dirty, 3) == digests(clean, 3)
    assert spoiled > arena.size


def test_no_array_is_allocated_from_the_second_step_on() -> None:
    """Python's own small objects are the same for any size of model, so a difference of peaks is arrays.

    All arrays above 4 KiB that the large model has (matrices, activations, gradients) have 32 KiB and more.
    """
    small = {"d_model": 4, "hidden": 4, "heads": 2, "vocab": 8, "context": 8}
    large = {"d_model": 128, "hidden": 512, "heads": 2, "vocab": 512, "context": 32}
    peaks = []
    for sizes in (small, large):
        trainer = make_trainer(sizes, {"batch": 4, "shards": 2})
        trainer.train_step()
        gc.collect()
        tracemalloc.start()
        trainer.train_step()  # fills caches of small objects
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(2):
            trainer.train_step()
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 4096
        peaks.append(peak - before)
    assert abs(peaks[1] - peaks[0]) < 4096, peaks
