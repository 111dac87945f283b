"""The two views of a specification say the same, and turning one into the other and back changes nothing."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.spec import ModelSpec
from reproduce.configuration import check, load_configuration, read_text
from reproduce.model.code import graph_of, read_code, require_same, write_code
from reproduce.model.form import put_form, write_form
from reproduce.model.source import ModelError, Source
from reproduce.state import hash_of
from reproduce.yaml12 import load_yaml
from tests.plan.models import EXAMPLE, EXPERIMENTS, explicit, specs

TINY = next(path for path in EXPERIMENTS if path.stem == "tiny")


def read(text: str) -> ModelSpec:
    return read_code(Source("text", text)).spec


@settings(max_examples=50)
@given(specs(largest=2**24))
def test_code_and_back_changes_nothing(spec: ModelSpec) -> None:
    text = write_code(spec)
    assert read(text) == spec
    assert write_code(read(text)) == text
    assert hash_of(read(text).identity()) == hash_of(spec.identity())


@settings(max_examples=50)
@given(specs(largest=2**24))
def test_form_and_back_changes_nothing(spec: ModelSpec) -> None:
    text = write_form(spec)
    [(section, value)] = load_yaml(text, "form").items()
    assert section == "model"
    assert ModelSpec.model_validate(value) == spec
    assert write_form(ModelSpec.model_validate(value)) == text


@settings(max_examples=10)
@given(specs())
def test_code_to_form_to_code(spec: ModelSpec) -> None:
    """Through a whole configuration file, whose other values and comments stay."""
    before = read_text(TINY)
    after = put_form(before, read(write_code(spec)), "params.yaml")
    found = check(load_yaml(after, "params.yaml"), "params.yaml")
    assert write_code(found.model) == write_code(spec)
    assert found.model_copy(update={"model": None}) == load_configuration(TINY).model_copy(update={"model": None})
    assert [line for line in after.splitlines() if "#" in line] == [line for line in before.splitlines() if "#" in line]
    assert put_form(after, load_configuration(TINY).model, "params.yaml") == before


@settings(max_examples=50)
@given(specs())
def test_widths_written_out_say_the_same(spec: ModelSpec) -> None:
    assert read(explicit(spec)) == spec


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiments(path: Path) -> None:
    spec = load_configuration(path).model
    assert read(write_code(spec)) == spec
    assert put_form(read_text(path), spec, path.name) == read_text(path)


def test_example() -> None:
    """What is not written is what the documentation says."""
    assert read(EXAMPLE) == ModelSpec(
        vocab=96,
        context=256,
        d_model=256,
        heads=8,
        layers=6,
        hidden=1024,
        activation="gelu",
        dropout=0.1,
        linear_bias=True,
        norm_parameters=True,
        tied=True,
        init_std=0.02,
        attention="tiled",
    )


def test_example_is_the_experiment() -> None:
    [path] = [path for path in EXPERIMENTS if path.stem == "char-4.8m"]
    assert hash_of(read(EXAMPLE).identity()) == hash_of(load_configuration(path).model.identity())


def test_canonical_text() -> None:
    assert write_code(read(EXAMPLE), "CharTransformer") == (
        "model CharTransformer(context=256, vocab=96, init_std=0.02):\n"
        "  d = 256; heads = 8; layers = 6\n"
        "  x = dropout(token_embed(vocab, d)(tokens) + learned_pos(context, d), 0.1)\n"
        "  repeat layers:\n"
        "    x = x + attention(norm(x, parameters=true), heads=heads, causal=true, dropout=0.1, bias=true, "
        'memory="tiled")\n'
        '    x = x + mlp(norm(x, parameters=true), hidden=4 * d, activation="gelu", dropout=0.1, bias=true)\n'
        "  logits = head(norm(x, parameters=true), tied=token_embed)\n"
    )


SAME = {
    "comments and blank lines": EXAMPLE.replace("\n", "  # why\n\n   # so\n"),
    "Windows line ends": EXAMPLE.replace("\n", "\r\n"),
    "no last line end": EXAMPLE.rstrip(),
    "a comment at the end": EXAMPLE + "  # the end",
    "other names": re.sub(r"\bx\b", "stream", re.sub(r"\bd\b", "wide", EXAMPLE)),
    "one statement a line": EXAMPLE.replace("; ", "\n  "),
    "semicolons at line ends": EXAMPLE.replace("layers = 6", "layers = 6;"),
    "arithmetic": EXAMPLE.replace("256;", "2 * (3 + 5) * 20 - 64;").replace("layers = 6", "layers = heads - 2"),
    "over several lines": EXAMPLE.replace("norm(x), hidden", "\n norm(x),\n\n        hidden"),
    "the sum the other way": EXAMPLE.replace("x + mlp", "mlp").replace("0.1)\n  log", "0.1) + x\n  log"),
    "a name for the norm": EXAMPLE.replace("    x = x + mlp(norm(x)", "    y = norm(x)\n    x = x + mlp(y"),
    "a name for the embedding": EXAMPLE.replace("token_embed(vocab, d)(tokens)", "table(tokens)").replace(
        "  x = table", "  table = token_embed(vocab, d)\n  x = table"
    ),
    "arguments by name": EXAMPLE.replace("token_embed(vocab, d)", "token_embed(width=d, rows=vocab)"),
    "dropout of the embedding written": EXAMPLE.replace(
        "token_embed(vocab, d)(tokens) + learned_pos(context, d)",
        "dropout(token_embed(vocab, d)(tokens) + learned_pos(context, d), rate=0.1)",
    ),
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME.keys())
def test_spellings_of_one_model(text: str) -> None:
    assert text != EXAMPLE
    assert read(text) == read(EXAMPLE)


@pytest.mark.parametrize("text", [EXAMPLE, *SAME.values()])
def test_a_text_that_says_it_already_stays(text: str) -> None:
    require_same(Source("m", text), read(EXAMPLE))


def test_a_text_that_says_something_else_is_refused() -> None:
    spec = read(EXAMPLE).model_copy(update={"layers": 7})
    for other in (EXAMPLE, write_code(read(EXAMPLE), "CharTransformer"), "no model"):
        with pytest.raises(ModelError, match="m is there already and is not this model"):
            require_same(Source("m", other), spec)


def expressions() -> st.SearchStrategy[str]:
    return st.recursive(
        st.integers(0, 300).map(str),
        lambda inner: st.builds("{} {} {}".format, inner, st.sampled_from("+-*"), inner) | inner.map("({})".format),
        max_leaves=12,
    )


@given(expressions())
@example("2 - 3 - 4 + 40")
def test_arithmetic_is_that_of_whole_numbers(expression: str) -> None:
    expected = eval(expression)
    text = EXAMPLE.replace("hidden=4 * d", f"hidden={expression}")
    try:
        assert read(text).hidden == expected
    except ModelError:
        assert not 1 <= expected < 2**31 or expression.count("(") >= 14 or _too_large_within(expression)


def _too_large_within(expression: str) -> bool:
    """Whether a part of it may leave the numbers there are: no part is larger than all its numbers multiplied."""
    product = 1
    for number in expression.replace("(", " ").replace(")", " ").split():
        product *= max(int(number), 2) if number.isdecimal() else 1
    return product >= 2**31


@settings(max_examples=20)
@given(specs())
def test_graph_is_the_same_for_the_same_specification(spec: ModelSpec) -> None:
    ours, written = graph_of(spec).to_json(), read_code(Source("m", write_code(spec, "GPT"))).graph.to_json()
    assert ours == written
