"""What would make a plan fit: changes of the configuration, each planned again.

A family is one kind of change, its members from the gentlest to the strongest. The gentlest member that fits is found
by planning, and where no family suffices, together with the changes that leave the run's bits as they are. To offer
another kind of change, add a family.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from reproduce.configuration import Configuration, check, read_text
from reproduce.configuration_file import rewrite
from reproduce.errors import ConfigurationError, ReproduceError
from reproduce.planning.devices import Device
from reproduce.planning.report import Limit, plan_for
from reproduce.planning.work import work_of

Changes = Mapping[tuple[str, ...], int | str]


@dataclass(frozen=True)
class Remedy:
    """Changes of the configuration. peak: bytes that the changed plan needs. more_operations: what a step computes more
    than now, as a part of what it computes now; negative if less."""

    changes: Changes
    says: str
    peak: int
    fits: bool
    changes_bits: bool
    more_operations: float

    def to_json(self) -> dict[str, Any]:
        return {
            "changes": {".".join(path): value for path, value in self.changes.items()},
            "changes_bits": self.changes_bits,
            "fits": self.fits,
            "more_operations": self.more_operations,
            "peak": self.peak,
            "says": self.says,
        }


@dataclass(frozen=True)
class Family:
    """One kind of change. members: from the gentlest to the strongest, none if it has nothing to offer here."""

    says: str
    changes_bits: bool
    members: Callable[[Configuration, Device], Sequence[Changes]]


def _tiled(configuration: Configuration, device: Device) -> Sequence[Changes]:
    # On a card they are computed again whatever the configuration says.
    stored = configuration.model.attention == "stored" and device.backend == "cpu"
    return [{("model", "attention"): "tiled"}] if stored else []


def _recompute(configuration: Configuration, device: Device) -> Sequence[Changes]:
    # The last block's backward half comes at once, so to compute it again gains nothing.
    blocks = range(configuration.run.recompute + 1, configuration.model.layers)
    return [{("run", "recompute"): count} for count in blocks]


def _mixed(configuration: Configuration, device: Device) -> Sequence[Changes]:
    if device.capability is None or configuration.tier == "prod":
        return []
    from engine.backends.cuda.opening import OLDEST_MIXED_CAPABILITY

    serves = device.capability >= OLDEST_MIXED_CAPABILITY
    return [{("tier",): "prod", ("train", "precision"): "bf16"}] if serves else []


def _threads(configuration: Configuration, device: Device) -> Sequence[Changes]:
    threads = configuration.run.thread_count() if device.backend == "cpu" else 1
    return [{("run", "threads"): count} for count in _halves(threads, 1)]


def _shards(configuration: Configuration, device: Device) -> Sequence[Changes]:
    train = configuration.train
    return [{("train", "shards"): count} for count in _divisors(train.batch) if count > train.shards]


def _batch(configuration: Configuration, device: Device) -> Sequence[Changes]:
    train = configuration.train
    return [{("train", "batch"): rows} for rows in _halves(train.batch, train.shards) if rows % train.shards == 0]


def _context(configuration: Configuration, device: Device) -> Sequence[Changes]:
    return [{("model", "context"): tokens} for tokens in _halves(configuration.model.context, 16)]


FAMILIES: tuple[Family, ...] = (
    Family("compute attention weights again", False, _tiled),
    Family("compute blocks again", False, _recompute),
    Family("fewer threads", False, _threads),
    Family("16-bit activations", True, _mixed),
    Family("more shards", True, _shards),
    Family("smaller batch", True, _batch),
    Family("shorter context", True, _context),
)


def find_remedies(configuration: Configuration, device: Device, limit: Limit) -> list[Remedy]:
    """Changes that make the plan fit, the best first; then those that help but do not suffice.

    Better is: the bits stay as they are, fewer changes, and the order of FAMILIES.
    """
    planner = _Planner(configuration, device, limit)
    present = planner.peak({})
    assert present is not None
    alone = {
        family: remedy
        for family in FAMILIES
        if (remedy := planner.gentlest(family, {})) is not None and _helps(remedy, present)
    }
    found = [remedy for remedy in alone.values() if remedy.fits]
    neutral = [remedy for remedy in alone.values() if not remedy.changes_bits]
    if neutral and not any(remedy.fits for remedy in neutral):
        together = {path: value for remedy in neutral for path, value in remedy.changes.items()}
        says = ", ".join(family.says for family in alone if not family.changes_bits)
        found += planner.combined(says, together, [family for family in alone if not alone[family].fits])
    found.sort(key=lambda remedy: (remedy.changes_bits, len(remedy.changes)))
    return found + [remedy for remedy in alone.values() if not remedy.fits]


def changed(configuration: Configuration, changes: Changes) -> Configuration:
    """The configuration with these changes. Raises ConfigurationError where they do not go together."""
    value = configuration.model_dump(mode="json")
    for path, new in changes.items():
        reduce(lambda place, key: place[key], path[:-1], value)[path[-1]] = new
    return check(value, "the changed configuration")


def apply_remedy(path: Path, configuration: Configuration, remedy: Remedy) -> str:
    """The text of the configuration file at `path`, changed to say `configuration` with the remedy.

    Raises ConfigurationError.
    """
    return rewrite(read_text(path), changed(configuration, remedy.changes), str(path))


def choose(remedies: Sequence[Remedy], number: int) -> Remedy:
    """Remedy `number`, counted from 1. Raises ReproduceError if there is none, or it does not suffice."""
    fitting = sum(r.fits for r in remedies)
    if not 1 <= number <= fitting:
        there = f"1 to {fitting}" if fitting else "none that makes the plan fit"
        raise ReproduceError(f"--apply {number}: expected the number of a remedy, there is {there}")
    return remedies[number - 1]


class _Planner:
    def __init__(self, configuration: Configuration, device: Device, limit: Limit) -> None:
        self.configuration = configuration
        self.device = device
        self.limit = limit
        self.known: dict[tuple[tuple[tuple[str, ...], int | str], ...], _Needs | None] = {}

    def gentlest(self, family: Family, with_changes: Changes) -> Remedy | None:
        """The first member that fits, or the strongest if none does; None if it has no members that can be planned."""
        members = [{**with_changes, **m} for m in family.members(self.configuration, self.device)]
        members = [m for m in members[-1:] if self.peak(m) is not None] and members
        if not members:
            return None
        return self.plan(members[self._first_that_fits(members)], family.says, family.changes_bits)

    def _first_that_fits(self, members: Sequence[Changes]) -> int:
        """Its number, or the last one's if that does not fit either; peaks fall from one member to the next.

        Planning a deep model takes a while, so the search guesses where a line between the known peaks meets the limit.
        """
        first, last = 0, len(members) - 1
        high = self.peak({})
        low = self.peak(members[last])
        assert low is not None
        if low > self.limit.bytes:
            return last
        while first < last:
            middle = (first + last) // 2
            if high is not None and high > self.limit.bytes:
                middle = first + (high - self.limit.bytes) * (last - first) // (high - low)
                middle = min(max(middle, first), last - 1)
            peak = self.peak(members[middle])
            if peak is not None and peak <= self.limit.bytes:
                last, low = middle, peak
            else:
                first, high = middle + 1, peak
        return first

    def combined(self, says: str, neutral: Changes, families: Sequence[Family]) -> list[Remedy]:
        """What fits of: the neutral changes together, and these with each of the families that do change bits."""
        tried = [self.plan(neutral, says, False)] if len(neutral) > 1 and self.peak(neutral) is not None else []
        for family in families:
            if family.changes_bits and (remedy := self.gentlest(family, neutral)) is not None:
                tried.append(replace(remedy, says=_sentence(remedy.changes, f"{says}, {family.says}")))
        return [remedy for remedy in tried if remedy.fits]

    def plan(self, changes: Changes, says: str, changes_bits: bool) -> Remedy:
        needs, present = self.needs(changes), self.needs({})
        assert needs is not None and present is not None
        return Remedy(
            changes,
            _sentence(changes, says),
            needs.peak,
            needs.peak <= self.limit.bytes,
            changes_bits,
            needs.operations / present.operations - 1,
        )

    def peak(self, changes: Changes) -> int | None:
        needs = self.needs(changes)
        return None if needs is None else needs.peak

    def needs(self, changes: Changes) -> "_Needs | None":
        """What the changed plan needs; None if the changed configuration is not a usable one."""
        key = tuple(changes.items())
        if key not in self.known:
            try:
                configuration = changed(self.configuration, changes)
                program, plan = plan_for(configuration, self.device)
                self.known[key] = _Needs(plan.arena_bytes, work_of(program, configuration.train).operations)
            except (ConfigurationError, EngineError):
                self.known[key] = None
        return self.known[key]


@dataclass(frozen=True)
class _Needs:
    """peak: bytes. operations: of one step."""

    peak: int
    operations: int


def _helps(remedy: Remedy, present: int) -> bool:
    """Whether it saves a hundredth of what is needed now, or suffices."""
    return remedy.fits or remedy.peak < present - present // 100


def _sentence(changes: Changes, says: str) -> str:
    return f"{says}: " + ", ".join(f"{'.'.join(path)}={value}" for path, value in changes.items())


def _halves(number: int, least: int) -> list[int]:
    """`number` halved again and again, while that gives whole numbers of at least `least`."""
    found = []
    while number % 2 == 0 and number // 2 >= least:
        number //= 2
        found.append(number)
    return found


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, min(number, 65536) + 1) if number % d == 0]
