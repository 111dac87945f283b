"""The configuration: `params.yaml` with `-S` overrides, checked, and what of it decides bits."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from artifacts.record import MOST_STEPS
from data_pipeline.spec import DataSpec
from engine.errors import SpecError
from engine.spec import ModelSpec, Tier, TrainSpec, check_precision
from reproduce.errors import ConfigurationError
from reproduce.yaml12 import load_yaml

MAX_SEED = 2**53 - 1
"""The largest whole number that canonical JSON holds exactly."""

_MAX_STEPS = 2**31 - 1


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class EvaluationSpec(_Section):
    """When the loss on held-out text is taken while training."""

    every_steps: Annotated[int, Field(ge=0, le=_MAX_STEPS)] = Field(
        description="steps from one evaluation to the next; 0 evaluates only at the end"
    )


class SamplingSpec(_Section):
    """Text samples: when they are drawn while training, and how."""

    every_steps: Annotated[int, Field(ge=0, le=_MAX_STEPS)] = Field(
        description="steps from one sample to the next; 0 samples only at the end"
    )
    prompt: Annotated[str, Field(min_length=1)] = Field(description="text that samples go on from")
    tokens: Annotated[int, Field(ge=1, le=2**20)] = Field(description="tokens drawn per sample")
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = Field(
        description="divides the logits; 0 always takes the likeliest token"
    )
    top_k: Annotated[int, Field(ge=0, le=2**24)] = Field(
        description="likeliest tokens that are drawn from; 0 draws from all"
    )
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = Field(description="key of the draws")


class RunOptions(_Section):
    """What must not change a bit, and so enters no hash."""

    device: Literal["cpu", "cuda"] = Field(description="where to compute: `cpu`, or `cuda` on one GPU")
    threads: Annotated[int, Field(ge=0, le=4096)] = Field(
        description="threads to compute with; 0 takes all cores this process may use"
    )
    recompute: Annotated[int, Field(ge=0, le=4096)] = Field(
        description="blocks computed again in the backward pass, for less memory and more time; as many as there are"
    )
    save_every_steps: Annotated[int, Field(ge=1, le=_MAX_STEPS)] = Field(
        description="steps from one saved bundle to the next"
    )
    store: Annotated[str, Field(min_length=1)] = Field(description="folder of the store, relative to the project")
    progress: Literal["auto", "plain", "none"] = Field(
        description="a display on terminals and lines elsewhere, lines everywhere, or nothing"
    )

    def thread_count(self) -> int:
        """Threads to use on this machine, at least 1."""
        return self.threads or available_cores()


class Configuration(_Section):
    """Everything the user decides."""

    tier: Tier
    data: DataSpec
    model: ModelSpec
    train: TrainSpec
    evaluation: EvaluationSpec
    sampling: SamplingSpec
    run: RunOptions

    @model_validator(mode="after")
    def _precision_belongs_to_prod(self) -> "Configuration":
        try:
            check_precision(self.tier, self.train)
        except SpecError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _exact_in_json(self) -> "Configuration":
        if self.train.seed > MAX_SEED:
            raise ValueError(f"train.seed may be at most {MAX_SEED}, found {self.train.seed}")
        return self

    @model_validator(mode="after")
    def _fits_a_record(self) -> "Configuration":
        if self.train.steps > MOST_STEPS:
            raise ValueError(
                f"train.steps may be at most {MOST_STEPS}, found {self.train.steps}: a record holds the digest of "
                "every step. Make larger steps (train.batch)"
            )
        return self

    @property
    def recomputed_blocks(self) -> int:
        """Blocks of this model to compute again in the backward pass."""
        return min(self.run.recompute, self.model.layers)

    def identity(self) -> dict[str, Any]:
        """The part that decides bits, as JSON: no run options, no choice of memory."""
        whole = self.model_dump(mode="json", exclude={"run", "model"})
        return {**whole, "model": self.model.identity()}


def available_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_configuration(path: Path, overrides: Iterable[str] = ()) -> Configuration:
    """The checked configuration of a YAML file with `key.key=value` overrides; raises ConfigurationError."""
    value = load_yaml(read_text(path), str(path))
    what = str(path)
    for text in overrides:
        apply_override(value, text)
        what += f" with -S {text}" if what == str(path) else f" -S {text}"
    return check(value, what)


def check(value: Any, what: str) -> Configuration:
    """The configuration that `value` spells out. Raises ConfigurationError with every fault in it."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{what}: expected sections ({', '.join(Configuration.model_fields)}), found "
            f"{_show(value)}: copy one of experiments/ (`reproduce use tiny`)"
        )
    try:
        return Configuration.model_validate(value)
    except ValidationError as error:
        faults = "\n".join(f"  {explain(details, value)}" for details in error.errors())
        raise ConfigurationError(f"{what} is not a usable configuration:\n{faults}") from error


def from_identity(identity: Mapping[str, Any], run: RunOptions, what: str) -> Configuration:
    """The configuration whose `identity()` was recorded, with these run options."""
    model = {**identity.get("model", {}), "attention": "tiled"}
    return check({**identity, "model": model, "run": run.model_dump()}, what)


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Lines `path: was ..., is ...` for every place where two JSON values differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        found: list[str] = []
        for key in sorted({*before, *after}):
            found += differences(before.get(key, _ABSENT), after.get(key, _ABSENT), f"{path}.{key}" if path else key)
        return found
    return [] if before == after else [f"{path}: was {_show(before)}, is {_show(after)}"]


class _Absent:
    def __repr__(self) -> str:
        return "not there"


_ABSENT = _Absent()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ConfigurationError."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path}: expected UTF-8, found byte 0x{error.object[error.start]:02x} at offset {error.start}: "
            "save it as UTF-8"
        ) from error
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path}: no such file. `reproduce use tiny` writes params.yaml from experiments/tiny.yaml"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error


def apply_override(value: Any, override: str) -> None:
    """Set one key; what it may be and whether there is such a key is for the check to say."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigurationError(f"-S {override}: expected section.key=value, such as -S train.batch=64")
    place = value
    *folders, last = key.split(".")
    for folder in folders:
        place = _inside(place, folder, override)
    if isinstance(place, list):
        _inside(place, last, override)
        place[int(last)] = load_yaml(text, f"-S {override}")
    elif isinstance(place, dict):
        place[last] = load_yaml(text, f"-S {override}")
    else:
        raise ConfigurationError(f"-S {override}: {'.'.join(folders)} has no keys")


def _inside(place: Any, key: str, override: str) -> Any:
    if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
        return place[int(key)]
    if isinstance(place, dict) and key in place:
        return place[key]
    names = [str(name) for name in place] if isinstance(place, dict) else []
    raise ConfigurationError(f"-S {override}: there is no {key!r} here{_suggest(key, names)}")


def _suggest(key: str, names: Iterable[str]) -> str:
    names = list(names)
    close = difflib.get_close_matches(key, names, 1)
    if close:
        return f": did you mean {close[0]!r}?"
    return f": expected one of {', '.join(names)}" if names else ""


def _within_sections(key: str, whole: Mapping[str, Any]) -> list[str]:
    return [f"{name}.{key}" for name, section in whole.items() if isinstance(section, Mapping) and key in section]


# How pydantic's kinds of fault read; `{...}` are its context.
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text of at least {min_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_short": "a list of at least {min_length}",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "dict_type": "a section with keys",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "union_tag_not_found": "a section with the key kind",
}


# Patterns that have a name.
_PATTERNS = {r"\A[0-9a-f]{64}\z": "64 hexadecimal digits (0-9, a-f)"}


def explain(details: ErrorDetails, whole: Any) -> str:
    """One fault as: path, expected, found, what to do."""
    kind, found = details["type"], details["input"]
    path, siblings = _path(details["loc"], whole)
    if kind == "extra_forbidden":
        key = str(details["loc"][-1])
        places = _within_sections(key, whole) if len(details["loc"]) == 1 else []
        if places:
            return f"{path}: no such key: did you mean {' or '.join(places)}?"
        return f"{path}: no such key{_suggest(key, _known_keys(details['loc'], whole))}"
    if kind == "missing":
        known = _known_keys(details["loc"], whole)
        written = _suggest_written(str(details["loc"][-1]), [key for key in siblings if key not in known])
        return f"{path}: expected a value, found none: add it{written}"
    if kind == "value_error":
        message = str(details["ctx"]["error"]) if "ctx" in details else details["msg"]
        return f"{path}: {message}" if path else message
    if kind == "union_tag_invalid":
        context = details["ctx"]
        return f"{path}.kind: expected one of {context['expected_tags']}, found {context['tag']!r}: correct it"
    template = _EXPECTED.get(kind)
    if template is None:
        return f"{path}: {details['msg']}, found {_show(found)}"
    expected = _PATTERNS.get(details.get("ctx", {}).get("pattern", "")) or template.format(**details.get("ctx", {}))
    return f"{path}: expected {expected}, found {_show(found)}{_remedy(kind, found)}"


def _path(location: tuple[int | str, ...], whole: Any) -> tuple[str, list[str]]:
    """The location as the user writes it, and the keys beside its last part.

    pydantic puts names of alternatives into a location; those are not in the user's text.
    """
    parts: list[str] = []
    place = whole
    siblings: list[str] = []
    for number, part in enumerate(location):
        inside = isinstance(place, list) and isinstance(part, int) and part < len(place)
        if inside or (isinstance(place, Mapping) and part in place):
            place = place[part]
        elif number < len(location) - 1:
            continue
        else:
            siblings = [str(key) for key in place] if isinstance(place, Mapping) else []
        parts.append(str(part))
    return ".".join(parts), siblings


def _known_keys(location: tuple[int | str, ...], whole: Any) -> list[str]:
    """Keys that the section of a key at fault has room for: those of its model."""
    model: Any = Configuration
    for part in location[:-1]:
        model = _child_model(model, part)
        if model is None:
            return []
    return list(model.model_fields)


def _child_model(model: Any, part: int | str) -> Any:
    """The model below `model` at one part of a location; None where there is none to name."""
    if isinstance(part, int):
        return model
    if isinstance(model, tuple):
        return next((m for m in model if _kind(m) == part), None)
    field = model.model_fields.get(part)
    if field is None:
        return model if _kind(model) == part else None
    models = tuple(_models_in(field.annotation)) or tuple(m for item in field.metadata for m in _models_in(item))
    if not models:
        return None
    return models[0] if len(models) == 1 else models


def _kind(model: Any) -> str | None:
    field = model.model_fields.get("kind")
    return None if field is None else field.annotation.__args__[0]


def _models_in(annotation: Any) -> Iterable[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


def _suggest_written(key: str, unknown: list[str]) -> str:
    close = difflib.get_close_matches(key, unknown, 1)
    return f" (is {close[0]!r} a misspelling of it?)" if close else ""


def _remedy(kind: str, found: Any) -> str:
    if kind in ("int_from_float", "int_type") and isinstance(found, float) and found.is_integer():
        return f": write {int(found)}"
    if kind in ("int_type", "float_type") and isinstance(found, str):
        return ": write it as plain digits, without quotes, underscores or units"
    if kind == "bool_type":
        return ": write true or false (in YAML 1.2 on, off, yes and no are text)"
    return ": correct it"


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, Mapping):
        return f"a section with the keys {', '.join(map(str, value))}" if value else "a section without keys"
    if isinstance(value, list | tuple):
        return f"the list {list(value)!r}"
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else repr(value)
