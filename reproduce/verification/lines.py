"""Differences and distances, in lines for people; --json has all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from reproduce.display import counted

_SHOWN_TENSORS = 6

Entry = Mapping[str, Any]


def difference_lines(differences: Sequence[Entry]) -> list[str]:
    """What contradicts the record, in the order of the replay."""
    return [f"difference: {line}" for entry in differences for line in _difference(entry)]


def _difference(entry: Entry) -> list[str]:
    what, step = entry["what"], entry["step"]
    if "distance" in entry:
        return [f"step {step}: {what}: {_short(entry['distance'])}, {_allowed(entry)}"]
    if "found_loss" in entry:
        return [
            f"step {step}: the state after it is another one: loss {entry['found_loss']} here, "
            f"{entry['expected_loss']} in the record; step digest {entry['found'][:12]} here, {entry['expected'][:12]} "
            "in the record"
        ]
    if "tensors" in entry:
        return [
            f"step {step}: the bundle would be {entry['found'][:12]} here, the record has {entry['expected'][:12]}",
            *_tensor_lines(step, entry["tensors"]),
        ]
    if "expected" in entry:
        return [f"step {step}: {what}: {entry['found'][:24]} here, {entry['expected'][:24]} in the record"]
    return [f"step {step}: {what}"]


def _tensor_lines(step: int, tensors: Sequence[Entry]) -> list[str]:
    """Weights and moments before the history, which only repeats the steps."""
    ordered = sorted(tensors, key=lambda entry: (entry["tensor"].startswith("history/"), entry["tensor"]))
    lines = [
        f"step {step}: {entry['tensor']}: {entry['difference']} is not the same"
        if "difference" in entry
        else f"step {step}: {entry['tensor']}: {counted(entry['elements'], 'element')} not the same, first "
        f"{entry['index']}: {entry['found']} here, {entry['expected']} in the record"
        for entry in ordered
    ]
    more = len(lines) - _SHOWN_TENSORS
    return lines[:_SHOWN_TENSORS] + ([f"step {step}: and {more} tensors more (--json lists all)"] if more > 0 else [])


def distance_lines(distances: Sequence[Entry]) -> list[str]:
    """The largest distance of each kind, by the share of what is allowed."""
    worst: dict[str, Entry] = {}
    for entry in distances:
        kind = "tensors" if entry["what"].startswith("tensor ") else entry["what"]
        if kind not in worst or _share(entry) > _share(worst[kind]):
            worst[kind] = entry
    return [
        f"distance: {entry['what']} at step {entry['step']}: {_short(entry['distance'])}, {_allowed(entry)}"
        for _, entry in sorted(worst.items(), key=lambda item: item[0])
    ]


def _allowed(entry: Entry) -> str:
    return "and the record allows none" if entry["bound"] is None else f"allowed {_short(entry['bound'])}"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _share(entry: Entry) -> float:
    bound, distance = entry["bound"], entry["distance"]
    if not bound or isinstance(distance, str):
        return float("inf") if distance or bound is None else 0.0
    return float(distance / bound)
