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
        self._forked, self._ended = card.driver.Event(), card.driver.Event()
        self._beside = False  # whether work is under way on the side stream that was not waited for
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

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Queue on the side stream after all that the main stream has been given so far; `join` waits for it."""
        self._forked.record(self.stream)
        self._side.wait_for_event(self._forked)
        self._current = self._side
        try:
            yield
        finally:
            self._current = self.stream
            self._ended.record(self._side)
            self._beside = True

    def join(self) -> None:
        """Let the main stream wait for what was queued beside it."""
        if self._beside:
            self.stream.wait_for_event(self._ended)
            self._beside = False

    def synchronise(self) -> None:
        self.stream.synchronize()
