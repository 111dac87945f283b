"""The first step after which two runs are not in the same state."""

from collections.abc import Sequence


def first_difference(a: Sequence[bytes], b: Sequence[bytes]) -> int | None:
    """The first step (from 1) whose digests differ; None if the shorter list is the beginning of the other.

    States that differ once may be the same again later, so this looks at every step rather than bisecting.
    """
    return next((step for step, (x, y) in enumerate(zip(a, b, strict=False), 1) if x != y), None)
