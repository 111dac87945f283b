"""Segments replayed side by side, each in a process of its own, and what they come to in order."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import Store
from data_pipeline import Dataset, open_dataset
from reproduce.display import Display
from reproduce.errors import Inconclusive, ReproduceError
from reproduce.verification.distances import Tolerance
from reproduce.verification.integrity import Claims
from reproduce.verification.replay import OnStep, Replay
from reproduce.verification.segments import Segment
from reproduce.verification.verdict import Findings
from reproduce.workbench import announce_compilation, workbench_over

_LOOK_SECONDS = 0.5
_counts: Any = None
_losses: Any = None


class SegmentFailed(ReproduceError):
    """A segment could not be replayed; carries the exit code of what happened in its process."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Task:
    """What a process needs to know to replay a segment. claims: read and found whole already, with the run options to
    replay with."""

    number: int
    store: Path
    claims: Claims
    dataset: Path
    segment: Segment
    tolerance: Tolerance | None


def in_turn(
    store: Store,
    claims: Claims,
    dataset: Dataset,
    segments: Sequence[Segment],
    tolerance: Tolerance | None,
    on_step: OnStep,
    on_end: Callable[[Segment, Findings], None],
) -> None:
    """One after the other, in this process."""
    with workbench_over(claims.configuration, dataset) as workbench:
        for segment in segments:
            on_end(segment, Replay(store, claims, workbench, segment, tolerance, on_step).run())


def thread_shares(tasks: int, jobs: int, cores: int) -> list[int]:
    """Threads for each of `tasks`, which take turns at the cores, `jobs` at a time. What is left for the last turn are
    perhaps fewer: then each has more."""
    rest = tasks % jobs
    return [max(1, cores // jobs)] * (tasks - rest) + [max(1, cores // max(1, rest))] * rest


def side_by_side(
    tasks: Sequence[Task], jobs: int, display: Display, on_end: Callable[[Segment, Findings], None]
) -> None:
    """`jobs` at a time. Findings are handed on in the order of the segments."""
    announce_compilation(tasks[0].claims.configuration.run)
    context = multiprocessing.get_context("spawn")
    counts, losses = context.Array("q", len(tasks)), context.Array("d", len(tasks))
    with ProcessPoolExecutor(jobs, context, _begin, (counts, losses)) as pool:
        futures = [pool.submit(_work, task) for task in tasks]
        try:
            _watch(futures, counts, losses, display)
            for task, future in zip(tasks, futures, strict=True):
                on_end(task.segment, future.result())
        except BrokenProcessPool as error:
            raise Inconclusive(
                f"a process that replayed a segment was ended from outside, perhaps for lack of memory: give fewer "
                f"--jobs than {jobs}"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _watch(futures: Sequence[Future[Findings]], counts: Any, losses: Any, display: Display) -> None:
    pending = set(futures)
    shown = 0
    while pending:
        done, pending = wait(pending, _LOOK_SECONDS, FIRST_COMPLETED)
        for future in done:
            future.result()
        if (steps := sum(counts)) > shown:
            shown = steps
            latest = max(range(len(counts)), key=lambda i: counts[i])
            display.step(steps, losses[latest])


def _begin(counts: Any, losses: Any) -> None:
    """In each process: the shared counters, and an end as soon as the process that started this one is gone."""
    global _counts, _losses
    _counts, _losses = counts, losses
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()


def _work(task: Task) -> Findings:
    def on_step(step: int, loss: float) -> None:
        _counts[task.number] += 1
        _losses[task.number] = loss

    try:
        store = Store(task.store, read_only=True)
        dataset = open_dataset(task.dataset)
        with workbench_over(task.claims.configuration, dataset) as workbench:
            return Replay(store, task.claims, workbench, task.segment, task.tolerance, on_step).run()
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if not isinstance(code, int):
            raise
        # Not every exception survives the way to another process.
        raise SegmentFailed(str(error), code) from None
