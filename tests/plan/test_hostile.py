"""Whatever a file holds, the answer is a model or a ModelError: soon, and never a traceback."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduce.model.code import mend, read_code
from reproduce.model.source import MAX_BYTES, ModelError, Source
from tests.plan.models import EXAMPLE

HEAD = "model M(context=1, vocab=1):\n"
HOSTILE = {
    "10,000 repeats within repeats": HEAD + "".join(" " * n + "repeat 2:\n" for n in range(1, 10_000)),
    "as many repeats as fit": HEAD + "".join(" " * n + "repeat 2:\n" for n in range(1, 120)),
    "10,000 repeats in a row": HEAD + "  repeat 2:\n" * 10_000,
    "repeats on one line": HEAD + "  " + "repeat 2: " * 800,
    "a huge number": HEAD + f"  d = {'9' * 8000}\n",
    "a huge number of zeros": HEAD + f"  d = 1{'0' * 8000}\n",
    "a huge product": HEAD + "  d = " + "*".join(["2147483647"] * 700) + "\n",
    "a huge repeat": EXAMPLE.replace("layers = 6", "layers = 2147483648"),
    "a huge decimal": EXAMPLE.replace("0.1", "1e999999999"),
    "a decimal of many digits": EXAMPLE.replace("0.1", "0." + "1" * 7000),
    "deep parentheses": HEAD + "  d = " + "(" * 8000 + "\n",
    "deep and closed parentheses": HEAD + "  d = " + "(" * 3900 + "1" + ")" * 3900 + "\n",
    "calls of calls": HEAD + "  d = norm" + "(1)" * 2600 + "\n",
    "calls within calls": HEAD + "  d = " + "norm(" * 1500 + "\n",
    "a sum of thousands": HEAD + "  d = " + "+".join(["1"] * 4000) + "\n",
    "a name of a megabyte": HEAD + "  " + "d" * 2**20 + " = 1\n",
    "as long a name as fits": HEAD + "  d = " + "x" * 8000 + "\n",
    "thousands of arguments": HEAD + "  d = norm(" + "a=1," * 2000 + ")\n",
    "NUL": HEAD + "  d = \0\n",
    "only NUL": "\0" * 5000,
    "tabs": EXAMPLE.replace("  ", "\t"),
    "other spaces": EXAMPLE.replace("  ", "\u00a0\u2003"),
    "a byte order mark": "\ufeff" + EXAMPLE,
    "digits of another script": EXAMPLE.replace("256", "٢٥٦"),
    "a look-alike letter": EXAMPLE.replace("d = 256", "\u0501 = 256"),
    "line ends of another kind": EXAMPLE.replace("\n", "\u2028"),
    "carriage returns": EXAMPLE.replace("\n", "\r"),
    "an escape sequence": HEAD + "  d = \x1b[31mred\n",
    "a text without end": HEAD + '  d = "' + "x" * 5000,
    "nothing": "",
    "blank lines": "\n" * 8000,
    "comments": "#\n" * 4000,
    "indentation that grows": HEAD + "".join(" " * (n + 2) + "d = 1\n" for n in range(100)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.timeout(20)
def test_hostile_text(text: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_code(Source.decode("m", text.encode("utf-8")))
    message = str(caught.value)
    assert len(message) < 2000
    assert message.isprintable() or set(c for c in message if not c.isprintable()) == {"\n"}


def test_too_many_words() -> None:
    with pytest.raises(ModelError, match=r"^m, line 2, column \d+: expected at most 2,000 words and signs, found more"):
        read_code(Source("m", HOSTILE["a sum of thousands"]))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"model \xff", "expected UTF-8, found byte 0xff at offset 6: save it as UTF-8"),
        (EXAMPLE.encode("utf-16"), "expected UTF-8, found byte 0xff at offset 0: save it as UTF-8"),
        (b"\xed\xa0\x80", "expected UTF-8, found byte 0xed at offset 0: save it as UTF-8"),
        (b" " * (MAX_BYTES + 1), "expected a model of at most 8,192 bytes, found more: shorten it"),
    ],
)
def test_hostile_bytes(data: bytes, expected: str) -> None:
    with pytest.raises(ModelError, match=f"^m: {expected}$"):
        Source.decode("m", data)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        Source.read(tmp_path)
    with pytest.raises(ModelError, match="cannot be read: No such file or directory"):
        Source.read(tmp_path / "absent")
    with pytest.raises(ModelError, match="at most 8,192 bytes"):
        Source.read(Path("/dev/zero"))


WORDS = [*'()=,:;+-*\n"#.', "  ", "\n    ", "model", "repeat", "true", "false", "M", "x", "d", "0", "1", "2147483647"]
WORDS += ["1.5", '"gelu"', "tokens", "token_embed", "learned_pos", "attention", "mlp", "norm", "head"]
WORDS += ["dropout", "logits"]


@given(st.lists(st.sampled_from(WORDS), max_size=60).map("".join), st.booleans())
def test_words_of_the_language_in_any_order(words: str, inside: bool) -> None:
    _answers(EXAMPLE.replace("  logits", f"  {words}\n  logits") if inside else words)


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_text(text: str) -> None:
    _answers(text)
    _answers(HEAD + "  d = " + text)


def _answers(text: str) -> None:
    try:
        read_code(Source("m", text))
    except ModelError as error:
        assert str(error).startswith("m, line ")
    with contextlib.suppress(ModelError):
        mend(Source("m", text))
