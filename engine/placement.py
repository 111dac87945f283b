"""Places in one arena for things that live for a while: who lives at overlapping times gets disjoint places.

What lives throughout comes first, side by side; then one after another, each at the lowest place that is free as long
as it lives: the longest-lived first, and where that leaves gaps also the earliest first; the smaller arena is taken.
Which places are taken is kept in a segment tree over time (Bentley 1977), so that a placement looks at a few spans of
bytes and not at everything placed before.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

ALIGNMENT = 64  # bytes: a processor's cache line, and its widest vector


class Storage:
    """One place of `size` bytes, live from time `first` to `last`, both included."""

    __slots__ = ("first", "last", "offset", "size")

    def __init__(self, size: int, first: int, last: int) -> None:
        self.size = size
        self.first = first
        self.last = last
        self.offset = 0


def place(storages: Iterable[Storage], alignment: int = ALIGNMENT) -> int:
    """Give each storage an offset, a multiple of `alignment`; returns the bytes of the arena that holds them all."""
    distinct = list(dict.fromkeys(storages))
    end = max(s.last for s in distinct)
    floor = 0  # below it stand those that live throughout
    lasting = [s for s in distinct if (s.first, s.last) == (0, end)]
    for storage in sorted(lasting, key=lambda s: -s.size):
        storage.offset = floor
        floor += _aligned(storage.size, alignment)
    passing = [s for s in distinct if (s.first, s.last) != (0, end)]
    found = _placed(sorted(passing, key=lambda s: (s.first - s.last, -s.size)), floor, end, alignment)
    if found[0] > floor + _most_at_once(passing, end, alignment):
        earliest_first = _placed(sorted(passing, key=lambda s: (s.first, -s.last, -s.size)), floor, end, alignment)
        found = min(found, earliest_first, key=lambda f: f[0])
    total, offsets = found
    for storage, offset in offsets:
        storage.offset = offset
    return total


def _most_at_once(storages: Iterable[Storage], end: int, alignment: int) -> int:
    """Bytes of all that live at the fullest time: no arena is smaller."""
    changes = [0] * (end + 2)
    for storage in storages:
        changes[storage.first] += _aligned(storage.size, alignment)
        changes[storage.last + 1] -= _aligned(storage.size, alignment)
    return max(accumulate(changes))


def _placed(storages: Iterable[Storage], floor: int, end: int, alignment: int) -> tuple[int, list[tuple[Storage, int]]]:
    """The bytes of an arena that holds `storages` from `floor` on, placed in their order, and the place of each."""
    total, offsets = floor, []
    taken = _Taken(end + 1)
    for storage in storages:
        size = _aligned(storage.size, alignment)
        offset = floor
        for start, stop in sorted(taken.during(storage.first, storage.last)):
            if offset + size <= start:
                break
            offset = max(offset, stop)
        offsets.append((storage, offset))
        taken.add(storage.first, storage.last, offset, offset + size)
        total = max(total, offset + size)
    return total, offsets


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class _Spans:
    """A set of bytes as spans [start, stop) that do not touch each other, in order."""

    __slots__ = ("starts", "stops")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Whether [start, stop) was not yet in the set as a whole; it is now."""
        first = bisect_left(self.stops, start)  # the first span that reaches start, and the first beyond stop
        beyond = bisect_right(self.starts, stop)
        if first < beyond:
            if self.starts[first] <= start and stop <= self.stops[first]:
                return False
            start = min(start, self.starts[first])
            stop = max(stop, self.stops[beyond - 1])
        self.starts[first:beyond] = [start]
        self.stops[first:beyond] = [stop]
        return True


class _Taken:
    """Bytes that are taken at each of the times 0 to `times` - 1.

    Node n of the tree stands for the times of its halves 2n and 2n + 1; leaves, from `leaves` on, for one time each.
    `throughout[n]` are the bytes added for a stretch that has n as one of its parts, `sometime[n]` those that are taken
    at any time in n.
    """

    def __init__(self, times: int) -> None:
        self.leaves = times
        self.throughout = [_Spans() for _ in range(2 * times)]
        self.sometime = [_Spans() for _ in range(2 * times)]

    def add(self, first: int, last: int, start: int, stop: int) -> None:
        """Bytes [start, stop) are taken from time `first` to `last`."""
        for node in self._parts(first, last):
            self.throughout[node].add(start, stop)
            while node and self.sometime[node].add(start, stop):  # a node that had it has handed it up before
                node //= 2

    def during(self, first: int, last: int) -> list[tuple[int, int]]:
        """Spans of bytes that are taken at any time from `first` to `last`; they may overlap."""
        parts = self._parts(first, last)
        above: set[int] = set()
        for node in parts:
            while (node := node // 2) and node not in above:
                above.add(node)
        spans = [self.sometime[node] for node in parts] + [self.throughout[node] for node in above]
        return [pair for span in spans if span.starts for pair in zip(span.starts, span.stops, strict=True)]

    def _parts(self, first: int, last: int) -> list[int]:
        """The fewest nodes that make up the stretch from `first` to `last`."""
        parts = []
        low, high = first + self.leaves, last + self.leaves + 1
        while low < high:
            if low & 1:
                parts.append(low)
                low += 1
            if high & 1:
                high -= 1
                parts.append(high)
            low //= 2
            high //= 2
        return parts
