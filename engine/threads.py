"""A team of threads that runs independent pieces of work; which thread runs which piece never matters."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Task = tuple[Callable[..., Any], tuple[Any, ...]]


class ThreadTeam:
    """Runs lists of (function, arguments) on `size` threads, the caller's included."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a thread team needs at least 1 thread, found {size}")
        self.size = size
        self._pool = ThreadPoolExecutor(size - 1, "samebits") if size > 1 else None

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks and return when every one has ended; the first exception is raised."""
        if self._pool is None or len(tasks) == 1:
            for function, arguments in tasks:
                function(*arguments)
            return
        queue = iter(tasks)  # next() on a sequence iterator is atomic, so threads share it
        helpers: list[Future[None]] = [self._pool.submit(_drain, queue) for _ in range(min(self.size, len(tasks)) - 1)]
        try:
            _drain(queue)
        finally:
            for helper in helpers:
                helper.result()

    def ranges(self, total: int, multiple: int = 1) -> list[tuple[int, int]]:
        """Cut range(total) into at most `size` runs whose borders are multiples of `multiple`."""
        blocks = -(-total // multiple)
        per_thread = -(-blocks // self.size) * multiple
        return [(start, min(start + per_thread, total)) for start in range(0, total, per_thread)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _drain(queue: Iterator[Task]) -> None:
    for function, arguments in queue:
        function(*arguments)
