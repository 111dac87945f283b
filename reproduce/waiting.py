"""Waiting, for a bounded time and not silently, for another process to end its work."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from artifacts import Run, Store, open_run
from artifacts.errors import RunLocked
from reproduce.errors import Busy

_T = TypeVar("_T")
Say = Callable[[str], None]

PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.2


def open_run_patiently(store: Store, run_id: str, say: Say) -> Run:
    """`open_run`, waiting for a writer that is about to stop. Raises Busy after PATIENCE_SECONDS."""
    return _wait(lambda: open_run(store, run_id), RunLocked, say, "a run has one writer")


@contextmanager
def one_stage_at_a_time(private: Path, say: Say) -> Iterator[None]:
    """Held by every stage, so that no two processes write the outputs of one project."""
    lock = FileLock(private / "stage.lock", timeout=0, is_singleton=False, thread_local=False)

    def acquire() -> None:
        try:
            lock.acquire()
        except Timeout as error:
            raise RunLocked("another process is in a stage of this project") from error

    _wait(acquire, RunLocked, say, "a project has one stage running")
    try:
        yield
    finally:
        lock.release()


def _wait(attempt: Callable[[], _T], refusal: type[Exception], say: Say, why: str) -> _T:
    deadline = time.monotonic() + PATIENCE_SECONDS
    waiting = False
    while True:
        try:
            return attempt()
        except refusal as error:
            if time.monotonic() >= deadline:
                raise Busy(
                    f"{error}; {why}, and it did not end within {PATIENCE_SECONDS:.0f} seconds. "
                    "Wait for it or stop it (SIGTERM saves first), then start again"
                ) from error
            if not waiting:
                say(f"{error}; waiting up to {PATIENCE_SECONDS:.0f} seconds for it to end")
                waiting = True
        time.sleep(_POLL_SECONDS)
