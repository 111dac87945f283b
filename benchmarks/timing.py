"""How long a step takes. Needs nothing else of this project, so that a peer's interpreter can use it too."""

import time
from collections.abc import Callable


def durations(step: Callable[[], object], steps: int, seconds: float) -> list[float]:
    """Seconds of each of at least `steps` calls, and of as many as `seconds` take.

    A card changes its clocks for tenths of a second after work begins and under its power limit, so a number of steps
    alone would say different things of short ones and of long ones.
    """
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < steps or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return found
