"""Launching kernels by name: compiled and loaded on first use, then called with packed arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.backends.cuda.card import Card
from engine.backends.cuda.compiler import compiled
from engine.backends.cuda.sources import Unit


class Launcher:
    """Kernels of one card on one stream. Argument formats are those of `struct`, in C's own alignment."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.stream = card.driver.Stream()
        self._side = card.driver.Stream()
        self._current = self.stream
        self.step = 0  # of the backward half
        self._events: list[Any] = []  # made once, handed out again from one backward half to the next
        self._handed_out = 0
        self._read: Any = None  # up to here the side stream reads what the main stream will overwrite
        self._ended: list[tuple[int, Any]] = []  # work beside that was not waited for: its step, and when it is done
        self._modules: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}
        self._functions: dict[tuple[str, tuple[tuple[str, int], ...], str], Any] = {}
        self._shared: dict[tuple[str, tuple[tuple[str, int], ...], str], int] = {}

    @property
    def current(self) -> int:
        """Handle of the stream that work is queued on now."""
        return int(self._current.handle)

    @property
    def streams(self) -> tuple[int, int]:
        """Handles of both streams, the main one first."""
        return int(self.stream.handle), int(self._side.handle)

    def function(self, unit: Unit, name: str, arguments: str) -> Any:
        key = (unit.name, tuple(sorted(unit.macros.items())))
        if (*key, name) not in self._functions:
            if key not in self._modules:
                code = compiled(unit, self.card.capability)
                self._modules[key] = self.card.driver.module_from_buffer(code)
            function = self._modules[key].get_function(name)
            function.prepare([arguments])
            self._functions[*key, name] = function
        return self._functions[*key, name]

    def __call__(
        self,
        unit: Unit,
        name: str,
        arguments: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *values: Any,
        shared: int = 0,
    ) -> None:
        """Queue one launch; `shared` is dynamic shared memory in bytes."""
        function = self.function(unit, name, arguments)
        if shared:
            self._allow_shared(unit, name, function, shared)
        grid3, block3 = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        function.prepared_async_call(grid3, block3, self._current, *values, shared_size=shared)

    def _allow_shared(self, unit: Unit, name: str, function: Any, size: int) -> None:
        """Raise a kernel's limit of dynamic shared memory where it is below `size`."""
        key = (unit.name, tuple(sorted(unit.macros.items())), name)
        if self._shared.get(key, 0) < size:
            attribute = self.card.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
            function.set_attribute(attribute, size)
            self._shared[key] = size

    def fill(self, address: int, byte: int, size: int) -> None:
        """Queue setting `size` bytes."""
        self.card.driver.memset_d8_async(address, byte, size, self._current)

    def mark(self) -> Any:
        """An event after all that the current stream has been given so far."""
        if self._handed_out == len(self._events):
            self._events.append(self.card.driver.Event())
        event = self._events[self._handed_out]
        self._handed_out += 1
        event.record(self._current)
        return event

    @contextmanager
    def beside(self, after: Any = None, reads_lasting: bool = False) -> Iterator[None]:
        """Queue on the side stream after all that the main stream has been given so far, or up to the mark `after`.

        reads_lasting: nothing that this work reads, but up to `reads_end`, is overwritten before the plan has the
        storage used again.
        """
        self._side.wait_for_event(after or self.mark())
        self._current = self._side
        try:
            yield
        finally:
            end = self.mark()
            self._current = self.stream
            self._ended.append((self.step, end))
            if not reads_lasting:
                self._read = end

    def reads_end(self) -> None:
        """Within `beside`: from here on only storage is read that stays as it is."""
        self._read = self.mark()

    def join_reads(self) -> None:
        """Let the main stream wait until all may be overwritten that work beside it reads and that does not last."""
        if self._read:
            self.stream.wait_for_event(self._read)
            self._read = None

    def join(self, before: int | None = None) -> None:
        """Let the main stream wait for all work beside it, or for that of steps before `before`."""
        ended = [event for step, event in self._ended if before is None or step < before]
        if ended:
            self.stream.wait_for_event(ended[-1])  # one stream: what was queued earlier is done too
            del self._ended[: len(ended)]
        if not self._ended:
            self._handed_out, self._read = 0, None

    def synchronise(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        """Give streams, events and kernels back; nothing can be queued any more."""
        self.stream = self._side = self._current = self._read = None
        self._ended.clear()
        self._events.clear()
        self._functions.clear()
        self._modules.clear()
