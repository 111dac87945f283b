"""What expressions stand for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reproduce.model.graph import Port, Shape
from reproduce.model.source import Span

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Number:
    value: int


@dataclass(frozen=True)
class Decimal:
    value: float


@dataclass(frozen=True)
class Flag:
    value: bool


@dataclass(frozen=True)
class Text:
    value: str


@dataclass(frozen=True)
class Setting:
    """Where the length of an axis is written: the argument `name` at `span`."""

    name: str
    span: Span


@dataclass(frozen=True)
class Tensor:
    """What comes out of a port. Axes count from the end: -1 is the last.

    written: axis -> how its length reads in the source. settings: axis -> the argument that decides it.
    """

    port: Port
    shape: Shape
    title: str
    written: Mapping[int, str] = field(default_factory=dict)
    settings: Mapping[int, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """An operation by its name alone, not applied to anything."""

    name: str


@dataclass(frozen=True)
class Table:
    """`token_embed(rows, width)`: what is yet to be applied to tokens."""

    rows: int
    width: int
    written: str
    row_setting: Setting
    width_setting: Setting


Value = Number | Decimal | Flag | Text | Tensor | Operation | Table


def describe(value: Value) -> str:
    """A value in words."""
    match value:
        case Number(number):
            return f"the number {number}"
        case Decimal(decimal):
            return f"the decimal {decimal!r}"
        case Flag(flag):
            return "true" if flag else "false"
        case Text(text):
            return f'the text "{text[:40]}"'
        case Tensor():
            return value.title
        case Operation(name):
            return f"the operation {name}"
        case Table():
            return "token_embed(...) that is not applied to tokens"
