"""The graph of a model: nodes with named ports, and edges with a symbolic shape on each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from reproduce.model.source import Span

Dimension = int | str
"""A number, or B (rows of a batch) or T (tokens in a row, the context)."""

Shape = tuple[Dimension, ...]


def show(shape: Shape) -> str:
    """`[B, T, 256]`."""
    return f"[{', '.join(str(d) for d in shape)}]"


@dataclass(frozen=True)
class Port:
    """One end of an edge: `port` of the node named `node`."""

    node: str
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}"


@dataclass(frozen=True)
class Node:
    """One operation. `title` is how messages call it; `inputs` say which port each comes from.

    group: name of the repeat it is in, or "". values: its own arguments, such as heads, and `places` where they are
    written. parameters: shapes by name.
    """

    name: str
    operation: str
    title: str
    span: Span
    group: str = ""
    inputs: Mapping[str, Port] = field(default_factory=dict)
    outputs: Mapping[str, Shape] = field(default_factory=dict)
    parameters: Mapping[str, Shape] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Span] = field(default_factory=dict)

    def place(self, value: str) -> Span:
        return self.places.get(value, self.span)

    @property
    def parameter_count(self) -> int:
        """Trained numbers in it."""
        return sum(prod(d for d in shape if isinstance(d, int)) for shape in self.parameters.values())


@dataclass(frozen=True)
class Group:
    """A repeat: its nodes are there `count` times. What leaves it at `leaving` enters the next round at `entering`."""

    name: str
    count: int
    entering: Port
    leaving: Port


@dataclass(frozen=True)
class Graph:
    """Nodes by name, in order of computation. `logits` is the result."""

    name: str
    nodes: Mapping[str, Node]
    groups: Mapping[str, Group]
    logits: Port

    def shape(self, port: Port) -> Shape:
        return self.nodes[port.node].outputs[port.port]

    @property
    def parameter_count(self) -> int:
        """Trained numbers in the whole model."""
        rounds = {"": 1, **{name: group.count for name, group in self.groups.items()}}
        return sum(node.parameter_count * rounds[node.group] for node in self.nodes.values())

    def to_json(self) -> dict[str, Any]:
        """The graph as data: the same for models of the same specification, but for names."""
        return {
            "edges": [
                {"from": str(port), "shape": list(self.shape(port)), "to": f"{node.name}.{role}"}
                for node in self.nodes.values()
                for role, port in node.inputs.items()
            ],
            "logits": str(self.logits),
            "name": self.name,
            "nodes": [
                {
                    "group": node.group or None,
                    "inputs": {role: list(self.shape(port)) for role, port in node.inputs.items()},
                    "name": node.name,
                    "operation": node.operation,
                    "outputs": {role: list(shape) for role, shape in node.outputs.items()},
                    "parameters": {name: list(shape) for name, shape in node.parameters.items()},
                    "title": node.title,
                    "values": dict(node.values),
                }
                for node in self.nodes.values()
            ],
            "repeats": [
                {
                    "count": group.count,
                    "entering": str(group.entering),
                    "leaving": str(group.leaving),
                    "name": group.name,
                }
                for group in self.groups.values()
            ],
        }
