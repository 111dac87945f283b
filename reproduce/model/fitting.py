"""From the graph to the model's specification: which of the engine's models it is, or why it is none of them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from engine.spec import ModelSpec
from reproduce.model.arguments import Given
from reproduce.model.graph import Graph, Node, Port
from reproduce.model.source import ModelError, NotOffered, Source, Span, fault

OFFER = (
    "The engine has pre-norm GPTs: x = token_embed(vocab, d)(tokens) + learned_pos(context, d), with or without "
    "dropout(...) around it; one repeat of x = x + attention(norm(x), ...) and x = x + mlp(norm(x), ...); "
    "logits = head(norm(x), ...)"
)
_T = TypeVar("_T")


def fit(source: Source, graph: Graph, header: Mapping[str, Given], name: Span) -> ModelSpec:
    """The specification whose graph this is. Raises NotOffered, saying where it leaves what the engine has."""
    return _Fitting(source, graph, header, name).spec()


class _Fitting:
    def __init__(self, source: Source, graph: Graph, header: Mapping[str, Given], name: Span) -> None:
        self.source = source
        self.graph = graph
        self.header = header
        self.name = name

    def spec(self) -> ModelSpec:
        head = self.expect(self.graph.logits, "head", "the logits to come out of head", self.name)
        last_norm = self.expect(head.inputs["x"], "norm", "head(norm(x), ...)", head.span)
        carry, mlp_sum = self.stack(last_norm)
        middle, mlp_out = self.branch(mlp_sum, "mlp", carry)
        first, attention_out = self.branch(self.node(middle), "attention", carry)
        if first != Port(carry.name, "y"):
            raise self.refuse(self.node(first).span, "one attention and one mlp in each round", self.node(first))
        attention = self.node(attention_out.inputs["x"])
        qkv = self.node(attention.inputs["qkv"])
        activation = self.node(mlp_out.inputs["x"])
        up = self.node(activation.inputs["x"])
        norm1 = self.expect(qkv.inputs["x"], "norm", "attention(norm(x), ...)", attention.span)
        norm2 = self.expect(up.inputs["x"], "norm", "mlp(norm(x), ...)", up.span)
        self.same_source(norm1, first)
        self.same_source(norm2, middle)
        table, embed_dropout = self.embedding(carry)
        if not attention.values["causal"]:
            raise self.not_offered(
                attention.place("causal"),
                "expected causal=true, found false: the engine's models predict the next token, so a token may not see "
                "later ones",
            )
        dropped = [attention, mlp_out, *embed_dropout]
        fields: dict[str, Any] = {
            "vocab": self.header["vocab"].number,
            "context": self.header["context"].number,
            "d_model": table.parameters["table"][1],
            "heads": attention.values["heads"],
            "layers": self.graph.groups["block"].count,
            "hidden": up.outputs["y"][-1],
            "activation": activation.values["activation"],
            "dropout": self.uniform("dropout", dropped, "one rate of dropout in the whole model"),
            "linear_bias": self.uniform("bias", [qkv, up], "all linear layers with a bias or none"),
            "norm_parameters": self.uniform(
                "parameters", [norm1, norm2, last_norm], "all norms with parameters or none"
            ),
            "tied": head.values["tied"],
            "init_std": self.header["init_std"].rate,
            "attention": attention.values["memory"],
        }
        return self.validated(fields)

    def validated(self, fields: Mapping[str, Any]) -> ModelSpec:
        try:
            return ModelSpec(**fields)
        except ValidationError as error:
            details = error.errors()[0]
            where = str(details["loc"][0]) if details["loc"] else ""
            span = self.header[where].span if where in self.header else self.name
            if details["type"] == "value_error":
                raise fault(self.source, span, str(details["ctx"]["error"])) from None
            most = details["ctx"].get("le")
            expected = details["msg"].removeprefix("Input should be ") if most is None else f"at most {most}"
            message = f"{where}: expected {expected}, found {details['input']!r}: correct it"
            raise fault(self.source, span, message) from None

    # --- the parts ---

    def stack(self, last_norm: Node) -> tuple[Node, Node]:
        """The node that carries x into a round, and the one that x leaves it by."""
        group = self.graph.groups.get("block")
        if group is None:
            raise self.not_offered(last_norm.span, "expected blocks in a repeat before this norm, found no repeat")
        if last_norm.inputs["x"] != group.leaving:
            raise self.refuse(
                last_norm.span, "the last norm to take what leaves the repeat", self.node(last_norm.inputs["x"])
            )
        return self.node(group.entering), self.expect(group.leaving, "sum", "a round to end with x = x + mlp(...)")

    def branch(self, sum_: Node, kind: str, carry: Node) -> tuple[Port, Node]:
        """Of a residual sum, the port of the stream and the out projection of the branch."""
        if sum_.operation != "sum":
            raise self.refuse(sum_.span, f"x = x + {kind}(norm(x), ...)", sum_)
        for stream, branch in (("x", "branch"), ("branch", "x")):
            out = self.node(sum_.inputs[branch])
            if out.operation == "linear" and _is_part(out, kind):
                return sum_.inputs[stream], out
        found = self.node(sum_.inputs["branch"])
        raise self.refuse(found.span, f"x = x + {kind}(norm(x), ...)", found)

    def embedding(self, carry: Node) -> tuple[Node, list[Node]]:
        """The token embedding, and the dropout after the embeddings, if it is written."""
        start = self.node(carry.inputs["first"])
        dropouts = [start] if start.operation == "dropout" else []
        if dropouts:
            start = self.node(start.inputs["x"])
        what = "the repeat to begin with token_embed(vocab, d)(tokens) + learned_pos(context, d)"
        if start.operation != "sum":
            raise self.refuse(start.span, what, start)
        parts = {node.operation: node for node in (self.node(port) for port in start.inputs.values())}
        if set(parts) != {"token_embed", "learned_pos"}:
            wrong = next((n for n in parts.values() if n.operation not in ("token_embed", "learned_pos")), start)
            raise self.refuse(wrong.span, what, wrong)
        return parts["token_embed"], dropouts

    def same_source(self, norm: Node, stream: Port) -> None:
        if norm.inputs["x"] != stream:
            raise self.refuse(
                norm.span,
                "the norm of a branch to take what the residual sum adds the branch to",
                self.node(norm.inputs["x"]),
            )

    # --- tools ---

    def node(self, port: Port) -> Node:
        return self.graph.nodes[port.node]

    def expect(self, port: Port, operation: str, what: str, span: Span | None = None) -> Node:
        node = self.node(port)
        if node.operation != operation:
            raise self.refuse(span or node.span, what, node)
        return node

    def refuse(self, span: Span, expected: str, found: Node) -> ModelError:
        return self.not_offered(span, f"expected {expected}, found {found.title} ({found.name})")

    def not_offered(self, span: Span, message: str) -> ModelError:
        return fault(self.source, span, f"{message}. {OFFER}", kind=NotOffered)

    def uniform(self, value: str, nodes: Sequence[Node], what: str) -> Any:
        """The value that all `nodes` have."""
        first = nodes[0]
        for node in nodes[1:]:
            if node.values[value] != first.values[value]:
                raise fault(
                    self.source,
                    node.place(value),
                    f"expected {what}, found {_show(first.values[value])} for {first.title} ({first.name}) and "
                    f"{_show(node.values[value])} for {node.title} ({node.name}): write the same for both",
                    kind=NotOffered,
                )
        return first.values[value]


def _is_part(node: Node, kind: str) -> bool:
    """Whether a node is the out projection of attention or mlp."""
    parts = node.name.split(".")
    return parts[-1] == "out" and parts[-2].rstrip("0123456789") == kind


def _show(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
