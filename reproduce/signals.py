"""Requests that arrive as signals: stop after this step, save after this step."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

stopping = threading.Event()
"""Set once this process was asked to stop, so that nobody asks a second time by mistake."""


class Signals:
    """While entered, SIGTERM, SIGINT and SIGHUP ask to stop, the second of them ends the process at once, and
    SIGUSR1 asks to save. Only for the main thread."""

    def __init__(self) -> None:
        self.stop: int | None = None
        """The signal that asked to stop."""
        self._save = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in _STOP:
            # SIGHUP ignored is how nohup says that a closed terminal should not matter.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._on_stop)
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_save(self) -> bool:
        """Whether saving was asked for since the last call."""
        asked, self._save = self._save, False
        return asked

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop is not None:
            # Bundles are renamed into place when whole, so nothing is lost but the steps since the last.
            os._exit(128 + number)
        self.stop = number
        stopping.set()

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True
