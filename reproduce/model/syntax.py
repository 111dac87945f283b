"""What the parser makes of a text: statements and expressions, each with its place."""

from collections.abc import Iterator
from dataclasses import dataclass

from reproduce.model.source import Span


@dataclass(frozen=True)
class Name:
    span: Span
    name: str


@dataclass(frozen=True)
class Literal:
    """A number, a decimal, true, false or a text, as it is written."""

    span: Span
    kind: str  # number, decimal, flag, text
    written: str


@dataclass(frozen=True)
class Chain:
    """`first operator operand operator operand ...`, from the left; the operators are + and -, or *.

    Flat, so that however long it is, no recursion gets deep.
    """

    span: Span
    first: "Expression"
    rest: "tuple[tuple[str, Expression], ...]"


@dataclass(frozen=True)
class Argument:
    """`name=value` or `value`."""

    span: Span
    name: str | None
    value: "Expression"


@dataclass(frozen=True)
class Call:
    """`function(arguments)`. `head` is the place of the function alone."""

    span: Span
    function: "Expression"
    arguments: tuple[Argument, ...]

    @property
    def head(self) -> Span:
        return self.function.span


Expression = Name | Literal | Chain | Call


@dataclass(frozen=True)
class Assignment:
    span: Span
    target: Name
    value: Expression


@dataclass(frozen=True)
class Repeat:
    """`head` is the place of `repeat count`."""

    span: Span
    head: Span
    count: Expression
    body: "tuple[Statement, ...]"


Statement = Assignment | Repeat


@dataclass(frozen=True)
class Model:
    span: Span
    name: Name
    arguments: tuple[Argument, ...]
    body: tuple[Statement, ...]


def names_read(model: Model) -> Iterator[Name]:
    """Every name that is read, as often as it is."""
    for argument in model.arguments:
        yield from _in_expression(argument.value)
    yield from _in_block(model.body)


def _in_block(statements: tuple[Statement, ...]) -> Iterator[Name]:
    for statement in statements:
        if isinstance(statement, Repeat):
            yield from _in_expression(statement.count)
            yield from _in_block(statement.body)
        else:
            yield from _in_expression(statement.value)


def _in_expression(expression: Expression) -> Iterator[Name]:
    match expression:
        case Name():
            yield expression
        case Chain():
            yield from _in_expression(expression.first)
            for _, operand in expression.rest:
                yield from _in_expression(operand)
        case Call():
            yield from _in_expression(expression.function)
            for argument in expression.arguments:
                yield from _in_expression(argument.value)
