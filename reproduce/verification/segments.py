"""Which steps are replayed, and from which bundles."""

from collections.abc import Sequence
from dataclasses import dataclass

from artifacts import hash_bytes
from reproduce.errors import ReproduceError


@dataclass(frozen=True)
class Segment:
    """Replayed from the bundle of step `start`; compared from step `first` to `last`."""

    start: int
    first: int
    last: int


def parse_steps(text: str | None, before: int, last: int) -> tuple[int, int]:
    """First and last step to compare, from `A:B`; either may be left out. `before`: the record's first bundle."""
    if text is None:
        return before + 1, last
    first, colon, second = text.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, second)):
        raise ReproduceError(f"--steps: expected A:B with step numbers, found {text!r}")
    a, b = int(first or before + 1), int(second or last)
    if not before + 1 <= a <= b <= last:
        raise ReproduceError(f"--steps: expected {before + 1} <= A <= B <= {last}, found {text}")
    return a, b


def whole(bundles: Sequence[int], first: int, last: int) -> list[Segment]:
    """All of it in one go, from the bundle before `first`."""
    return [Segment(max(step for step in bundles if step < first), first, last)]


def pieces(bundles: Sequence[int], first: int, last: int) -> list[Segment]:
    """The same steps, with a new beginning at every bundle in between."""
    starts = [step for step in sorted(bundles) if step < last]
    ends = [*starts[1:], last]
    return [
        Segment(start, max(first, start + 1), min(end, last))
        for start, end in zip(starts, ends, strict=True)
        if end >= first
    ]


def choose(bundles: Sequence[int], count: int, seed: int, record: str) -> list[Segment]:
    """`count` of the segments between bundles: those that come first when sorted by a hash of seed, record and
    start. So the same seed chooses the same ones everywhere, and who made the record could not know the seed."""
    every = pieces(bundles, min(bundles) + 1, max(bundles))
    ranked = sorted(every, key=lambda segment: _rank(seed, record, segment.start))
    return sorted(ranked[:count], key=lambda segment: segment.start)


def _rank(seed: int, record: str, start: int) -> str:
    return hash_bytes(f"samebits segment choice 1\n{seed}\n{record}\n{start}\n".encode())
