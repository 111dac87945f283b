"""The order of a comparison, and what is said of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reproduce.configuration import RunOptions, differences
from reproduce.diff.causes import causes
from reproduce.diff.contents import compare_contents
from reproduce.diff.first_step import first_difference
from reproduce.diff.sides import Side
from reproduce.diff.states import State, state_after
from reproduce.diff.tensors import compare_states
from reproduce.display import say as print_line
from reproduce.project import Project

Say = Callable[[str], None]
_SHOWN_TENSORS = 8


@dataclass
class Difference:
    """All that was found out. step: the first after which the states differ, or None. compared_at: the step whose
    states `tensors` compares, which is later where the state at `step` itself cannot be had."""

    same: bool = False
    configuration: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    step: int | None = None
    losses: list[str] | None = None
    compared_at: int | None = None
    states: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)


def diff(project: Project, options: RunOptions, a: Side, b: Side, as_json: bool) -> int:
    """Compares, says so, and returns 0 for the same, 1 for different."""
    say: Say = (lambda text: None) if as_json else print_line
    say(f"A: {a.kind} {a.name}, {len(a.digests)} steps\nB: {b.kind} {b.name}, {len(b.digests)} steps")
    found = Difference(
        configuration=differences(a.identity.configuration, b.identity.configuration),
        data=_data(a, b),
        steps=[len(a.digests), len(b.digests)],
        step=first_difference(a.digests, b.digests),
    )
    states = None if _told_by_contents(a, b, found) else _states(project, options, a, b, found, say)
    if states is not None:
        found.states = [
            {"origin": state.origin, "note": state.note, "replayed_steps": state.replayed_steps} for state in states
        ]
        if states[0].tensors is not None and states[1].tensors is not None:
            found.tensors = compare_states(states[0].tensors, states[1].tensors)
    found.same = (
        not found.configuration
        and not found.data
        and found.step is None
        and len(a.digests) == len(b.digests)
        and not found.tensors
    )
    if not found.same:
        found.evidence = causes(a, b, found.step, states)
    if as_json:
        print_line(json.dumps({"a": a.name, "b": b.name, **vars(found)}, indent=2, sort_keys=True))
    for line in _lines(found):
        say(line)
    return 0 if found.same else 1


def _data(a: Side, b: Side) -> list[str]:
    before = {"dataset": a.identity.dataset, "tokenizer": a.identity.tokenizer}
    return differences(before, {"dataset": b.identity.dataset, "tokenizer": b.identity.tokenizer})


def _told_by_contents(a: Side, b: Side, found: Difference) -> bool:
    """Whether the tensors that differ first are known by their hashes. Where both have saved the state, that tells
    more."""
    step = found.step
    if step is None or a.contents is None or b.contents is None or (step in a.bundles and step in b.bundles):
        return False
    found.compared_at = step
    found.tensors = compare_contents(a.contents, b.contents, step)
    return True


def _states(
    project: Project, options: RunOptions, a: Side, b: Side, found: Difference, say: Say
) -> tuple[State, State] | None:
    """The two states to compare; at most one segment is replayed for each side."""
    step = found.step
    if step is None:
        return _ends(project, options, a, b, found, say)
    states = state_after(project, options, a, step, say), state_after(project, options, b, step, say)
    found.compared_at = step
    if all(state.tensors is not None and state.origin != "replayed otherwise" for state in states):
        return states
    # What one side had after this step cannot be computed again; the next state that it saved still tells something.
    later = min((s for s in a.bundles if s > step and s in b.bundles), default=None)
    if later is None:
        return states
    saved = state_after(project, options, a, later, say), state_after(project, options, b, later, say)
    if any(state.tensors is None for state in saved):
        return states
    found.compared_at = later
    return _with_origin(states, saved)


def _with_origin(found: tuple[State, State], later: tuple[State, State]) -> tuple[State, State]:
    """The later tensors, with what the replays of the first step told."""
    first, second = (
        State(state.origin, state.note, state.replayed_steps, saved.tensors)
        for state, saved in zip(found, later, strict=True)
    )
    return first, second


def _ends(
    project: Project, options: RunOptions, a: Side, b: Side, found: Difference, say: Say
) -> tuple[State, State] | None:
    """Digests that are the same do not show that the saved states are: those of the last common step are compared."""
    common = [step for step in a.bundles if step in b.bundles and step <= min(found.steps)]
    if not common or (not found.steps[0] and not found.steps[1]):
        return None
    step = max(common)
    if a.bundles[step] == b.bundles[step]:
        return None
    found.compared_at = step
    return state_after(project, options, a, step, say), state_after(project, options, b, step, say)


def _lines(found: Difference) -> list[str]:
    if found.same:
        return [f"the same: configuration, data and the states after all {found.steps[0]} steps"]
    lines = [f"configuration: {line}" for line in found.configuration] or ["configuration: the same"]
    lines += [f"data: {line}" for line in found.data] or ["data: the same"]
    lines.append(_step_line(found))
    shown = sorted(found.tensors, key=_nearness)
    for entry in shown[:_SHOWN_TENSORS]:
        lines.append(f"tensor: {_tensor_line(entry)}")
    if len(shown) > _SHOWN_TENSORS:
        lines.append(f"tensor: and {len(shown) - _SHOWN_TENSORS} more (--json lists all)")
    if found.compared_at is not None and not found.tensors and found.step is not None:
        notes = [state["note"] for state in found.states if state["origin"] in ("none", "replayed otherwise")]
        lines.append(
            f"tensor: cannot be told: {'; '.join(notes)}" if notes else "tensor: all are the same, the loss is not"
        )
    return lines + [f"evidence: {line}" for line in found.evidence]


def _step_line(found: Difference) -> str:
    if found.step is not None:
        text = f"step: the states differ first after step {found.step}"
        if found.compared_at not in (None, found.step):
            text += f"; compared after step {found.compared_at}, the next that both have saved"
        return text
    first, second = found.steps
    common = min(first, second)
    text = f"step: the step digests of all {common} common steps are the same"
    return text if first == second else f"{text}; A has {first} steps, B {second}"


def _tensor_line(entry: dict[str, Any]) -> str:
    if "blake3" in entry:
        a, b = ("not there" if content is None else content[:12] for content in entry["blake3"])
        return f"{entry['tensor']}: another content, BLAKE3 A {a}, B {b}"
    if "index" not in entry:
        return f"{entry['tensor']}: A {entry['a']}, B {entry['b']}"
    return (
        f"{entry['tensor']}: {entry['elements']} of {entry['of']} elements, first at {entry['index']}: A {entry['a']}, "
        f"B {entry['b']}, {entry['ulp']} ulp apart (at most {entry['largest_ulp']}); relative distance "
        f"{entry['relative_distance']}"
    )


def _nearness(entry: dict[str, Any]) -> float:
    """Smallest for what is furthest apart."""
    distance = entry.get("relative_distance", "not finite")
    return float("-inf") if isinstance(distance, str) else -float(distance)
