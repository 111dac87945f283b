"""The text of a model in the code view, and faults that point into it."""

from dataclasses import dataclass
from pathlib import Path

from reproduce.errors import ReproduceError

MAX_BYTES = 8 * 1024
"""Largest file that is read; a model is some hundred bytes."""

_EXCERPT = 100  # characters of a line that an error shows
_NEWLINES = "\r\n"


@dataclass(frozen=True, order=True)
class Span:
    """A piece of a text, from the character at offset `start` to the one before `end`."""

    start: int
    end: int


@dataclass(frozen=True)
class Fix:
    """A change of the text that mends a fault: `replacement` for what is at `span`."""

    span: Span
    replacement: str
    says: str

    def apply(self, text: str) -> str:
        return text[: self.span.start] + self.replacement + text[self.span.end :]


@dataclass(frozen=True)
class Source:
    """A text and the name of where it is from."""

    name: str
    text: str

    @classmethod
    def read(cls, path: Path) -> "Source":
        """The text of a UTF-8 file. Raises ModelError if there is none, or it is too long."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        return cls.decode(str(path), data)

    @classmethod
    def decode(cls, name: str, data: bytes) -> "Source":
        """The text that `data` holds. Raises ModelError where it is not UTF-8, or too long."""
        if len(data) > MAX_BYTES:
            raise ModelError(f"{name}: expected a model of at most {MAX_BYTES:,} bytes, found more: shorten it")
        try:
            return cls(name, data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{name}: expected UTF-8, found byte 0x{data[error.start]:02x} at offset {error.start}: "
                "save it as UTF-8"
            ) from error

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1, of the character at `offset`."""
        before = self.text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1

    def excerpt(self, span: Span) -> str:
        """The line that `span` begins in, and below it carets under `span`."""
        first = self.text.rfind("\n", 0, span.start) + 1
        last = self.text.find("\n", span.start)
        line = self.text[first : len(self.text) if last < 0 else last].rstrip(_NEWLINES)
        column, width = span.start - first, max(1, span.end - span.start)
        cut = max(0, column - _EXCERPT // 2)
        shown = "".join(c if c.isprintable() else "?" for c in line[cut : cut + _EXCERPT])
        carets = max(1, min(width, len(shown) - (column - cut)))
        return f"    {shown}\n    {' ' * (column - cut)}{'^' * carets}"


class ModelError(ReproduceError):
    """A model that cannot be used. `fix` mends it, where there is one way to."""

    def __init__(self, message: str, fix: Fix | None = None) -> None:
        super().__init__(message)
        self.fix = fix


class ShapeError(ModelError):
    """Two ports that are joined have different shapes."""


class NotOffered(ModelError):
    """A sound model that the engine has no program for."""


def fault(
    source: Source, span: Span, message: str, fix: Fix | None = None, kind: type[ModelError] = ModelError
) -> ModelError:
    """An error of `kind` at a place: line, column, the line itself and a caret."""
    line, column = source.place(span.start)
    text = f"{source.name}, line {line}, column {column}: {message}\n{source.excerpt(span)}"
    return kind(text if fix is None else f"{text}\n--fix does that", fix)
