"""The form: a specification as the section `model` of a configuration file.

`reproduce.configuration` reads it; here it is written, alone or into a file that is there.
"""

from engine.spec import ModelSpec
from reproduce.configuration import check
from reproduce.configuration_file import rewrite
from reproduce.yaml12 import load_yaml
from reproduce.yaml_edit import scalar

SECTION = "model"


def write_form(spec: ModelSpec) -> str:
    """The section `model`, all its keys in order."""
    lines = [f"  {name}: {scalar(value)}\n" for name, value in spec.model_dump().items()]
    return f"{SECTION}:\n" + "".join(lines)


def put_form(text: str, spec: ModelSpec, what: str) -> str:
    """A configuration file with `spec` as its section `model`; nothing but the changed values is touched.

    Raises ConfigurationError if the file is no usable configuration, before or after.
    """
    before = check(load_yaml(text, what), what)
    return rewrite(text, before.model_copy(update={SECTION: spec}), what)
