"""The code view: a specification as text, and text as a specification."""

from dataclasses import dataclass

from engine.spec import ModelSpec
from reproduce.model.elaboration import elaborate
from reproduce.model.fitting import fit
from reproduce.model.graph import Graph
from reproduce.model.parser import parse
from reproduce.model.source import ModelError, Source

DEFAULT_NAME = "GPT"


@dataclass(frozen=True)
class Understood:
    """What a text in the code view says."""

    spec: ModelSpec
    graph: Graph


def read_code(source: Source) -> Understood:
    """Raises ModelError: syntax, names, shapes, or a model that the engine does not have."""
    model = parse(source)
    graph, header = elaborate(source, model)
    return Understood(fit(source, graph, header, model.name.span), graph)


def write_code(spec: ModelSpec, name: str = DEFAULT_NAME) -> str:
    """The canonical text of a specification: nothing is left to a default.

    `read_code` of it gives `spec` back, and `write_code` of what `read_code` finds in it gives the same text.
    """
    d, hidden = spec.d_model, spec.hidden
    wide = "d" if hidden == d else f"{hidden // d} * d" if hidden % d == 0 else str(hidden)
    rate, bias = repr(spec.dropout), _flag(spec.linear_bias)
    norm = f"norm(x, parameters={_flag(spec.norm_parameters)})"
    tied = "token_embed" if spec.tied else "false"
    return (
        f"model {name}(context={spec.context}, vocab={spec.vocab}, init_std={spec.init_std!r}):\n"
        f"  d = {d}; heads = {spec.heads}; layers = {spec.layers}\n"
        f"  x = dropout(token_embed(vocab, d)(tokens) + learned_pos(context, d), {rate})\n"
        "  repeat layers:\n"
        f"    x = x + attention({norm}, heads=heads, causal=true, dropout={rate}, bias={bias}, "
        f'memory="{spec.attention}")\n'
        f'    x = x + mlp({norm}, hidden={wide}, activation="{spec.activation}", dropout={rate}, bias={bias})\n'
        f"  logits = head({norm}, tied={tied})\n"
    )


def require_same(source: Source, spec: ModelSpec) -> None:
    """Raises ModelError where `source` is not the model `spec`."""
    other = f"{source.name} is there already and is not this model: remove it or name another file"
    try:
        understood = read_code(source)
    except ModelError as error:
        raise ModelError(other) from error
    if understood.spec != spec:
        raise ModelError(other)


def graph_of(spec: ModelSpec) -> Graph:
    """The graph of a specification."""
    return read_code(Source("the canonical text", write_code(spec))).graph


def mend(source: Source) -> tuple[Source, list[ModelError]]:
    """`source` with every fault mended that says how, and those faults. What is left raises its error."""
    mended: list[ModelError] = []
    while True:
        try:
            read_code(source)
        except ModelError as error:
            if error.fix is None or len(mended) >= _MOST_FIXES:
                raise
            mended.append(error)
            source = Source(source.name, error.fix.apply(source.text))
        else:
            return source, mended


_MOST_FIXES = 32  # more than a model has places for them, so an endless loop of fixes ends


def _flag(value: bool) -> str:
    return "true" if value else "false"
