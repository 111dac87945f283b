"""YAML 1.2 as its core schema has it, and nothing more.

`1e-5` is a number; `on`, `no` and `1_000` are text; a key that stands twice, an alias to itself, a tag or a merge key
is an error. (ruamel.yaml alone takes `1_000` for 1000 and `017` for 15.)
"""

import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.resolver import VersionedResolver

from reproduce.errors import ConfigurationError

_NUMBER_STARTS = "-+0123456789."

# Which plain scalars are not text: tag, pattern, first characters ("" for the empty scalar). YAML 1.2.2, section
# 10.3.2, but whole numbers have no leading zeros.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", [*_NUMBER_STARTS]),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        [*_NUMBER_STARTS],
    ),
)


class _Resolver(VersionedResolver):
    """ruamel's resolver with the table above for every document."""

    @property
    def versioned_resolver(self) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
        table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
        for name, pattern, starts in _SCALARS:
            for start in starts:
                entry = (f"tag:yaml.org,2002:{name}", re.compile(rf"(?:{pattern})\Z"))
                table.setdefault(start, []).append(entry)
        return table

    @property
    def processing_version(self) -> tuple[int, int]:
        return (1, 2)


def load_yaml(text: str, what: str) -> Any:
    """The value of one YAML document. Raises ConfigurationError, naming `what`, line and column."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Resolver
    yaml.allow_duplicate_keys = False
    try:
        return yaml.load(text)
    except DuplicateKeyError as error:
        raise ConfigurationError(f"{what}{_place(error)}: {_duplicate(error)}") from error
    except MarkedYAMLError as error:
        raise ConfigurationError(
            f"{what}{_place(error)}: expected YAML 1.2, found: {error.problem or error.context}"
        ) from error
    except (YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"{what}: expected YAML 1.2, found: {first}") from error


def _place(error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def _duplicate(error: DuplicateKeyError) -> str:
    found = re.search(r'duplicate key "(.*?)"', str(error))
    key = found.group(1) if found else "a key"
    return f"the key {key!r} stands here for the second time: remove one of the two"
