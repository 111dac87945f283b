"""How long one call takes on the card, as part of a replayed graph, where nothing waits for the host."""

import statistics
from collections.abc import Callable

from engine.backends.cuda.graphs import Graph
from engine.backends.cuda.launching import Launcher

CALLS = 20  # in one graph


def microseconds(launcher: Launcher, call: Callable[[], None], rounds: int) -> float:
    """Of one call, which queues work on the launcher's stream: the median of the rounds, each of CALLS in one graph."""
    stream, driver = launcher.stream, launcher.card.driver

    def record() -> None:
        for _ in range(CALLS):
            call()

    call()
    stream.synchronize()
    graph = Graph(stream, record)
    times = []
    for _ in range(rounds):
        first, last = driver.Event(), driver.Event()
        first.record(stream)
        graph.launch()
        last.record(stream)
        last.synchronize()
        times.append(1e3 * last.time_since(first) / CALLS)
    graph.close()
    return statistics.median(times)
