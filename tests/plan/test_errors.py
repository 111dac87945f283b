"""What every error says: where, what was expected, what was found, what to do."""

import pytest

from reproduce.model.code import read_code
from reproduce.model.source import ModelError, NotOffered, Source
from tests.plan.models import EXAMPLE

# What is replaced in the example -> by what -> the place, and how the message goes on.
SYNTAX = [
    (EXAMPLE, "", "expected model, found the end of the file: begin with model Name(context=..., vocab=...)"),
    ("model ", "modul ", "line 1, column 1: expected model or the end of the line, found the name modul"),
    ("CharTransformer(", "(", "line 1, column 7: expected a name, found '('"),
    ("256, vocab=96)", "256, vocab=96", "line 1, column 44: expected ',' or ')', found ':'"),
    ("  d = 256", "d = 256", "line 2, column 1: expected an indented block, found the name d"),
    ("  x = token", "   x = token", "line 3, column 4: expected a name, repeat or the end of the block, found a deep"),
    ("  logits", " logits", "line 7, column 2: expected 0 or 2 spaces before this line, as a block has, found 1"),
    ("  logits", "\tlogits", "found the character '\\t': indent with spaces"),
    (
        "    x = x + a",
        "\tx = x + a",
        "line 5, column 1: expected an indented block, found the character '\\t': indent with",
    ),
    ("d = 256;", "d == 256;", "line 2, column 6: expected a value, found '='"),
    ("d = 256;", "d = 256 8;", "line 2, column 11: expected an operator, '(', ';' or the end of the line, found a"),
    ("d = 256;", "d = ;", "line 2, column 7: expected a value, found ';'"),
    ("d = 256;", "d = 'x';", 'column 7: expected a value, found the character "\'": write texts in double quotes'),
    ("d = 256;", 'd = "x;', "found the character '\"': end the text with a double quote on the same line"),
    ("d = 256;", "d = 256 / 2;", "found the character '/': there are + - and *"),
    ("layers:", "layers", "line 4, column 16: expected ':', found the end of the line"),
    ("repeat layers:", "repeat layers: x = x", "line 4, column 18: expected the end of the line, found the name x"),
]
NAMES = [
    ("mlp(", "mpl(", "line 6, column 13: there is no mpl here: did you mean mlp?"),
    ("4 * d", "4 * q", "line 6, column 37: there is no q here: give it a value before this line"),
    ("causal=true", "causal=True", "line 5, column 52: there is no True here: did you mean true?"),
    ("d = 256", "norm = 256", "line 2, column 3: norm is an operation: use another name"),
    ("d = 256", "context = 256", "line 2, column 3: context is the number 256 already: use another name"),
    ("d = 256", "tokens = 256", "line 2, column 3: tokens is tokens already: use another name"),
    ("layers = 6", "d = 6", "line 2, column 23: d is the number 256 already: use another name"),
    ("d = 256", "d = norm", "line 2, column 7: expected a value, found the operation norm: call it, norm(...)"),
    ("logits", "result", "line 1, column 7: expected the model to say what its logits are, found none: end it with"),
]
VALUES = [
    ("4 * d", "4 * x", "line 6, column 37: the number 4 * the residual sum: expected two numbers or two things compu"),
    ("4 * d", 'd + "d"', 'line 6, column 37: the number 256 + the text "d": expected two numbers'),
    ("4 * d", "4 * 2147483648", "line 6, column 37: expected a number of at most 2147483647, found a larger one"),
    ("4 * d", "4 * 2147483647", "line 6, column 33: expected a number of at most 2147483647, found a larger one"),
    ("4 * d", "d - d", "line 6, column 33: hidden: expected a whole number of at least 1, found the number 0"),
    ("hidden=4 * d, ", "", "line 6, column 13: mlp needs hidden, a whole number of at least 1: write hidden=..."),
    ("causal=true, ", "", "line 5, column 13: attention needs causal, true or false: write causal=..."),
    ("hidden=", "hiden=", "line 6, column 26: mlp has no hiden: did you mean hidden?"),
    ("hidden=4", "q=4", "line 6, column 26: mlp has no q: it takes x, hidden, activation, dropout, bias, out"),
    ("dropout=0.1)\n    x", "heads=8)\n    x", "line 5, column 58: heads is given for the second time: remove one of"),
    ("d)(tokens)", "d, 3)(tokens)", "line 3, column 29: token_embed takes at most 2 values: rows, width"),
    ("vocab, d)", "rows=vocab, d)", "line 3, column 31: expected a name before this value, as before the one to"),
    ("context=256", "256", "line 1, column 23: expected a name before this value: context=..., vocab=..."),
    (", vocab=96", "", "line 1, column 7: the model needs vocab, a whole number of at least 1: write vocab=..."),
    ("vocab=96", "vocab=96, width=3", "line 1, column 46: the model has no width: it takes context, vocab, init_std"),
    ("vocab=96", "vocab=96, init_std=0.0", "line 1, column 55: init_std: expected a decimal above 0, found the decim"),
    ("vocab=96", "vocab=96, init_std=1e999", "init_std: expected a decimal above 0, found the decimal inf"),
    ("dropout=0.1)\n    x", "dropout=1.0)\n    x", "dropout: expected a rate of at least 0 and less than 1, found the"),
    ("causal=true", "causal=1", "line 5, column 52: causal: expected true or false, found the number 1"),
    ('"gelu"', '"swish"', 'activation: expected "gelu" or "relu", found the text "swish"'),
    ('"gelu"', "7", "activation: expected a text in double quotes, found the number 7"),
    ("tied=token_embed", "tied=true", "line 7, column 31: tied: expected token_embed or false, found true"),
    ("norm(x), tied", "7, tied", "line 7, column 17: x: expected something computed, found the number 7"),
    ("repeat layers", "repeat 0", "line 4, column 10: expected how often to repeat, a whole number of at least 1, fo"),
    ("repeat layers", "repeat 0.5", "a whole number of at least 1, found the decimal 0.5"),
    ("(tokens)", "(3)", "expected token_embed(rows, width) to be applied to the tokens: (tokens)"),
    ("(tokens)", "", "line 3, column 7: token_embed(...) that is not applied to tokens + learned_pos: expected two"),
    ("  logits", "  z = norm(x)\n  logits", "line 7, column 7: norm (norm) is computed and never used: remove it or"),
    ("vocab=96", "vocab=16777217", "line 1, column 7: vocab may be at most 16777216, found 16777217"),
    ("layers = 6", "layers = 100000", "line 1, column 7: layers: expected at most 256, found 100000: correct it"),
    ("learned_pos(context, d)", "token_embed(vocab, d)(tokens)", "line 7, column 31: expected one token_embed before"),
]
OFFERED = [
    ("causal=true", "causal=false", "line 5, column 52: expected causal=true, found false: the engine's models predi"),
    ("attention(norm(x)", "attention(x", "expected attention(norm(x), ...), found x in the repeat (block.x)"),
    ("mlp(norm(x)", "mlp(x", "expected mlp(norm(x), ...), found the residual sum (block.sum)"),
    ("head(norm(x)", "head(x", "expected head(norm(x), ...), found the residual sum (block.sum2)"),
    ("head(norm(x)", "head(norm(norm(x))", "expected the last norm to take what leaves the repeat, found norm (norm)"),
    ("x + mlp", "mlp", "expected a round to end with x = x + mlp(...), found the out projection of mlp"),
    ("norm(x), hidden", "norm(norm(x)), hidden", "expected the norm of a branch to take what the residual sum adds"),
    (" + learned_pos(context, d)", "", "expected the repeat to begin with token_embed(vocab, d)(tokens) + learned_pos"),
    ("causal=true, dropout=0.1", "causal=true, dropout=0.2", "line 6, column 67: expected one rate of dropout in the"),
    ("hidden=4 * d,", "hidden=4 * d, bias=false,", "expected all linear layers with a bias or none, found true for t"),
    ("mlp(norm(x)", "mlp(norm(x, parameters=false)", "expected all norms with parameters or none, found true for norm"),
    ("  repeat layers:\n", "  repeat 2:\n   repeat 3:\n", "line 4, column 3: a repeat within a repeat: the engine ha"),
    ("  logits", '  repeat 2:\n    x = x + mlp(norm(x), hidden=1, activation="relu")\n  logits', "a second repeat:"),
    ("    x = x + attention", "    x = x + x\n    x = x + attention", "expected one attention and one mlp in each ro"),
    ("x + attention", 'x + mlp(norm(x), hidden=1, activation="relu") + attention', "one attention and one mlp"),
]


def error_of(right: str, wrong: str) -> ModelError:
    text = EXAMPLE.replace(right, wrong, 1)
    assert text != EXAMPLE
    with pytest.raises(ModelError) as caught:
        read_code(Source("m", text))
    return caught.value


@pytest.mark.parametrize(("right", "wrong", "says"), [*SYNTAX, *NAMES, *VALUES])
def test_texts(right: str, wrong: str, says: str) -> None:
    error = error_of(right, wrong)
    assert says in str(error).splitlines()[0]
    assert type(error) is ModelError


@pytest.mark.parametrize(("right", "wrong", "says"), OFFERED)
def test_texts_of_what_the_engine_does_not_have(right: str, wrong: str, says: str) -> None:
    error = error_of(right, wrong)
    assert isinstance(error, NotOffered)
    assert says in str(error).splitlines()[0]
    assert "ngine" in str(error) or "write the same for both" in str(error)
