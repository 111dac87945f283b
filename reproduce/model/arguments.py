"""What operations may be given, and how what is written is matched with it."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reproduce.model.source import ModelError, Source, Span, fault
from reproduce.model.syntax import Argument
from reproduce.model.values import Decimal, Flag, Number, Operation, Tensor, Text, Value, describe

Kind = Literal["size", "rate", "spread", "flag", "text", "tensor", "table"]

_KINDS: Mapping[Kind, str] = {
    "size": "a whole number of at least 1",
    "rate": "a rate of at least 0 and less than 1",
    "spread": "a decimal above 0",
    "flag": "true or false",
    "text": "a text in double quotes",
    "tensor": "something computed",
    "table": "token_embed or false",
}


@dataclass(frozen=True)
class Parameter:
    """`default` is what it is where it is not written; None if it has to be, or is derived."""

    name: str
    kind: Kind
    default: Value | None = None
    needed: bool = True
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Given:
    """The value of a parameter, and where it is written; for a default, the place of the call."""

    value: Value
    span: Span
    is_written: bool

    @property
    def number(self) -> int:
        assert isinstance(self.value, Number)
        return self.value.value

    @property
    def rate(self) -> float:
        assert isinstance(self.value, Number | Decimal)
        return float(self.value.value)

    @property
    def flag(self) -> bool:
        assert isinstance(self.value, Flag)
        return self.value.value

    @property
    def text(self) -> str:
        assert isinstance(self.value, Text)
        return self.value.value

    @property
    def tensor(self) -> Tensor:
        assert isinstance(self.value, Tensor)
        return self.value


def bind(
    source: Source,
    what: str,
    place: Span,
    parameters: Sequence[Parameter],
    written: Sequence[tuple[Argument, Value]],
) -> dict[str, Given]:
    """The parameters of `what`, by name. Raises ModelError where they are not what it takes."""
    by_name = {parameter.name: parameter for parameter in parameters}
    given: dict[str, Given] = {}
    for position, (argument, value) in enumerate(written):
        if argument.name is None and any(a.name is not None for a, _ in written[:position]):
            raise fault(source, argument.span, "expected a name before this value, as before the one to its left")
        if argument.name is None and position >= len(parameters):
            raise fault(source, argument.span, f"{what} takes at most {len(parameters)} values: {_list(parameters)}")
        name = parameters[position].name if argument.name is None else argument.name
        if name not in by_name:
            close = difflib.get_close_matches(name[:40], by_name, 1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {_list(parameters)}"
            raise fault(source, argument.span, f"{what} has no {_short(name)}: {hint}")
        if name in given:
            raise fault(source, argument.span, f"{name} is given for the second time: remove one of the two")
        if problem := _problem(by_name[name], value):
            raise fault(source, argument.value.span, f"{name}: expected {problem}, found {describe(value)}")
        given[name] = Given(value, argument.value.span, True)
    for parameter in parameters:
        if parameter.name in given:
            continue
        if parameter.default is not None:
            given[parameter.name] = Given(parameter.default, place, False)
        elif parameter.needed:
            raise missing(source, place, what, parameter)
    return given


def missing(source: Source, place: Span, what: str, parameter: Parameter) -> ModelError:
    return fault(source, place, f"{what} needs {parameter.name}, {_KINDS[parameter.kind]}: write {parameter.name}=...")


def _problem(parameter: Parameter, value: Value) -> str | None:
    """What would have been expected, if `value` is not it."""
    expected = _KINDS[parameter.kind]
    match parameter.kind, value:
        case "size", Number(number):
            return None if number >= 1 else expected
        case "rate", Number(0):
            return None
        case "rate", Decimal(decimal):
            return None if 0.0 <= decimal < 1.0 else expected
        case "spread", Number(number) | Decimal(number):
            return None if 0.0 < number < float("inf") else expected
        case ("flag", Flag()) | ("tensor", Tensor()):
            return None
        case "text", Text(text):
            choices = [f'"{choice}"' for choice in parameter.choices]
            return None if text in parameter.choices else " or ".join(choices)
        case "table", Operation("token_embed") | Flag(False):
            return None
        case _:
            return expected


def _list(parameters: Sequence[Parameter]) -> str:
    return ", ".join(parameter.name for parameter in parameters)


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:40]}..."
