"""From syntax to the graph: names and numbers are worked out, and every edge gets its shape."""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from reproduce.model.arguments import Given, bind
from reproduce.model.building import Builder, setting_fix
from reproduce.model.graph import Graph, Group, Node, Port, Shape
from reproduce.model.operations import HEADER, OPERATIONS, Applied, apply_table
from reproduce.model.source import Fix, ModelError, NotOffered, Source, Span, fault
from reproduce.model.syntax import (
    Argument,
    Assignment,
    Call,
    Chain,
    Expression,
    Literal,
    Model,
    Name,
    Repeat,
    Statement,
    names_read,
)
from reproduce.model.values import (
    LARGEST,
    Decimal,
    Flag,
    Number,
    Operation,
    Table,
    Tensor,
    Text,
    Value,
    describe,
)

RESULT = "logits"
_DIGITS = 40  # as many are looked at; more are too many anyway


def elaborate(source: Source, model: Model) -> tuple[Graph, dict[str, Given]]:
    """The graph of a model, and what its first line gives. Raises ModelError, ShapeError or NotOffered."""
    return _Elaboration(source, model).run()


class _Elaboration:
    def __init__(self, source: Source, model: Model) -> None:
        self.source = source
        self.model = model
        self.names: dict[str, Value] = {}
        self.reads = Counter(name.name for name in names_read(model))
        self.own_literals: dict[str, Span] = {}
        written = [(argument, self.value(argument.value)) for argument in model.arguments]
        for argument in model.arguments:
            if argument.name is None:
                raise fault(source, argument.span, "expected a name before this value: context=..., vocab=...")
        self.header = bind(source, "the model", model.name.span, HEADER, written)
        context, vocab = self.header["context"].number, self.header["vocab"].number
        self.builder = Builder(source, vocab, context)
        self.names = {"context": Number(context), "vocab": Number(vocab)}

    def run(self) -> tuple[Graph, dict[str, Given]]:
        nodes = self.builder.nodes
        nodes["tokens"] = Node(
            name="tokens",
            operation="tokens",
            title="tokens",
            span=self.model.name.span,
            outputs={"y": ("B", "T")},
            values={"vocab": self.builder.vocab},
        )
        self.names["tokens"] = Tensor(Port("tokens", "y"), ("B", "T"), "tokens")
        self.block(self.model.body)
        logits = self.names.get(RESULT)
        if not isinstance(logits, Tensor):
            raise fault(
                self.source,
                self.model.name.span,
                f"expected the model to say what its {RESULT} are, found none: "
                f"end it with {RESULT} = head(norm(x), ...)",
            )
        self._check_logits(logits)
        graph = Graph(self.model.name.name, nodes, self.builder.groups, logits.port)
        self._check_used(graph)
        return graph, self.header

    def _check_logits(self, logits: Tensor) -> None:
        expects: Shape = ("B", "T", self.builder.vocab)
        if logits.shape == expects:
            return
        setting = logits.settings.get(-1)
        fix = None if setting is None else setting_fix(setting, self.builder.vocab, "vocab")
        place = self.builder.nodes[logits.port.node].span
        raise self.builder.mismatch(
            place, logits, "the loss (loss.logits)", expects, fix, "end the model with a head over the vocabulary"
        )

    def _check_used(self, graph: Graph) -> None:
        used: set[str] = set()
        waiting = [graph.logits.node, *(group.leaving.node for group in graph.groups.values())]
        while waiting:
            name = waiting.pop()
            if name not in used:
                used.add(name)
                waiting += [port.node for port in graph.nodes[name].inputs.values()]
        for node in graph.nodes.values():
            if node.name not in used:
                raise fault(
                    self.source,
                    node.span,
                    f"{node.title} ({node.name}) is computed and never used: remove it or use it",
                )

    # --- statements ---

    def block(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            if isinstance(statement, Repeat):
                self.repeat(statement)
            else:
                self.assign(statement)

    def assign(self, statement: Assignment) -> None:
        name = statement.target.name
        value = self.value(statement.value)
        before = self.names.get(name)
        if name in OPERATIONS:
            raise fault(self.source, statement.target.span, f"{_short(name)} is an operation: use another name")
        if before is not None and not (isinstance(before, Tensor) and isinstance(value, Tensor) and name != "tokens"):
            raise fault(
                self.source,
                statement.target.span,
                f"{_short(name)} is {describe(before)} already: use another name",
            )
        if isinstance(value, Operation):
            raise fault(
                self.source,
                statement.value.span,
                f"expected a value, found {describe(value)}: call it, {value.name}(...)",
            )
        if isinstance(value, Number) and isinstance(statement.value, Literal) and self.reads[name] == 1:
            self.own_literals[name] = statement.value.span
        self.names[name] = value

    def repeat(self, statement: Repeat) -> None:
        builder = self.builder
        count = self.value(statement.count)
        if not isinstance(count, Number) or count.value < 1:
            raise fault(
                self.source,
                statement.count.span,
                f"expected how often to repeat, a whole number of at least 1, found {describe(count)}",
            )
        if builder.group:
            raise self.not_offered(
                statement.head, "a repeat within a repeat: the engine has one stack of equal blocks, write one repeat"
            )
        if builder.groups:
            raise self.not_offered(
                statement.head, "a second repeat: the engine has one stack of equal blocks, write one repeat"
            )
        outer = dict(self.names)
        carried = self._carried(statement)
        entering = outer[carried]
        assert isinstance(entering, Tensor)
        builder.group = "block"
        inside = builder.add(
            f"block.{carried}",
            "carry",
            f"{carried} in the repeat",
            statement.head,
            {"first": entering},
            entering.shape,
        )
        self.names[carried] = inside
        self.block(statement.body)
        leaving = self.names[carried]
        assert isinstance(leaving, Tensor)
        builder.group = ""
        if leaving.shape != inside.shape:
            raise self._round_fault(statement, leaving, inside)
        builder.groups["block"] = Group("block", count.value, inside.port, leaving.port)
        self.names = {**outer, carried: replace(leaving, written=inside.written, settings={})}

    def _carried(self, statement: Repeat) -> str:
        """The one tensor from outside that the body computes anew."""
        assigned = [s.target.name for s in statement.body if isinstance(s, Assignment)]
        carried = [
            name for name in dict.fromkeys(assigned) if isinstance(self.names.get(name), Tensor) and name != "tokens"
        ]
        if len(carried) == 1:
            return carried[0]
        if any(isinstance(s, Repeat) for s in statement.body):
            raise self.not_offered(
                statement.head, "a repeat within a repeat: the engine has one stack of equal blocks, write one repeat"
            )
        found = ", ".join(_short(name) for name in carried[:5]) or "none"
        raise fault(
            self.source,
            statement.head,
            "expected one thing computed before the repeat to be computed anew in it, as x in "
            f"x = x + mlp(norm(x), ...), found {found}",
        )

    def _round_fault(self, statement: Repeat, leaving: Tensor, inside: Tensor) -> ModelError:
        setting = leaving.settings.get(-1)
        width = inside.shape[-1]
        fix = None if setting is None else setting_fix(setting, width, inside.written.get(-1))
        return self.builder.mismatch(
            statement.head,
            leaving,
            f"the next round of the repeat ({inside.port.node}.first)",
            inside.shape,
            fix,
            "keep the shape from round to round",
        )

    def not_offered(self, span: Span, what: str) -> ModelError:
        return fault(self.source, span, what, kind=NotOffered)

    # --- expressions ---

    def value(self, expression: Expression) -> Value:
        match expression:
            case Name():
                return self.lookup(expression)
            case Literal():
                return self.literal(expression)
            case Chain():
                total = self.value(expression.first)
                for operator, operand in expression.rest:
                    total = self.combine(total, operator, self.value(operand), expression.first, operand)
                return total
            case Call():
                return self.call(expression)

    def lookup(self, name: Name) -> Value:
        if name.name in self.names:
            return self.names[name.name]
        if name.name in OPERATIONS:
            return Operation(name.name)
        known = [*self.names, *OPERATIONS, "true", "false"]
        close = difflib.get_close_matches(name.name[:40], known, 1)
        close = [word for word in known if word == name.name.lower()] or close
        hint = f"did you mean {close[0]}?" if close else "give it a value before this line"
        raise fault(self.source, name.span, f"there is no {_short(name.name)} here: {hint}")

    def literal(self, literal: Literal) -> Value:
        written = literal.written
        match literal.kind:
            case "number":
                digits = written.lstrip("0") or "0"
                return self.bounded(literal.span, int(digits[:_DIGITS]))
            case "decimal":
                return Decimal(float(written))
            case "flag":
                return Flag(written == "true")
            case _:
                return Text(written[1:-1])

    def bounded(self, span: Span, number: int) -> Number:
        if abs(number) > LARGEST:
            raise fault(
                self.source, span, f"expected a number of at most {LARGEST}, found a larger one: make it smaller"
            )
        return Number(number)

    def combine(
        self, left: Value, operator: str, right: Value, left_place: Expression, right_place: Expression
    ) -> Value:
        span = Span(left_place.span.start, right_place.span.end)
        match left, operator, right:
            case Number(a), "+", Number(b):
                return self.bounded(span, a + b)
            case Number(a), "-", Number(b):
                return self.bounded(span, a - b)
            case Number(a), "*", Number(b):
                return self.bounded(span, a * b)
            case Tensor(), "+", Tensor():
                return self.residual_sum(span, left, right)
        wrong = right_place if isinstance(left, Number | Tensor) else left_place
        found = right if wrong is right_place else left
        advice = "with numbers there are + - *, with what is computed only +"
        raise fault(
            self.source,
            wrong.span,
            f"{describe(left)} {operator} {describe(right)}: expected two numbers or two things computed, "
            f"found {describe(found)} ({advice})",
        )

    def residual_sum(self, span: Span, left: Tensor, right: Tensor) -> Tensor:
        builder = self.builder
        name = builder.name("sum")
        title = "the residual sum" if builder.group else "the sum"
        shape = left.shape if len(left.shape) >= len(right.shape) else right.shape
        shorter = min(len(left.shape), len(right.shape))
        for axis in range(-1, -shorter - 1, -1):
            if left.shape[axis] == right.shape[axis]:
                continue
            raise self._sum_fault(span, f"{title} ({name}.{{}})", axis, left, right)
        if len(shape) != 3 or (shorter < 3 and "learned_pos" not in (left.title, right.title)):
            smaller = left if len(left.shape) < 3 else right
            raise builder.mismatch(span, smaller, f"{title} ({name}.branch)", ("B", "T", "width"))
        made = builder.add(name, "sum", title, span, {"x": left, "branch": right}, shape)
        stream = left if left.shape == shape else right
        return replace(made, written=stream.written or left.written)

    def _sum_fault(self, span: Span, taker: str, axis: int, left: Tensor, right: Tensor) -> ModelError:
        """The operand whose length can be set is the one at fault; of two, the right one."""
        wrong, sound, role = right, left, "branch"
        if axis not in right.settings and axis in left.settings:
            wrong, sound, role = left, right, "x"
        wanted = sound.shape[axis]
        fix: Fix | None = None
        if axis in wrong.settings:
            written = "context" if wanted == "T" else sound.written.get(axis)
            fix = setting_fix(wrong.settings[axis], wanted, written)
        return self.builder.mismatch(span, wrong, taker.format(role), sound.shape, fix, "give both the same shape")

    def call(self, call: Call) -> Value:
        function = self.value(call.function)
        written: list[tuple[Argument, Value]] = [(a, self.value(a.value)) for a in call.arguments]
        if isinstance(function, Table):
            return self._apply_table(call, function, written)
        if not isinstance(function, Operation):
            raise fault(
                self.source,
                call.head,
                f"expected an operation before the parenthesis ({', '.join(OPERATIONS)}), found {describe(function)}",
            )
        definition = OPERATIONS[function.name]
        given = bind(self.source, function.name, call.head, definition.parameters, written)
        return definition.build(Applied(call, given, self.builder, self.own_literals))

    def _apply_table(self, call: Call, table: Table, written: list[tuple[Argument, Value]]) -> Tensor:
        tensors = [value for argument, value in written if argument.name is None]
        if len(written) != 1 or len(tensors) != 1 or not isinstance(tensors[0], Tensor):
            raise fault(
                self.source, call.span, "expected token_embed(rows, width) to be applied to the tokens: (tokens)"
            )
        return apply_table(self.builder, table, tensors[0], call.span)


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:40]}..."
