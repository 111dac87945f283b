"""Saving behind the training: the caller pays for one copy of the state and goes on."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from artifacts import canonical
from artifacts.bundle import Array, save_bundle
from artifacts.canonical import JSON
from artifacts.errors import SaveFailed
from artifacts.store import Store


class BackgroundSaver:
    """Saves bundles in a thread of its own, one at a time.

    The arrays given to `submit` belong to the saver until `wait_free` returns:

        saver.wait_free(); copy the state into the arrays; saver.submit(arrays, state, on_done)

    `threads` hash and compress (None: as many as `bundle.parallel` takes). `last` is the newest
    whole bundle so far, for the message should saving fail. A failure is raised, as SaveFailed, by
    whichever method is called next and by every later one. Use as a context manager: leaving it
    drains.
    """

    def __init__(self, store: Store, threads: int | None = None, last: str | None = None) -> None:
        self._store = store
        self._threads = threads
        self._last = last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._pending: Future[None] | None = None
        self._failed: BaseException | None = None

    @property
    def last(self) -> str | None:
        """The newest bundle that is whole on disk and whose `on_done` has returned."""
        return self._last

    def submit(
        self,
        tensors: Mapping[str, Array],
        state: Mapping[str, JSON],
        on_done: Callable[[str], None],
    ) -> None:
        """Begins to save, once the save before is through.

        `on_done(hash)` is called in the saver's thread as soon as the bundle is durable and before
        any `gc` can run; an error in it is an error of the save.
        """
        self.wait_free()
        # A copy of the state: unlike the arrays it stays the caller's to change.
        copied = canonical.loads(canonical.dumps(state))
        assert isinstance(copied, dict)
        self._pending = self._pool.submit(self._save, dict(tensors), copied, on_done)

    def wait_free(self) -> None:
        """Waits until nothing is being saved, so that the arrays may be written again."""
        if self._pending is not None:
            self._failed = self._failed or self._pending.exception()
            self._pending = None
        if self._failed is not None:
            raise SaveFailed(self._failed, self._last) from self._failed

    def check(self) -> None:
        """Raises if a save has failed, and waits for nothing."""
        if self._pending is None or self._pending.done():
            self.wait_free()

    def drain(self) -> None:
        """Waits until everything submitted is durable; the same as `wait_free`, for the end."""
        self.wait_free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.drain()
        finally:
            self._pool.shutdown()

    def _save(
        self,
        tensors: Mapping[str, Array],
        state: Mapping[str, JSON],
        on_done: Callable[[str], None],
    ) -> None:
        with self._store.using():
            name = save_bundle(self._store, tensors, state, self._threads)
            on_done(name)
        self._last = name
