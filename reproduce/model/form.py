"""The form: a specification as the section `model` of a configuration file.

`reproduce.configuration` reads it; here it is written, alone or into a file that is there.
"""

from engine.spec import ModelSpec
from reproduce.configuration import check
from reproduce.errors import ConfigurationError
from reproduce.yaml12 import load_yaml
from reproduce.yaml_edit import scalar, set_values

SECTION = "model"


def write_form(spec: ModelSpec) -> str:
    """The section `model`, all its keys in order."""
    lines = [f"  {name}: {scalar(value)}\n" for name, value in spec.model_dump().items()]
    return f"{SECTION}:\n" + "".join(lines)


def put_form(text: str, spec: ModelSpec, what: str) -> str:
    """A configuration file with `spec` as its section `model`; nothing but the changed values is touched.

    Raises ConfigurationError if the file is no usable configuration, before or after.
    """
    before = check(load_yaml(text, what), what).model.model_dump()
    changed = {(SECTION, name): value for name, value in spec.model_dump().items() if before[name] != value}
    written = set_values(text, changed, what)
    if check(load_yaml(written, what), what).model != spec:
        raise ConfigurationError(f"{what}: cannot be changed in place: write the section {SECTION} by hand")
    return written
