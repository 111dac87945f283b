"""Canonical JSON (RFC 8785): one value, one sequence of bytes."""

import json
from pathlib import Path
from typing import Any, TypeVar

import rfc8785
from pydantic import ValidationError

from data_pipeline.errors import CorruptDataError
from data_pipeline.strict import Strict

Model = TypeVar("Model", bound=Strict)


def encode(value: Strict) -> bytes:
    """The canonical bytes of a model."""
    return rfc8785.dumps(value.model_dump(mode="json"))


def canonicalise(json_text: str) -> bytes:
    """The canonical bytes of the value that a JSON text holds."""
    value: Any = json.loads(json_text)
    return rfc8785.dumps(value)


def decode(model: type[Model], data: bytes, path: Path) -> Model:
    """The model that canonical bytes stand for.

    Raises CorruptDataError, naming `path`, where the bytes are not canonical JSON or not such a
    model: two files that mean the same must be the same bytes, or a hash over them would mean
    nothing.
    """
    try:
        value = model.model_validate_json(data)
    except ValidationError as error:
        raise CorruptDataError(f"{path}: not a valid {model.__name__}: {error}") from error
    if encode(value) != data:
        raise CorruptDataError(f"{path}: expected canonical JSON (RFC 8785), found other bytes of the same meaning")
    return value
