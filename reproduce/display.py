"""What a long computation shows while it runs: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

Style = Literal["auto", "plain", "none"]
_PLAIN_SECONDS = 10.0


class Display(Protocol):
    """Shows steps as they are done, and notes in between."""

    def step(self, step: int, loss: float) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Pace:
    """Steps per second since the first step, which compiles and is left out."""

    def __init__(self, first_step: int, last_step: int, tokens_per_step: int) -> None:
        self._first = first_step
        self._last = last_step
        self._tokens = tokens_per_step
        self._start: float | None = None

    def at(self, step: int) -> str:
        """Tokens per second and time left, once known."""
        now = time.monotonic()
        if self._start is None:
            self._start, self._first = now, step
        done, seconds = step - self._first, now - self._start
        if done <= 0 or seconds <= 0:
            return "measuring speed"
        left = (self._last - step) * seconds / done
        return f"{done * self._tokens / seconds:,.0f} tokens/s, {duration(left)} left"


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(number: int, noun: str) -> str:
    """`1 bundle` or `1,000 bundles`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def open_display(style: Style, what: str, first_step: int, last_step: int, tokens: int) -> Display:
    """The display for this output. `tokens`: per step."""
    if style == "none":
        return _Nothing()
    pace = Pace(first_step, last_step, tokens)
    if style == "auto" and sys.stdout.isatty():
        return _Live(what, first_step, last_step, pace)
    return _Plain(what, last_step, pace)


def say(text: str) -> None:
    """One line of a stage to its output. Nobody reading any more is no reason to stop."""
    _quietly(sys.stdout, lambda: print_line(sys.stdout, text))


def say_aside(text: str) -> None:
    """One line beside the output, to standard error."""
    _quietly(sys.stderr, lambda: print_line(sys.stderr, text))


def print_line(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def _quietly(stream: TextIO, action: Callable[[], None]) -> None:
    try:
        action()
    except OSError:  # a closed pipe or terminal
        return


class _Nothing:
    def step(self, step: int, loss: float) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Plain:
    """A line every few seconds."""

    def __init__(self, what: str, last_step: int, pace: Pace) -> None:
        self._what, self._last, self._pace = what, last_step, pace
        self._next = time.monotonic()

    def step(self, step: int, loss: float) -> None:
        pace = self._pace.at(step)
        if step < self._last and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PLAIN_SECONDS
        say(f"{self._what}: step {step}/{self._last}, loss {loss:.4f}, {pace}")

    def note(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        pass


class _Live:
    """A bar with numbers, and notes above it."""

    def __init__(self, what: str, first_step: int, last_step: int, pace: Pace) -> None:
        self._pace = pace
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.fields[text]}"),
            console=self._console,
            # Standard output and error stay what they are: a failing refresh must not reach training.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID = self._progress.add_task(what, total=last_step, completed=first_step, text="")
        _quietly(sys.stdout, self._progress.start)

    def step(self, step: int, loss: float) -> None:
        text = f"loss {loss:.4f}  {self._pace.at(step)}"
        self._progress.update(self._task, completed=step, text=text)

    def note(self, text: str) -> None:
        _quietly(sys.stdout, lambda: self._console.print(text, markup=False))

    def close(self) -> None:
        _quietly(sys.stdout, self._progress.stop)
