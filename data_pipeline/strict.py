"""The base of every declared structure: frozen, strict, unknown keys refused."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints

Item = TypeVar("Item")


class Strict(BaseModel):
    """A frozen pydantic model that converts nothing silently and knows every key."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True, strict=True, extra="forbid")


def _list_as_tuple(value: Any) -> Any:
    """Take a list (as YAML and JSON give it) for a tuple; leave anything else, such as a set, to be
    refused."""
    return tuple(value) if isinstance(value, list) else value


Sequence = Annotated[tuple[Item, ...], BeforeValidator(_list_as_tuple)]
"""An immutable sequence whose order counts."""

Hash = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{64}\z")]
"""A 256-bit hash: 64 lower-case hexadecimal digits."""
