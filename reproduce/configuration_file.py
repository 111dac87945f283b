"""Writing a configuration into a YAML file that says something else."""

from collections.abc import Mapping
from typing import Any

from reproduce.configuration import Configuration, check
from reproduce.errors import ConfigurationError
from reproduce.yaml12 import load_yaml
from reproduce.yaml_edit import Path, set_values


def rewrite(text: str, wanted: Configuration, what: str) -> str:
    """`text` with those values changed that make it say `wanted`; every other character stays as it is.

    Raises ConfigurationError if `text` is no usable configuration, or differs in more than single values.
    """
    before = check(load_yaml(text, what), what)
    changed = _scalars_that_differ(before.model_dump(mode="json"), wanted.model_dump(mode="json"), ())
    written = set_values(text, changed, what)
    if check(load_yaml(written, what), what) != wanted:
        raise ConfigurationError(f"{what}: expected to change single values in it, more differs: edit it by hand")
    return written


def _scalars_that_differ(before: Any, wanted: Any, path: Path) -> dict[Path, bool | int | float | str]:
    if isinstance(before, Mapping) and isinstance(wanted, Mapping):
        found: dict[Path, bool | int | float | str] = {}
        for key in wanted:
            found |= _scalars_that_differ(before.get(key), wanted[key], (*path, key))
        return found
    if before == wanted or not isinstance(wanted, bool | int | float | str):
        return {}
    return {path: wanted}
