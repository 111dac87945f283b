"""The engine's plan, itemised: what is in the arena when it is fullest, and every parameter."""

import re
from dataclasses import dataclass

from engine.plan import Buffer, Plan
from engine.program import Program
from engine.spec import ParameterKind

_BLOCK = re.compile(r"\bblock\d+\.")

TITLES = {
    "weights": "parameters",
    "gradients": "gradients",
    "moments": "optimizer state (m, v)",
    "saving": "copy for saving",
    "derived": "quantised weights",
    "activations": "activations",
    "attention": "attention buffers",
    "workspace": "workspace",
}
"""The plan's categories as people call them, in the order in which they are shown."""


@dataclass(frozen=True)
class Item:
    """`count` equal buffers of `each` bytes. kind: the buffer's name without its layer; layered: whether it had one."""

    category: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    each: int
    count: int
    layered: bool

    @property
    def bytes(self) -> int:
        return self.each * self.count


@dataclass(frozen=True)
class Memory:
    """The arena at its fullest moment: `items` lie in it side by side, `gaps` bytes of it are unused then.

    moment: the program step, as `forward block5.attn` or `backward head`. shared: bytes of all buffers of the plan
    together, as they would be if none took another's place.
    """

    arena: int
    items: tuple[Item, ...]
    gaps: int
    moment: str
    shared: int

    def by_category(self) -> dict[str, int]:
        """Bytes at the fullest moment, in the order of TITLES."""
        return {
            category: total
            for category in TITLES
            if (total := sum(i.bytes for i in self.items if i.category == category))
        }

    def largest(self) -> Item:
        return max(self.items, key=lambda item: item.bytes)


@dataclass(frozen=True)
class ParameterItem:
    """`count` parameters of one shape. kind: the name without its layer; use: what weight decay goes by."""

    kind: str
    use: ParameterKind
    shape: tuple[int, ...]
    count: int

    @property
    def elements(self) -> int:
        size = self.count
        for length in self.shape:
            size *= length
        return size


def memory_of(plan: Plan, program: Program) -> Memory:
    """The arena of a plan at the moment at which most of it is in use."""
    places = _places(plan)
    moment = _fullest(places)
    live = [buffer for buffer in places if buffer.first <= moment <= buffer.last]
    groups: dict[tuple[str, str, tuple[int, ...], str, bool], list[Buffer]] = {}
    for buffer in live:
        layered = _BLOCK.search(buffer.name) is not None
        key = (buffer.category, _kind(buffer.name), buffer.type.shape, buffer.type.dtype, layered)
        groups.setdefault(key, []).append(buffer)
    items = [
        Item(category, kind, shape, dtype, buffers[0].type.bytes, len(buffers), layered)
        for (category, kind, shape, dtype, layered), buffers in groups.items()
    ]
    order = list(TITLES)
    items.sort(key=lambda item: (order.index(item.category), -item.bytes, item.kind))
    return Memory(
        arena=plan.arena_bytes,
        items=tuple(items),
        gaps=plan.arena_bytes - sum(item.bytes for item in items),
        moment=_moment(program, moment),
        shared=sum(buffer.type.bytes for buffer in plan.buffers.values()),
    )


def parameters_of(program: Program) -> tuple[ParameterItem, ...]:
    """Every parameter, those of all layers together, in the order of the program."""
    counts: dict[tuple[str, ParameterKind, tuple[int, ...]], int] = {}
    for parameter in program.parameters:
        key = (_kind(parameter.name), parameter.kind, parameter.shape)
        counts[key] = counts.get(key, 0) + 1
    return tuple(ParameterItem(*key, count) for key, count in counts.items())


def _places(plan: Plan) -> list[Buffer]:
    """One buffer for each place of the arena: the first of those that have it one after the other.

    Two buffers with equal offset and life have one place: places in use at one time do not overlap.
    """
    first: dict[tuple[int, int, int], Buffer] = {}
    for buffer in plan.buffers.values():
        if buffer.type.bytes:
            first.setdefault((buffer.offset, buffer.first, buffer.last), buffer)
    return list(first.values())


def _fullest(places: list[Buffer]) -> int:
    """The first time at which most bytes are live."""
    changes: dict[int, int] = {}
    for buffer in places:
        changes[buffer.first] = changes.get(buffer.first, 0) + buffer.type.bytes
        changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - buffer.type.bytes
    live = best = best_time = 0
    for time in sorted(changes):
        live += changes[time]
        if live > best:
            best, best_time = live, time
    return best_time


def _kind(name: str) -> str:
    """`block3.attn.y` as `attn.y`, `gradients2` and `saved/m` without what tells them apart."""
    name = _BLOCK.sub("", name)
    return re.sub(r"^gradients\d+$", "gradients", re.sub(r"^saved/.*", "saved", name))


def _moment(program: Program, time: int) -> str:
    names = [f"forward {operation.name}" for operation in program.operations]
    for step in program.backward:
        names += [f"forward {operation.name} again" for operation in step.again]
        names.append(f"backward {step.operation.name}")
    return names[time]
