"""Every buffer a training run needs, with its size, lifetime and offset in one arena. Nothing is allocated beside it.

Time is counted in program steps: forward operation i runs at time i, then the backward half, in which operations may
run forward again. Buffers that live
at overlapping times get disjoint places; others may share. What lasts through the whole run (weights, moments, gradient
sets, the copy that is saved) lives from the first to the last time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Literal

from engine.backends.layout import CpuLayout, Layout
from engine.errors import PlanRefused
from engine.numerics.types import Floats
from engine.operations.base import BufferType, Operation, Sizes
from engine.placement import Storage, place
from engine.program import BackwardStep, Parameter, Program, again_name
from engine.spec import TrainSpec

Category = Literal["weights", "moments", "gradients", "derived", "activations", "attention", "workspace", "saving"]


@dataclass(frozen=True)
class Buffer:
    """A place in the arena. `first` and `last` are the times at which it is live."""

    name: str
    type: BufferType
    category: Category
    first: int
    last: int
    offset: int


@dataclass(frozen=True)
class Plan:
    """All buffers, the size of the arena in bytes, and the flat layout of the parameters."""

    buffers: dict[str, Buffer]
    arena_bytes: int
    sizes: Sizes
    tier: str
    gradient_sets: int
    places: dict[str, int]  # parameter -> first element in the flat arrays
    flat_elements: int

    def totals(self) -> dict[str, int]:
        """Bytes by category, counting every buffer, shared place or not."""
        sums: dict[str, int] = {}
        for buffer in self.buffers.values():
            sums[buffer.category] = sums.get(buffer.category, 0) + buffer.type.bytes
        return sums

    def views(self, parameters: Iterable[Parameter], flat: Floats) -> dict[str, Floats]:
        """Each parameter's part of a flat array, in its shape."""
        views = {}
        for parameter in parameters:
            start = self.places[parameter.name]
            views[parameter.name] = flat[start : start + prod(parameter.shape)].reshape(parameter.shape)
        return views

    def check_fits(self, available: int, what: str) -> None:
        """Raise PlanRefused unless the arena fits into `available` bytes of `what`."""
        if self.arena_bytes > available:
            largest = sorted(self.totals().items(), key=lambda item: -item[1])[:3]
            items = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in largest)
            raise PlanRefused(
                f"the plan needs {self.arena_bytes / 2**20:,.0f} MiB, {what} has {available / 2**20:,.0f} MiB. "
                f"Largest: {items}. Use a smaller batch per shard (more train.shards), a shorter "
                "model.context or a smaller model"
            )


def gradient_name(tensor: str) -> str:
    return f"d({tensor})"


def flat_layout(parameters: Iterable[Parameter]) -> tuple[dict[str, int], int]:
    """First element of each parameter in the flat arrays, each on its own cache line, and the elements in all."""
    places = {}
    end = 0
    for parameter in parameters:
        places[parameter.name] = end
        size = BufferType(parameter.shape, "uint8").bytes
        end += -(-size // 16) * 16
    return places, end


def _second_half(program: Program) -> list[tuple[int, BackwardStep, Operation | None]]:
    """What runs after the forward half, each at its time: an operation of `again`, or (None) the step's backward."""
    steps: list[tuple[int, BackwardStep, Operation | None]] = []
    time = len(program.operations)
    for step in program.backward:
        for operation in (*step.again, None):
            steps.append((time, step, operation))
            time += 1
    return steps


class _Planner:
    def __init__(self, program: Program, sizes: Sizes, tier: str, layout: Layout) -> None:
        self.layout = layout
        self.program = program
        self.recomputed = program.recomputed
        self.sizes = sizes
        self.tier = tier
        self.second_half = _second_half(program)
        self.end = self.second_half[-1][0]
        self._stays = self._staying()
        self.named: dict[str, tuple[BufferType, Category, Storage]] = {}

    def add(self, name: str, type: BufferType, category: Category, first: int, last: int) -> None:
        self.named[name] = (type, category, Storage(type.bytes, first, self._lingering(last)))

    def _lingering(self, last: int) -> int:
        """The time until which a buffer stays: in the backward half work may run beside the steps that follow."""
        return self._stays.get(last, last)

    def _staying(self) -> dict[int, int]:
        """For each time of the backward half, until when what is used there last stays."""
        stays, limit = {}, self.end
        for time, step, again in reversed(self.second_half):
            stays[time] = min(time + self.layout.lingers(step), limit)
            if again is not None or (not step.again and self.layout.waits(step)):
                limit = time - 1
        times = sorted(stays)
        # What is used last here may have been used by an earlier step too, whose work goes on for longer.
        return dict(zip(times, accumulate((stays[time] for time in times), max), strict=True))

    def always(self, name: str, type: BufferType, category: Category) -> None:
        self.add(name, type, category, 0, self.end)

    def share(self, name: str, type: BufferType, category: Category, with_name: str, last: int) -> None:
        """`name` takes over the storage of `with_name`, whose content is no longer needed."""
        storage = self.named[with_name][2]
        if storage.size != type.bytes:
            raise AssertionError(f"{name} cannot take over {with_name}: sizes differ")
        storage.last = max(storage.last, self._lingering(last))
        self.named[name] = (type, category, storage)

    def activations(self) -> None:
        """Tensors of the forward half, and of what runs again in the backward half."""
        operations = self.program.operations
        recomputed = self.recomputed
        last_use: dict[str, int] = {}
        for time, operation in enumerate(operations):
            for name in operation.inputs.values():
                last_use[name] = time
        for time, step, again in self.second_half:
            for name in again.inputs.values() if again else self.layout.kept_tensors(step):
                last_use[again_name(name) if name in recomputed else name] = time
        last_use[self.program.losses] = self.end  # read by the trainer after the forward half
        self.always("ids", self._type("ids"), "activations")
        self.always("targets", self._type("targets"), "activations")
        for time, operation in enumerate(operations):
            self._outputs(operation, time, last_use, "forward")
        for time, _, again in self.second_half:
            if again:
                self._outputs(again, time, last_use, "again")

    def _outputs(self, operation: Operation, time: int, last_use: dict[str, int], phase: str) -> None:
        """Outputs and scratch of one forward run of an operation."""
        recomputed = self.recomputed if phase == "again" else frozenset()
        for role, name in operation.outputs.items():
            category: Category = "attention" if role == "weights" else "activations"
            called = again_name(name) if name in recomputed else name
            last = last_use.get(called, time)
            taken = operation.forward_in_place.get(role)
            if taken is not None:
                source = operation.inputs[taken]
                source = again_name(source) if source in recomputed else source
                self.share(called, self._type(name), category, source, last)
            else:
                self.add(called, self.layout.tensor_type(name, self._type(name)), category, time, last)
        for role, type in self.layout.forward_work(operation, self.sizes, self.tier).items():
            self.add(f"{operation.name}/{phase}/{role}", type, "workspace", time, time)

    def gradients(self) -> None:
        """Gradients of tensors, and the scratch of the backward half."""
        backward = [(time, step) for time, step, again in self.second_half if again is None]
        last_use: dict[str, int] = {}
        for time, step in backward:
            for name in step.operation.outputs.values():
                last_use[name] = time
        for time, step in backward:
            operation = step.operation
            for role, name in operation.inputs.items():
                if role in operation.constant or role in step.accumulates:
                    continue
                gradient, type = gradient_name(name), self._type(name)
                taken = operation.backward_in_place.get(role)
                if taken is not None:
                    of = gradient_name(operation.outputs[taken])
                    self.share(gradient, type, "activations", of, last_use[name])
                elif role == operation.gradient_over_input:
                    self.share(gradient, type, "activations", name, last_use[name])
                elif (same := operation.same_gradient.get(role)) is not None:
                    of = gradient_name(operation.inputs[same])
                    self.share(gradient, type, "activations", of, last_use[name])
                else:
                    self.add(gradient, type, "activations", time, last_use[name])
            for role, type in self.layout.backward_work(operation, self.sizes, self.tier).items():
                self.add(f"{operation.name}/backward/{role}", type, "workspace", time, time)

    def derived(self) -> None:
        for operation in self.program.operations:
            for role, type in self.layout.derived(operation, self.tier).items():
                self.always(f"{operation.name}/derived/{role}", type, "derived")

    def _type(self, name: str) -> BufferType:
        tensor = self.program.tensors[name]
        return BufferType(tensor.at(self.sizes), tensor.dtype)


def make_plan(program: Program, train: TrainSpec, tier: str, threads: int, layout: Layout | None = None) -> Plan:
    """Lay out all buffers for the shards that a backend takes at once; `layout` is the CPU's unless given."""
    layout = layout or CpuLayout(threads)
    rows = train.batch // train.shards * layout.shards_at_once(train.shards)
    sizes = Sizes(batch=rows, context=program.spec.context, threads=layout.threads)
    planner = _Planner(program, sizes, tier, layout)
    places, elements = flat_layout(program.parameters)
    flat = BufferType((elements,), "float32")
    planner.always("weights", flat, "weights")
    for name in ("m", "v"):
        planner.always(name, flat, "moments")
    sets = layout.gradient_sets(train.shards)
    for number in range(sets):
        planner.always(f"gradients{number}", flat, "gradients")
    if layout.saves_in_arena:
        for name in ("weights", "m", "v"):
            planner.always(f"saved/{name}", flat, "saving")
    for name, type in layout.lasting(program, elements).items():
        planner.always(name, type, "workspace")
    planner.activations()
    planner.gradients()
    planner.derived()
    arena = place((storage for _, _, storage in planner.named.values()), layout.alignment)
    buffers = {
        name: Buffer(name, type, category, storage.first, storage.last, storage.offset)
        for name, (type, category, storage) in planner.named.items()
    }
    return Plan(buffers, arena, sizes, tier, sets, places, elements)
