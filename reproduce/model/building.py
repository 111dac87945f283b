"""The graph while it grows, and how shapes that do not fit are told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reproduce.model.graph import Dimension, Group, Node, Port, Shape, show
from reproduce.model.source import Fix, ModelError, ShapeError, Source, Span, fault
from reproduce.model.values import Setting, Tensor


@dataclass
class Builder:
    """Nodes and groups so far; `group` is the repeat that new nodes are in."""

    source: Source
    vocab: int
    context: int
    nodes: dict[str, Node] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    group: str = ""

    def name(self, wanted: str) -> str:
        """`wanted` in the present group, with a number if there is such a node, or part of one, already."""
        stem = f"{self.group}.{wanted}" if self.group else wanted
        taken = {part for name in self.nodes for part in _prefixes(name)}
        number = 1
        while (name := stem if number == 1 else f"{stem}{number}") in taken:
            number += 1
        return name

    def add(
        self,
        name: str,
        operation: str,
        title: str,
        span: Span,
        inputs: Mapping[str, Tensor],
        shape: Shape,
        parameters: Mapping[str, Shape] | None = None,
        values: Mapping[str, Any] | None = None,
        places: Mapping[str, Span] | None = None,
    ) -> Tensor:
        """A node with the one output y, of that shape; returns it with its width as the first input has it written."""
        self.nodes[name] = Node(
            name=name,
            operation=operation,
            title=title,
            span=span,
            group=self.group,
            inputs={role: tensor.port for role, tensor in inputs.items()},
            outputs={"y": shape},
            parameters=parameters or {},
            values=values or {},
            places=places or {},
        )
        first = next(iter(inputs.values()), None)
        written = first.written if first is not None and first.shape == shape else {}
        return Tensor(Port(name, "y"), shape, title, written)

    def width(self, x: Tensor, taker: str, port: str, span: Span) -> int:
        """The width of a stream [B, T, width]; ShapeError for anything else."""
        if len(x.shape) == 3 and isinstance(x.shape[-1], int) and x.shape[0] == "B":
            return x.shape[-1]
        raise self.mismatch(span, x, f"{taker} ({port})", ("B", "T", "width"))

    def mismatch(
        self,
        span: Span,
        giver: Tensor,
        taker: str,
        expects: Shape,
        fix: Fix | None = None,
        advice: str = "give it the embedded tokens or what was computed from them",
    ) -> ModelError:
        """A ShapeError that names both ports, both shapes and what to do."""
        return fault(
            self.source,
            span if fix is None else fix.span,
            f"{giver.title} ({giver.port}) gives {show(giver.shape)}, {taker} expects {show(expects)}: "
            f"{advice if fix is None else fix.says}",
            fix,
            ShapeError,
        )


def setting_fix(setting: Setting, wanted: Dimension, written: str | None) -> Fix:
    """Give the argument `setting` the length `wanted`, as it is `written` elsewhere."""
    replacement = written or str(wanted)
    return Fix(setting.span, replacement, f"set {setting.name} = {replacement}")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]
