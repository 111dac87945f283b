"""The operations of the language: what each takes, the shapes it asks for, and the nodes it makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reproduce.model.arguments import Given, Parameter
from reproduce.model.building import Builder, setting_fix
from reproduce.model.graph import Shape, show
from reproduce.model.source import Fix, ShapeError, Span, fault
from reproduce.model.syntax import Call
from reproduce.model.values import Decimal, Flag, Setting, Table, Tensor, Text, Value

ACTIVATIONS = ("gelu", "relu")
MEMORY = ("stored", "tiled")
DEFAULT_INIT_STD = 0.02
MAX_HEAD_WIDTH = 256


@dataclass(frozen=True)
class Applied:
    """A call with its arguments matched. `own_literals`: number that is read once, by its name -> its place."""

    call: Call
    given: Mapping[str, Given]
    builder: Builder
    own_literals: Mapping[str, Span]

    @property
    def span(self) -> Span:
        return self.call.span

    def written(self, name: str) -> str:
        """How an argument reads in the source."""
        span = self.given[name].span
        return self.builder.source.text[span.start : span.end]

    def setting(self, name: str) -> Setting:
        return Setting(name, self.given[name].span)

    def places(self, *names: str) -> dict[str, Span]:
        return {name: self.given[name].span for name in names}


def _token_embed(applied: Applied) -> Value:
    given = applied.given
    return Table(
        rows=given["rows"].number,
        width=given["width"].number,
        written=applied.written("width"),
        row_setting=applied.setting("rows"),
        width_setting=applied.setting("width"),
    )


def apply_table(builder: Builder, table: Table, tokens: Tensor, span: Span) -> Tensor:
    """`token_embed(rows, width)(tokens)`."""
    name = builder.name("token_embed")
    if tokens.port.node != "tokens":
        raise builder.mismatch(span, tokens, f"token_embed ({name}.tokens)", ("B", "T"), advice="apply it to tokens")
    if table.rows != builder.vocab:
        fix = setting_fix(table.row_setting, builder.vocab, "vocab")
        raise fault(
            builder.source,
            fix.span,
            f"token_embed ({name}.table) has {[table.rows, table.width]}, the tokens (tokens.y) need "
            f"{[builder.vocab, table.width]}: {fix.says}",
            fix,
            ShapeError,
        )
    made = builder.add(
        name,
        "token_embed",
        "token_embed",
        span,
        {"tokens": tokens},
        ("B", "T", table.width),
        parameters={"table": (table.rows, table.width)},
    )
    return Tensor(made.port, made.shape, made.title, {-1: table.written}, {-1: table.width_setting})


def _learned_pos(applied: Applied) -> Value:
    builder, given = applied.builder, applied.given
    rows, width = given["rows"].number, given["width"].number
    made = builder.add(
        builder.name("learned_pos"),
        "learned_pos",
        "learned_pos",
        applied.span,
        {},
        ("T" if rows == builder.context else rows, width),
        parameters={"table": (rows, width)},
    )
    settings = {-1: applied.setting("width"), -2: applied.setting("rows")}
    return Tensor(made.port, made.shape, made.title, {-1: applied.written("width")}, settings)


def _dropout(applied: Applied) -> Value:
    builder, x = applied.builder, applied.given["x"].tensor
    name = builder.name("dropout")
    builder.width(x, "dropout", f"{name}.x", applied.span)
    return builder.add(
        name,
        "dropout",
        "dropout",
        applied.span,
        {"x": x},
        x.shape,
        values={"dropout": applied.given["rate"].rate},
        places={"dropout": applied.given["rate"].span},
    )


def _norm(applied: Applied) -> Value:
    builder, x = applied.builder, applied.given["x"].tensor
    name = builder.name("norm")
    width = builder.width(x, "norm", f"{name}.x", applied.span)
    has_parameters = applied.given["parameters"].flag
    return builder.add(
        name,
        "norm",
        "norm",
        applied.span,
        {"x": x},
        x.shape,
        parameters={"gain": (width,), "bias": (width,)} if has_parameters else {},
        values={"parameters": has_parameters},
        places=applied.places("parameters"),
    )


def _linear(applied: Applied, name: str, title: str, x: Tensor, deep: int, wide: int, dropout: bool = False) -> Tensor:
    """A linear layer, inside another operation."""
    bias = applied.given["bias"].flag
    parameters: dict[str, Shape] = {"weight": (wide, deep)}
    if bias:
        parameters["bias"] = (wide,)
    names = ("bias", "dropout") if dropout else ("bias",)
    values: dict[str, bool | float] = {"bias": bias}
    if dropout:
        values["dropout"] = applied.given["dropout"].rate
    return applied.builder.add(
        name,
        "linear",
        title,
        applied.span,
        {"x": x},
        (*x.shape[:-1], wide),
        parameters=parameters,
        values=values,
        places=applied.places(*names),
    )


def _out(applied: Applied, name: str, x: Tensor, inner: Tensor, deep: int, width: int) -> Tensor:
    """The projection back to the stream; its width may be written as `out`, and then need not be right."""
    given = applied.given.get("out")
    wide = width if given is None else given.number
    kind = name.rsplit(".", 1)[-1].rstrip("0123456789")
    made = _linear(applied, f"{name}.out", f"the out projection of {kind}", inner, deep, wide, dropout=True)
    if given is None:
        return Tensor(made.port, made.shape, made.title, x.written)
    return Tensor(made.port, made.shape, made.title, {-1: applied.written("out")}, {-1: applied.setting("out")})


def _attention(applied: Applied) -> Value:
    builder, given = applied.builder, applied.given
    x, heads = given["x"].tensor, given["heads"].number
    name = builder.name("attention")
    width = builder.width(x, "attention", f"{name}.qkv.x", applied.span)
    qkv = _linear(applied, f"{name}.qkv", "the query, key and value projection of attention", x, width, 3 * width)
    if width % heads or width // heads > MAX_HEAD_WIDTH:
        raise _heads_fault(applied, name, qkv, width, heads)
    mixed = builder.add(
        f"{name}.heads",
        "attention",
        "attention",
        applied.span,
        {"qkv": qkv},
        x.shape,
        values={
            "causal": given["causal"].flag,
            "dropout": given["dropout"].rate,
            "heads": heads,
            "memory": given["memory"].text,
        },
        places=applied.places("causal", "dropout", "heads", "memory"),
    )
    return _out(applied, name, x, mixed, width, width)


def _heads_fault(applied: Applied, name: str, qkv: Tensor, width: int, heads: int) -> Exception:
    fitting = [d for d in range(1, min(width, 65536) + 1) if width % d == 0 and width // d <= MAX_HEAD_WIDTH]
    best = min(fitting, key=lambda d: (abs(d - heads), d), default=None)
    span = applied.own_literals.get(applied.written("heads"), applied.given["heads"].span)
    fix = None if best is None else Fix(span, str(best), f"set heads = {best}")
    problem = f"n at most {MAX_HEAD_WIDTH}" if width % heads == 0 else "n whole"
    advice = "use a width with divisors" if fix is None else fix.says
    return fault(
        applied.builder.source,
        span,
        f"{qkv.title} ({qkv.port}) gives {show(qkv.shape)}, attention ({name}.heads.qkv) expects "
        f"[B, T, 3 * {heads} * n], {heads} heads of width n, with {problem}: {advice}",
        fix,
        ShapeError,
    )


def _mlp(applied: Applied) -> Value:
    builder, given = applied.builder, applied.given
    x, hidden = given["x"].tensor, given["hidden"].number
    name = builder.name("mlp")
    width = builder.width(x, "mlp", f"{name}.hidden.x", applied.span)
    up = _linear(applied, f"{name}.hidden", "the hidden projection of mlp", x, width, hidden)
    activation = given["activation"].text
    active = builder.add(
        f"{name}.activation",
        "activation",
        activation,
        applied.span,
        {"x": up},
        up.shape,
        values={"activation": activation},
        places=applied.places("activation"),
    )
    return _out(applied, name, x, active, hidden, width)


def _head(applied: Applied) -> Value:
    builder, given = applied.builder, applied.given
    x = given["x"].tensor
    name = builder.name("head")
    width = builder.width(x, "head", f"{name}.x", applied.span)
    rows = given["rows"].number if "rows" in given else builder.vocab
    tied = not isinstance(given["tied"].value, Flag)
    if tied:
        _check_tied(applied, name, rows, width)
    made = builder.add(
        name,
        "head",
        "the head",
        applied.span,
        {"x": x},
        (*x.shape[:-1], rows),
        parameters={} if tied else {"weight": (rows, width)},
        values={"tied": tied},
        places=applied.places("tied"),
    )
    settings = {-1: applied.setting("rows")} if "rows" in given else {}
    return Tensor(made.port, made.shape, made.title, {}, settings)


def _check_tied(applied: Applied, name: str, rows: int, width: int) -> None:
    builder, span = applied.builder, applied.given["tied"].span
    tables = [node for node in builder.nodes.values() if node.operation == "token_embed"]
    if len(tables) != 1:
        raise fault(
            builder.source,
            span,
            f"expected one token_embed before the head that is tied to it, found {len(tables)}: write tied=false",
        )
    table = tables[0].parameters["table"]
    if table == (rows, width):
        return
    fix = setting_fix(applied.setting("rows"), builder.vocab, "vocab") if table[0] != rows else None
    raise fault(
        builder.source,
        span if fix is None else fix.span,
        f"token_embed ({tables[0].name}.table) gives {list(table)}, the head ({name}.weight) expects {[rows, width]}: "
        + ("write tied=false, or keep one width" if fix is None else fix.says),
        fix,
        ShapeError,
    )


@dataclass(frozen=True)
class Definition:
    """An operation of the language."""

    parameters: tuple[Parameter, ...]
    build: Callable[[Applied], Value]


_X = Parameter("x", "tensor")
_DROPOUT = Parameter("dropout", "rate", Decimal(0.0))
_BIAS = Parameter("bias", "flag", Flag(True))
_OUT = Parameter("out", "size", needed=False)
_TABLE = (Parameter("rows", "size"), Parameter("width", "size"))

OPERATIONS: Mapping[str, Definition] = {
    "token_embed": Definition(_TABLE, _token_embed),
    "learned_pos": Definition(_TABLE, _learned_pos),
    "dropout": Definition((_X, Parameter("rate", "rate")), _dropout),
    "norm": Definition((_X, Parameter("parameters", "flag", Flag(True))), _norm),
    "attention": Definition(
        (
            _X,
            Parameter("heads", "size"),
            Parameter("causal", "flag"),
            _DROPOUT,
            _BIAS,
            _OUT,
            Parameter("memory", "text", Text("tiled"), choices=MEMORY),
        ),
        _attention,
    ),
    "mlp": Definition(
        (
            _X,
            Parameter("hidden", "size"),
            Parameter("activation", "text", choices=ACTIVATIONS),
            _DROPOUT,
            _BIAS,
            _OUT,
        ),
        _mlp,
    ),
    "head": Definition((_X, Parameter("rows", "size", needed=False), Parameter("tied", "table", Flag(False))), _head),
}

HEADER = (
    Parameter("context", "size"),
    Parameter("vocab", "size"),
    Parameter("init_std", "spread", Decimal(DEFAULT_INIT_STD)),
)
