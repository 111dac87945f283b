"""Both tokenizers: lossless, total or refusing clearly, the same everywhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import CorruptDataError, TextError, TooShortError, load_tokenizer
from data_pipeline.tokenizer import Bpe, Characters, base, bpe

CORPUS = (
    "the cat sat on the mat, and the dog sat on the log.\n\n  Indented   text\twith tabs\r\n"
    "naïve café, e\u0301, 日本語, 😀😀, 42 and 1234; don't won't\n\n\n\0\ufeff\n"
) * 5
NASTY = [
    "",
    "\n",
    " ",
    "   ",
    "\0",
    "\0\0a",
    "\ufeffa",
    "a\r\nb\rc\n",
    " a  b   c ",
    "\n\n\n a\n\n",
    "e\u0301\u0302",
    "👩\u200d👩\u200d👧 \U0001d518 \U0010ffff",
    "\u2028\u2029\x85\x0b\x0c\x1c",
    "<|endoftext|> [UNK] <s>",
    "Ġ Ċ Ā \u0120",
    "\ufffd\ufffe\uffff",
    "\u017f İ ß \ufb01",
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def trained() -> Bpe:
    return Bpe.train(io.StringIO(CORPUS, newline="\n"), 320)


def of(text: str) -> Characters:
    return Characters.of(set(text))


@pytest.mark.parametrize("text", NASTY)
def test_nasty_text_comes_back(trained: Bpe, text: str) -> None:
    for tokenizer in (of(text), trained):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32
        assert ids.ndim == 1
        assert tokenizer.decode(ids) == text
        assert len(ids) == 0 or int(ids.max()) < tokenizer.size


@given(TEXT)
def test_any_text_comes_back(trained: Bpe, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text
    assert of(text).decode(of(text).encode(text)) == text


@given(st.integers(0, 255))
def test_every_byte_is_a_token(trained: Bpe, byte: int) -> None:
    text = bytes([byte]).decode("latin-1")
    assert trained.decode([byte]) == (text if byte < 128 else "\ufffd")


@given(TEXT, st.integers(1, 5))
def test_a_stream_gives_the_ids_of_the_whole(trained: Bpe, text: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("bpe", "characters"):
            patch.setattr(f"data_pipeline.tokenizer.{module}.CHUNK_CHARACTERS", chunk)
        for tokenizer in (of(text), trained):
            parts = list(tokenizer.encode_stream(io.StringIO(text, newline="\n")))
            streamed = np.concatenate([np.zeros(0, np.uint32), *parts])
            assert streamed.tolist() == tokenizer.encode(text).tolist()


@given(st.text("ab \n\r'1.\u2028\x85"))
def test_early_cuts_are_those_of_the_library(trained: Bpe, text: str) -> None:
    whole = trained._library.encode(text, add_special_tokens=False).ids
    assert trained.encode(text).tolist() == whole


def test_merges_stay_within_pieces_and_shorten_text(trained: Bpe) -> None:
    assert trained.size == 320
    assert len(trained.encode(CORPUS)) < len(CORPUS.encode("utf-8")) / 2
    for token in trained._bytes:
        assert b"\n" not in token.rstrip(b"\n")


def test_white_space_is_kept_in_number(trained: Bpe) -> None:
    for count in range(1, 40):
        for space in (" ", "\n", "\t", "\r\n", "\u00a0"):
            text = "a" + space * count + "b"
            assert trained.decode(trained.encode(text)) == text


def test_characters_are_sorted_code_points() -> None:
    tokenizer = of("b\U00010000a\uffffé")
    assert tokenizer.decode(range(5)) == "abé\uffff\U00010000"
    assert tokenizer.to_bytes() == b'{"code_points":[97,98,233,65535,65536],"format":"samebits characters 1"}'


@pytest.mark.parametrize("unseen", ["c", "\0", "é", "😀", "\ufffd", "\U0010ffff", "\n"])
def test_an_unseen_character_is_named_with_its_position(unseen: str) -> None:
    with pytest.raises(TextError) as caught:
        of("abd").encode("ab" + unseen + "d" + unseen)
    assert f"U+{ord(unseen):04X}" in str(caught.value)
    assert "character 2" in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_position_counts_from_the_start_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.tokenizer.characters.CHUNK_CHARACTERS", 2)
    with pytest.raises(TextError, match="character 5"):
        list(of("ab").encode_stream(io.StringIO("ababac")))


@pytest.mark.parametrize("surrogate", ["\ud800", "\udfff", "\udc80"])
def test_a_lone_surrogate_is_refused_with_its_position(trained: Bpe, surrogate: str) -> None:
    for tokenizer in (of("ab\n"), trained):
        with pytest.raises(TextError, match=rf"U\+{ord(surrogate):04X} at character 3"):
            tokenizer.encode("ab\n" + surrogate)


def test_ids_outside_the_vocabulary(trained: Bpe) -> None:
    for tokenizer in (of("ab"), trained):
        size = tokenizer.size
        a = tokenizer.encode("a").tolist()
        assert tokenizer.decode([*a, size, 2**32 - 1, *a]) == "a\ufffd\ufffda"
        assert tokenizer.decode(np.array([size], np.uint64)) == base.REPLACEMENT
        assert tokenizer.decode([]) == ""
        with pytest.raises(TextError, match="-1 at position 1"):
            tokenizer.decode([0, -1])
        for bad in ([[0]], [0.5], 3):
            with pytest.raises(TextError, match="1-D"):
                tokenizer.decode(bad)


def test_a_sample_that_stops_inside_a_character_still_decodes(trained: Bpe) -> None:
    assert trained.decode(list("a😀".encode())[:-1]) == "a\ufffd"


def test_bytes_and_hash_come_back(trained: Bpe) -> None:
    for tokenizer in (of("abé"), trained):
        again = load_tokenizer(tokenizer.to_bytes(), tokenizer.kind, Path("t"))
        assert again.hash == tokenizer.hash
        assert again.size == tokenizer.size
        assert again.encode("abé").tolist() == tokenizer.encode("abé").tolist()


BAD_BPE = [[[256, 0]], [[0, 1], [0, 1]], [[0]], [[0, 1, 2]], [[0, -1]], [["a", "b"]]]
BAD_POINTS = [[2, 1], [1, 1], [0xD800], [0x110000], [-1], [1.5], ["a"]]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        *(("bpe", rfc8785.dumps({"format": "samebits bpe 1", "merges": m})) for m in BAD_BPE),
        *(("characters", rfc8785.dumps({"format": "samebits characters 1", "code_points": p})) for p in BAD_POINTS),
        ("bpe", b'{"format":"samebits bpe 2","merges":[]}'),
        ("bpe", b'{"format":"samebits bpe 1","merges":[] }'),
        ("bpe", b'{"format":"samebits bpe 1","merges":[],"more":1}'),
        ("characters", b'{"format":"samebits bpe 1","merges":[]}'),
        ("words", b"{}"),
        ("bpe", b""),
        ("bpe", b"\xff"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_corrupt(kind: str, data: bytes) -> None:
    with pytest.raises(CorruptDataError, match="where/t"):
        load_tokenizer(data, kind, Path("where/t"))


def test_a_vocabulary_the_text_cannot_give_is_refused_with_the_size_it_can() -> None:
    with pytest.raises(TooShortError) as caught:
        Bpe.train(io.StringIO("abab\n"), 400)
    possible = int(str(caught.value).split("gives only ")[1].split(":")[0])
    assert Bpe.train(io.StringIO("abab\n"), possible).size == possible


def test_tokens_learned_twice_keep_one_id(trained: Bpe) -> None:
    # 256 = "ab", 257 = "bc", and both a+bc and ab+c make "abc".
    tokenizer = Bpe([(97, 98), (98, 99), (97, 257), (256, 99)])
    assert tokenizer.size == 259
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_the_library_names_bytes_as_we_do() -> None:
    assert set(bpe._NAME_OF_BYTE) == set(bpe.pre_tokenizers.ByteLevel.alphabet())
    pre = bpe.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    every = "".join(map(chr, [*range(0x800), 0xFFFF, 0x10000, 0x40000, 0xFFFFF, 0x10FFFF]))
    (named, _), *_ = pre.pre_tokenize_str(every)
    assert named == bpe._name(every.encode("utf-8"))


TRAIN = """
import io, random
from data_pipeline.tokenizer import Bpe
# Every word has the same count, so each choice between pairs is a tie.
letters = random.Random(1).sample([chr(c) for c in range(0x61, 0x180) if chr(c).isalpha()], 120)
words = [a + b + c for a in letters[:20] for b in letters[20:40] for c in letters[40:50]]
random.Random(2).shuffle(words)
tokenizer = Bpe.train(io.StringIO("\\n".join(words)), 1500)
print(tokenizer.hash, sum(tokenizer.encode(" ".join(words)).tolist()))
"""


def test_training_does_not_depend_on_threads_or_hash_seeds(tmp_path: Path, run_python: Callable[..., str]) -> None:
    results = {
        run_python(TRAIN, tmp_path, PYTHONHASHSEED=seed, RAYON_NUM_THREADS=threads, **more)
        for seed, threads, more in [
            ("0", "1", {}),
            ("1", "2", {}),
            ("3", "3", {"TOKENIZERS_PARALLELISM": "false"}),
            ("random", "2", {"TOKENIZERS_PARALLELISM": "true"}),
        ]
    }
    assert len(results) == 1


def test_trained_tokenizer_is_pinned(trained: Bpe) -> None:
    assert trained.hash == "4e9efaa4d794fba3c7e5e4d470f8122f093be8c0999b169930ca296604d41eb3"
