"""`prepare`: text to tokens, all or nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import (
    CorruptDataError,
    DataError,
    Dataset,
    TextError,
    TooShortError,
    fetch,
    open_dataset,
    prepare,
)
from data_pipeline.tokenizer.bpe import LIBRARY_VERSION
from tests.data_pipeline.corpora import make_dataset, make_spec, write_files

BPE = {"kind": "bpe", "vocabulary": 260}


def text_of(dataset: Dataset) -> str:
    splits = (dataset.train, dataset.validation)
    return "".join(dataset.tokenizer.decode(split[:]) for split in splits)


def test_the_manifest_says_everything(tmp_path: Path) -> None:
    files = {"a.txt": b"abcabc\r\n", "b.txt": b"cab\n"}
    directory = make_dataset(tmp_path, files, cleaning=["newlines"], validation_permille=250)
    data = (directory / "manifest.json").read_bytes()
    train, validation, tokenizer = (
        b"\1\2\3\1\2\3\0\3\1",
        b"\2\0",
        (directory / "tokenizer.json").read_bytes(),
    )
    assert data == rfc8785.dumps(json.loads(data))
    assert json.loads(data) == {
        "format": "samebits dataset 1",
        "dtype": "uint8",
        "tokenizer": {"kind": "characters", "size": 4, "blake3": blake3(tokenizer).hexdigest()},
        "validation_permille": 250,
        "train": {
            "characters": 9,
            "tokens": 9,
            "shards": [{"file": "train-00000.bin", "tokens": 9, "blake3": blake3(train).hexdigest()}],
        },
        "validation": {
            "characters": 2,
            "tokens": 2,
            "shards": [
                {
                    "file": "validation-00000.bin",
                    "tokens": 2,
                    "blake3": blake3(validation).hexdigest(),
                }
            ],
        },
        "provenance": {
            "sources": [{"kind": "file", "paths": ["text/**"]}],
            "documents": [
                {"name": f"text/{n}", "source": 0, "size": len(d), "blake3": blake3(d).hexdigest()}
                for n, d in files.items()
            ],
            "cleaning": ["newlines"],
            "libraries": {},
        },
    }
    assert (directory / "train-00000.bin").read_bytes() == train
    assert (directory / "validation-00000.bin").read_bytes() == validation
    dataset = open_dataset(directory)
    assert dataset.hash == blake3(data).hexdigest()
    assert sorted(path.name for path in directory.iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train-00000.bin",
        "validation-00000.bin",
    ]


def test_hashes_are_pinned(tmp_path: Path) -> None:
    files = {"a.txt": "Ünïcödé\r\n\ufeff 😀".encode() * 9, "b.txt": b"plain text, plain\n" * 9}
    assert (
        open_dataset(make_dataset(tmp_path / "c", files)).hash
        == "67517d934f5921b7782472e516c9b82dedb9ba80b7858f4cbf5a92ad44733abd"
    )
    dataset = open_dataset(make_dataset(tmp_path / "b", files, tokenizer=BPE))
    # The library's version is in the manifest, so what is pinned is what it decides.
    manifest = dataset.manifest
    shards = [shard.blake3 for shard in (*manifest.train.shards, *manifest.validation.shards)]
    assert [dataset.tokenizer.hash, *shards] == [
        "4fc59a8a66c97c05384457945c951dc0c9edf4590ec054e37c37c112ada8113a",
        "9734c87492eeaae66b09d65fd69150ed7f5617a8de81bae4a99be5f93d5d74f0",
        "69eaf2a57ac7631124b42a8d60a9c4dca7e6adc8b33bd14616b8e92952234862",
    ]


def test_bpe_names_the_library_that_can_change_bits(tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(tmp_path, {"a": b"abababab" * 9}, tokenizer=BPE))
    assert dataset.manifest.provenance.libraries == {"tokenizers": LIBRARY_VERSION}


@pytest.mark.parametrize(
    ("documents", "text"),
    [
        ([b"a\n", b"b\n"], "a\nb\n"),
        ([b"a", b"b"], "a\nb"),
        ([b"a\n\n", b"\nb"], "a\n\n\nb"),
        ([b"a", b"", b"b"], "a\nb"),
        ([b"", b"ab", b""], "ab"),
        ([b"a\r", b"b"], "a\r\nb"),
    ],
)
def test_documents_are_joined_at_a_line_feed(tmp_path: Path, documents: list[bytes], text: str) -> None:
    files = {f"{row}.txt": data for row, data in enumerate(documents)}
    assert text_of(open_dataset(make_dataset(tmp_path, files))) == text


@pytest.mark.parametrize("tokenizer", [{"kind": "characters"}, {"kind": "bpe", "vocabulary": 256}])
@settings(max_examples=25)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=2), permille=st.integers(1, 999))
def test_any_text_comes_back_and_is_split_exactly(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: dict[str, Any], text: str, permille: int
) -> None:
    held_out = len(text) * permille // 1000
    root = tmp_path_factory.mktemp("any")
    files = {"a.txt": text.encode("utf-8")}
    if held_out == 0:
        with pytest.raises(TooShortError):
            make_dataset(root, files, tokenizer=tokenizer, validation_permille=permille)
        return
    directory = make_dataset(root, files, tokenizer=tokenizer, validation_permille=permille)
    dataset = open_dataset(directory)
    assert dataset.tokenizer.decode(dataset.train[:]) == text[: len(text) - held_out]
    assert dataset.tokenizer.decode(dataset.validation[:]) == text[len(text) - held_out :]
    assert dataset.manifest.validation.characters == held_out


@pytest.mark.parametrize("data", [b"", b"a", b"a" * 19])
@pytest.mark.parametrize("tokenizer", [{"kind": "characters"}, {"kind": "bpe", "vocabulary": 256}])
def test_text_too_short_to_hold_any_out(tmp_path: Path, data: bytes, tokenizer: dict[str, Any]) -> None:
    with pytest.raises(TooShortError) as caught:
        make_dataset(tmp_path, {"a.txt": data}, tokenizer=tokenizer, validation_permille=50)
    assert f"has {len(data)} characters" in str(caught.value)
    assert "at least 20" in str(caught.value)
    assert caught.value.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "text"]


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (b"ab\xff", 2),
        (b"\xc0\x80", 0),
        (b"a\xed\xa0\x80", 1),
        (b"abc\xe2\x82", 3),
        (b"\xff\xfea\0", 0),
    ],
)
def test_what_is_not_utf8_is_refused_with_its_offset(tmp_path: Path, data: bytes, offset: int) -> None:
    with pytest.raises(TextError) as caught:
        make_dataset(tmp_path, {"ok.txt": b"fine", "play.txt": data})
    assert "text/play.txt" in str(caught.value)
    assert f"byte offset {offset} " in str(caught.value)
    assert not (tmp_path / "dataset").exists()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(256, "<u1"), (257, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (70_000, "<u4")],
)
def test_tokens_are_as_wide_as_the_vocabulary_needs(tmp_path: Path, size: int, dtype: str) -> None:
    points = [point for point in range(size + 0x800) if not 0xD800 <= point < 0xE000][:size]
    random.Random(1).shuffle(points)
    text = "".join(map(chr, points))
    directory = make_dataset(tmp_path, {"a.txt": text.encode("utf-8")})
    dataset = open_dataset(directory)
    assert dataset.tokenizer.size == size
    stored = np.fromfile(directory / "train-00000.bin", dtype)
    assert stored.tolist() == dataset.train[:].tolist()
    assert text_of(dataset) == text
    assert dataset.tokenizer.encode(chr(max(points))).tolist() == [size - 1]


def test_a_split_fills_shards_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.shards.TOKENS_PER_SHARD", 7)
    text = "the quick brown fox jumps over the lazy dog"
    dataset = open_dataset(make_dataset(tmp_path, {"a.txt": text.encode()}))
    assert [shard.tokens for shard in dataset.manifest.train.shards] == [7, 7, 7, 1]
    assert [shard.tokens for shard in dataset.manifest.validation.shards] == [7, 7, 7]
    assert [shard.file for shard in dataset.manifest.train.shards][-1] == "train-00003.bin"
    assert text_of(dataset) == text


def test_the_merges_have_not_seen_the_validation_split(tmp_path: Path) -> None:
    directory = make_dataset(tmp_path, {"a.txt": b"abab" * 9 + b"xyxy" * 9}, tokenizer=BPE | {"vocabulary": 257})
    tokenizer = open_dataset(directory).tokenizer
    assert len(tokenizer.encode("abab")) == 2
    assert len(tokenizer.encode("xyxy")) == 4


@pytest.mark.parametrize("change", ["flip", "longer", "missing", "extra", "manifest", "no manifest"])
def test_damaged_raw_documents_are_corrupt(tmp_path: Path, change: str) -> None:
    make_dataset(tmp_path, {"a.txt": b"some text"})
    raw = tmp_path / "raw"
    document = raw / "documents" / "000000.txt"
    match change:
        case "flip":
            document.write_bytes(b"tome text")
        case "longer":
            document.write_bytes(b"some text\n")
        case "missing":
            document.unlink()
        case "extra":
            (raw / "documents" / "000001.txt").write_bytes(b"")
        case "manifest":
            (raw / "manifest.json").write_bytes((raw / "manifest.json").read_bytes() + b"\n")
        case "no manifest":
            (raw / "manifest.json").unlink()
    with pytest.raises(CorruptDataError, match=r"fetch|canonical") as caught:
        prepare(make_spec(), raw, tmp_path / "dataset")
    assert caught.value.exit_code == 4
    assert str(raw) in str(caught.value)


def test_documents_of_another_configuration_are_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path, {"a.txt": b"some text"})
    spec = make_spec(sources=[{"kind": "file", "paths": ["text/a.txt"]}])
    with pytest.raises(DataError, match="run fetch again") as caught:
        prepare(spec, tmp_path / "raw", tmp_path / "dataset")
    assert caught.value.exit_code == 2


ENVIRONMENT = """
import os, sys
from pathlib import Path
from data_pipeline import DataSpec, fetch, open_dataset, prepare
os.umask(int(sys.argv[2], 8))
root = Path(sys.argv[1])
for tokenizer in ({"kind": "characters"}, {"kind": "bpe", "vocabulary": 280}):
    spec = DataSpec.model_validate({
        "sources": [{"kind": "file", "paths": ["text/**"]}],
        "cleaning": ["nfc"], "tokenizer": tokenizer, "validation_permille": 300,
    })
    fetch(spec, Path("raw"), root)
    prepare(spec, Path("raw"), Path("dataset"))
    print(open_dataset(Path("dataset")).hash)
"""


def test_the_machine_around_it_changes_no_bit(tmp_path: Path, run_python: Any) -> None:
    text = "Ünïcödé e\u0301 text\r\n with 日本語 and 😀, again and again\n".encode()
    files = {f"é {row} ü.txt": text * 20 for row in "31204"}
    write_files(tmp_path / "plain", files)
    write_files(tmp_path / "ein Läger 倉庫", dict(sorted(files.items())))
    results = set()
    for root, umask, environment in [
        ("plain", "022", {"PYTHONHASHSEED": "0"}),
        ("ein Läger 倉庫", "077", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ("plain", "000", {"LC_ALL": "tr_TR.ISO-8859-9", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}),
        ("ein Läger 倉庫", "022", {"RAYON_NUM_THREADS": "1", "PYTHONWARNDEFAULTENCODING": "1"}),
    ]:
        cwd = tmp_path / root
        arguments = (".", umask) if root == "plain" else (str(cwd), umask)
        results.add(run_python(ENVIRONMENT, cwd, *arguments, **environment))
    assert len(results) == 1
    assert len(results.pop().split()) == 2


def test_fetch_and_prepare_can_be_repeated(tmp_path: Path) -> None:
    first = open_dataset(make_dataset(tmp_path, {"a.txt": b"some text"})).hash
    spec = make_spec()
    fetch(spec, tmp_path / "raw", tmp_path)
    prepare(spec, tmp_path / "raw", tmp_path / "dataset")
    assert open_dataset(tmp_path / "dataset").hash == first
