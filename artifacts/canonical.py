"""Canonical JSON (RFC 8785): one value, one byte string, on every machine.

`loads` takes only what `dumps` writes. As RFC 8785 has it, numbers are IEEE-754 doubles: `1.0` is
written `1` and is read back as the integer 1, `-0.0` is written `0`. Integers beyond 2^53 - 1 are
refused; write them as text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

import rfc8785

from artifacts.errors import Corrupt, InvalidInput

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

MAX_BYTES = 8 * 2**20
"""Largest canonical document, in bytes; room for the manifest of a state of 500 GB."""

MAX_DEPTH = 32
"""Deepest nesting of arrays and objects."""

_MAX_EXACT = 2**53 - 1
# The longest integer form that RFC 8785 writes for a double: a sign and 21 digits.
_MAX_INTEGER_CHARACTERS = 22


def dumps(value: JSON) -> bytes:
    """The canonical bytes of `value`. Raises InvalidInput for what JSON cannot hold exactly."""
    try:
        data = rfc8785.dumps(_plain(value, MAX_DEPTH))
    except ValueError as error:  # covers CanonicalizationError and lone surrogates in keys
        raise InvalidInput(f"not representable in canonical JSON: {error}") from error
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"canonical JSON of {len(data)} bytes: at most {MAX_BYTES} are allowed")
    return data


def loads(data: bytes, what: str = "document") -> JSON:
    """The value whose canonical bytes are `data`. Raises Corrupt, naming `what`, for any other
    bytes."""
    if len(data) > MAX_BYTES:
        raise Corrupt(f"{what}: {len(data)} bytes of JSON, at most {MAX_BYTES} are allowed")
    try:
        value: JSON = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_constant=_refuse_constant,
        )
        again = dumps(value)
    except RecursionError as error:
        raise Corrupt(f"{what}: JSON nested deeper than {MAX_DEPTH}") from error
    except (ValueError, InvalidInput) as error:  # JSON and UTF-8 errors are ValueErrors
        raise Corrupt(f"{what}: not canonical JSON: {error}") from error
    if again != data:
        raise Corrupt(f"{what}: JSON is valid but not in canonical form (RFC 8785)")
    return value


def _plain(value: JSON, depth: int) -> JSON:
    """`value` with every mapping a dict and every sequence a list, no deeper than `depth`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth == 0:
        raise InvalidInput(f"JSON nested deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidInput(f"JSON object key {key!r} is not text")
        return {key: _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth - 1) for item in value]
    raise InvalidInput(f"{type(value).__name__} has no canonical JSON form")


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object holds the same key twice")
    return result


def _integer(text: str) -> int | float:
    # RFC 8785 writes doubles up to 1e21 without an exponent; those beyond 2^53 - 1 are doubles, not
    # integers.
    if len(text) > _MAX_INTEGER_CHARACTERS:
        raise ValueError("an integer of more than 21 digits")
    number = int(text)
    return number if abs(number) <= _MAX_EXACT else float(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
