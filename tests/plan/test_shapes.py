"""Every edge has a shape; what does not fit is refused before anything runs, and mended on demand."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.program import build_program
from engine.spec import ModelSpec
from reproduce.model.code import graph_of, mend, read_code
from reproduce.model.graph import Port
from reproduce.model.source import ModelError, ShapeError, Source
from tests.plan.models import EXAMPLE, explicit, specs

PLACES = ["token_rows", "position_rows", "position_width", "attention_out", "mlp_out", "head_rows"]


def refusal(text: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_code(Source("m", text))
    return caught.value


@given(specs(), st.sampled_from(PLACES), st.integers(1, 5000))
def test_a_wrong_width_is_found_and_mended(spec: ModelSpec, place: str, wrong: int) -> None:
    right = {"token_rows": spec.vocab, "head_rows": spec.vocab, "position_rows": spec.context}.get(place, spec.d_model)
    assume(wrong != right)
    text = explicit(spec, **{place: str(wrong)})
    error = refusal(text)
    assert isinstance(error, ShapeError)
    first = str(error).splitlines()[0]
    # Both ports, both shapes, the fix.
    assert first.count("(") >= 2 and first.count("[") == 2 and ": set " in first
    mended, faults = mend(Source("m", text))
    assert len(faults) == 1
    assert read_code(mended).spec == spec


@settings(max_examples=30)
@given(specs(), st.integers(1, 5000))
def test_the_first_width_written_is_the_one_that_holds(spec: ModelSpec, width: int) -> None:
    """The width of the token embedding: all others follow it."""
    mended, _ = mend(Source("m", explicit(spec, token_width=str(width))))
    assert read_code(mended).spec.d_model == width


@settings(max_examples=30)
@given(specs(), st.dictionaries(st.sampled_from(PLACES[1:]), st.integers(1, 5000), min_size=2))
def test_several_wrong_widths_are_mended_together(spec: ModelSpec, wrong: dict[str, int]) -> None:
    text = explicit(spec, **{place: str(width) for place, width in wrong.items()})
    mended, _ = mend(Source("m", text))
    assert read_code(mended).spec == spec


@given(specs(), st.integers(1, 300))
def test_heads_that_do_not_divide_the_width(spec: ModelSpec, heads: int) -> None:
    assume(spec.d_model % heads or spec.d_model // heads > 256)
    text = explicit(spec, heads=str(heads))
    assert isinstance(refusal(text), ShapeError)
    found = read_code(mend(Source("m", text))[0]).spec
    assert found.model_copy(update={"heads": spec.heads}) == spec


def test_hidden_width_typed_into_the_output_projection() -> None:
    text = EXAMPLE.replace("hidden=4 * d,", "hidden=4 * d, out=4 * d,")
    assert str(refusal(text)) == (
        "m, line 6, column 44: the out projection of mlp (block.mlp.out.y) gives [B, T, 1024], the residual sum "
        "(block.sum2.branch) expects [B, T, 256]: set out = d\n"
        '        x = x + mlp(norm(x), hidden=4 * d, out=4 * d, activation="gelu", dropout=0.1)\n'
        "                                               ^^^^^\n"
        "--fix does that"
    )
    mended, [fault] = mend(Source("m", text))
    assert mended.text == EXAMPLE.replace("hidden=4 * d,", "hidden=4 * d, out=d,")
    assert str(fault) == str(refusal(text))


FAULTS = {
    "learned_pos(300, d)": (
        "learned_pos(context, d)",
        "line 3, column 51: learned_pos (learned_pos.y) gives [300, 256], the sum (sum.branch) expects [B, T, 256]: "
        "set rows = context",
    ),
    "learned_pos(context, 2 * d)": (
        "learned_pos(context, d)",
        "line 3, column 60: learned_pos (learned_pos.y) gives [T, 512], the sum (sum.branch) expects [B, T, 256]: "
        "set width = d",
    ),
    "heads = 7": (
        "heads = 8",
        "line 2, column 20: the query, key and value projection of attention (block.attention.qkv.y) gives "
        "[B, T, 768], attention (block.attention.heads.qkv) expects [B, T, 3 * 7 * n], 7 heads of width n, with n "
        "whole: set heads = 8",
    ),
    "token_embed(97, d)": (
        "token_embed(vocab, d)",
        "line 3, column 19: token_embed (token_embed.table) has [97, 256], the tokens (tokens.y) need [96, 256]: "
        "set rows = vocab",
    ),
    "head(norm(x), 97, tied=token_embed)": (
        "head(norm(x), tied=token_embed)",
        "line 7, column 26: token_embed (token_embed.table) gives [96, 256], the head (head.weight) expects "
        "[97, 256]: set rows = vocab",
    ),
    "head(norm(x), 97)": (
        "head(norm(x), tied=token_embed)",
        "line 7, column 26: the head (head.y) gives [B, T, 97], the loss (loss.logits) expects [B, T, 96]: "
        "set rows = vocab",
    ),
    "mlp(norm(x), hidden=4 * d, out=3,": (
        "x + mlp(norm(x), hidden=4 * d,",
        "line 6, column 40: the out projection of mlp (block.mlp.out.y) gives [B, T, 3], the next round of the "
        "repeat (block.x.first) expects [B, T, 256]: set out = d",
    ),
    "head(norm(tokens)": (
        "head(norm(x)",
        "line 7, column 17: tokens (tokens.y) gives [B, T], norm (norm.x) expects [B, T, width]: give it the "
        "embedded tokens or what was computed from them",
    ),
    "learned_pos(context, d)(tokens)": (
        "token_embed(vocab, d)(tokens)",
        "expected an operation before the parenthesis",
    ),
    "token_embed(vocab, d)(learned_pos(context, d))": (
        "token_embed(vocab, d)(tokens)",
        "line 3, column 7: learned_pos (learned_pos.y) gives [T, 256], token_embed (token_embed.tokens) expects "
        "[B, T]: apply it to tokens",
    ),
    "tokens + learned_pos": (
        "token_embed(vocab, d)(tokens) + learned_pos",
        "gives [T, 256], the sum (sum.branch) expects",
    ),
}


@pytest.mark.parametrize("wrong", FAULTS)
def test_texts_of_shape_faults(wrong: str) -> None:
    right, expected = FAULTS[wrong]
    text = EXAMPLE.replace(right, wrong, 1)
    assert text != EXAMPLE
    assert expected in str(refusal(text)).splitlines()[0]


# Ports of the graph and the engine's tensors of the same values.
TENSORS = {
    "sum.y": "embed.y",
    "block.x.y": "embed.y",
    "block.norm.y": "block0.norm1.y",
    "block.attention.qkv.y": "block0.attn_qkv.y",
    "block.attention.heads.y": "block0.attn.y",
    "block.attention.out.y": "block0.attn_out.y",
    "block.sum.y": "block0.attn_residual.y",
    "block.norm2.y": "block0.norm2.y",
    "block.mlp.hidden.y": "block0.mlp_up.y",
    "block.mlp.activation.y": "block0.mlp_act.y",
    "block.mlp.out.y": "block0.mlp_down.y",
    "block.sum2.y": "block0.mlp_residual.y",
    "norm.y": "norm.y",
    "head.y": "head.y",
    "tokens.y": "ids",
}


@settings(max_examples=20)
@given(specs())
def test_shapes_are_those_of_the_engine(spec: ModelSpec) -> None:
    graph, program = graph_of(spec), build_program(spec)
    for port, tensor in TENSORS.items():
        node, name = port.rsplit(".", 1)
        assert graph.shape(Port(node, name)) == program.tensors[tensor].shape
    edges = {edge["from"] for edge in graph.to_json()["edges"]}
    assert edges - {"learned_pos.y", "token_embed.y", "dropout.y"} == TENSORS.keys() - {"head.y"}


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Pieces of a sound text replaced by others, doubled and dropped."""
    pieces = explicit(draw(specs())).replace("(", " ( ").replace(",", " , ").split(" ")
    for _ in range(draw(st.integers(1, 4))):
        at, other = (draw(st.integers(0, len(pieces) - 1)) for _ in range(2))
        pieces[at] = draw(st.sampled_from([pieces[other], "", f"{pieces[at]} {pieces[at]}"]))
    return " ".join(pieces)


@given(damaged())
def test_random_damage_ends_in_a_model_or_its_own_error(text: str) -> None:
    try:
        read_code(Source("m", text))
    except ModelError as error:
        assert str(error).startswith("m, line ")
