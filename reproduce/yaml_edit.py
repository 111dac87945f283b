"""Changing single values in a YAML file: every other character, comments too, stays as it is."""

from collections.abc import Mapping

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from reproduce.errors import ConfigurationError
from reproduce.yaml12 import load_yaml

Path = tuple[str, ...]
"""Keys, from the outermost."""


def set_values(text: str, values: Mapping[Path, bool | int | float | str], what: str) -> str:
    """`text` with the scalars at these paths replaced; a key that a block mapping lacks is put before its others.

    Raises ConfigurationError where there is no such scalar.
    """
    load_yaml(text, what)
    root = YAML(typ="rt", pure=True).compose(text)
    pieces = []
    for path, value in values.items():
        node = _find(root, path)
        around = _find(root, path[:-1])
        if node is None and isinstance(around, MappingNode) and not around.flow_style:
            start, indent = around.start_mark.index, " " * around.start_mark.column
            pieces.append((start, start, f"{path[-1]}: {scalar(value)}\n{indent}"))
            continue
        if not isinstance(node, ScalarNode):
            raise ConfigurationError(f"{what}: expected a value at {'.'.join(path)}, found none: write it by hand")
        pieces.append((node.start_mark.index, node.end_mark.index, scalar(value)))
    for start, end, written in sorted(pieces, reverse=True):
        text = text[:start] + written + text[end:]
    return text


def scalar(value: bool | int | float | str) -> str:
    """As YAML 1.2 reads it back. Texts are those of the specification: plain words."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def _find(node: Node | None, path: Path) -> Node | None:
    for key in path:
        if not isinstance(node, MappingNode):
            return None
        node = next((value for name, value in node.value if name.value == key), None)
    return node
