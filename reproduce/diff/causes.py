"""What there is to explain a difference: evidence only. It says what else is different, never whose fault."""

from collections.abc import Mapping
from typing import Any

from reproduce.configuration import differences
from reproduce.diff.sides import Side
from reproduce.diff.states import State
from reproduce.display import counted

_DECIDES_NOTHING = ("git", "hash_seed", "locale", "threads", "cores")
"""Parts of a fingerprint that no tier's bits depend on: named last, as what they are."""


def causes(a: Side, b: Side, step: int | None, states: tuple[State, State] | None) -> list[str]:
    """Lines of evidence, the likeliest first."""
    found = _configuration(a, b) + _data(a, b) + _sources(a, b)
    if step is not None:
        if not found:
            found.append(
                "configuration, data and sources are the same on both sides, so the same bits were to be expected: "
                "one of the two was computed or kept otherwise than they say"
            )
        found += _losses(a, b, step)
        found += [line for side in (a, b) for line in _sessions(side, step)]
    if states is not None:
        found += _replays(a, b, states)
    return found + _environments(a, b)


def _configuration(a: Side, b: Side) -> list[str]:
    changed = differences(a.identity.configuration, b.identity.configuration)
    return [f"the configurations differ in {counted(len(changed), 'place')}, listed above"] if changed else []


def _data(a: Side, b: Side) -> list[str]:
    found = []
    if a.identity.tokenizer != b.identity.tokenizer:
        found.append("the tokenizers differ, so the same text is other tokens")
    if a.identity.dataset != b.identity.dataset:
        found.append("the datasets differ")
    before, after = a.identity.configuration["train"], b.identity.configuration["train"]
    if any(before[key] != after[key] for key in ("seed", "batch")):
        found.append("another train.seed or train.batch is another order of the data")
    return found


def _sources(a: Side, b: Side) -> list[str]:
    changed = sorted(path for path in {*a.sources, *b.sources} if a.sources.get(path) != b.sources.get(path))
    if not changed:
        return []
    shown = ", ".join(changed[:6]) + (" ..." if len(changed) > 6 else "")
    return [f"sources that decide bits differ: {shown}"]


def _losses(a: Side, b: Side, step: int) -> list[str]:
    x, y = a.losses[step - 1], b.losses[step - 1]
    if x.tobytes() != y.tobytes():
        return [
            f"the loss of step {step} differs already ({x} and {y}), so the batch, the dropout or the forward half "
            f"did, or the weights it began with"
        ]
    return [
        f"the loss of step {step} is the same ({x}), so batch and forward half were; what differs came after: in the "
        "backward half, in the optimizer, or to the state itself"
    ]


def _sessions(side: Side, step: int) -> list[str]:
    if step - 1 in side.sessions[1:]:
        return [f"{side.title} was resumed from step {step - 1}, just before the step that differs"]
    return []


def _replays(a: Side, b: Side, states: tuple[State, State]) -> list[str]:
    found = []
    for side, state in ((a, states[0]), (b, states[1])):
        if state.origin == "replayed":
            found.append(f"a replay here comes to what {side.title} has")
        if state.origin == "replayed otherwise":
            found.append(
                f"a replay here does not come to what {side.title} has, so something happened to it at that step which "
                "its configuration, its data and the sources here do not say"
            )
    return found


def _environments(a: Side, b: Side) -> list[str]:
    if not a.environments or not b.environments:
        who = " and ".join(side.title for side in (a, b) if not side.environments)
        return [f"no attestation in the store says on which machine {who} was trained"]
    changed = differences(_known(a.environments[0]), _known(b.environments[0]))
    if not changed:
        return ["both say that they were trained in the same environment"]
    heavy = [line for line in changed if not line.startswith(_DECIDES_NOTHING)]
    light = [line for line in changed if line not in heavy]
    lines = [f"the environments that they were trained in differ: {line}" for line in heavy]
    if light:
        lines.append(f"they also differ in what should not matter: {'; '.join(light)}")
    return lines


def _known(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Without the long list of processor flags, of which only the differences are of interest."""
    cpu = environment.get("cpu")
    flags = {flag: True for flag in cpu.get("flags", [])} if isinstance(cpu, Mapping) else {}
    model = cpu.get("model") if isinstance(cpu, Mapping) else None
    return {**environment, "cpu": {"flags": flags, "model": model}}
