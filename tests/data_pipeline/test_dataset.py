"""`open_dataset` refuses every damage, and reads across shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import CorruptDataError, Tokens, open_dataset
from tests.data_pipeline.corpora import make_dataset


@pytest.fixture(params=["characters", "bpe"])
def directory(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("data_pipeline.shards.TOKENS_PER_SHARD", 100)
    tokenizer = {"kind": "bpe", "vocabulary": 258} if request.param == "bpe" else {"kind": "characters"}
    return make_dataset(tmp_path, {"a.txt": b"some text, some more text\n" * 20}, tokenizer=tokenizer)


def test_every_damaged_byte_is_found(directory: Path) -> None:
    hash_before = open_dataset(directory).hash
    for path in sorted(directory.iterdir()):
        good = path.read_bytes()
        for bad in (
            *(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 37)),
            good[:-1],
            good + b"\0",
            b"",
        ):
            path.write_bytes(bad)
            try:
                changed = open_dataset(directory)
            except CorruptDataError as error:
                # A change of the manifest may show as a missing file or another file's hash.
                assert str(directory if path.name == "manifest.json" else path) in str(error)
            else:
                # A well-formed manifest of the same files is another dataset.
                assert path.name == "manifest.json"
                assert changed.hash != hash_before
        path.write_bytes(good)
    open_dataset(directory)


def test_every_missing_file_is_named(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        good = path.read_bytes()
        path.unlink()
        with pytest.raises(CorruptDataError, match=path.name):
            open_dataset(directory)
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["train-00099.bin", "notes.txt", "folder/train-00000.bin"])
def test_a_file_too_many_is_named(directory: Path, name: str) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(b"")
    with pytest.raises(CorruptDataError, match=name):
        open_dataset(directory)


def test_swapped_shards_are_found(directory: Path) -> None:
    a, b = (directory / f"train-0000{row}.bin" for row in (0, 1))
    first = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(first)
    with pytest.raises(CorruptDataError, match="train-00000"):
        open_dataset(directory)


def rewrite(directory: Path, change: dict[str, Any]) -> None:
    path = directory / "manifest.json"
    path.write_bytes(rfc8785.dumps(json.loads(path.read_bytes()) | change))


@pytest.mark.parametrize("change", [{"more": 1}, {"dtype": "float32"}, {"format": "samebits dataset 2"}])
def test_a_manifest_that_means_something_else_is_refused(directory: Path, change: dict[str, Any]) -> None:
    rewrite(directory, change)
    with pytest.raises(CorruptDataError, match="manifest"):
        open_dataset(directory)


def test_a_split_that_disagrees_with_its_shards_is_refused(directory: Path) -> None:
    train = json.loads((directory / "manifest.json").read_bytes())["train"]
    rewrite(directory, {"train": train | {"tokens": train["tokens"] + 1}})
    with pytest.raises(CorruptDataError, match="its shards hold"):
        open_dataset(directory)


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    directory = make_dataset(tmp_path, {"a.txt": b"abab"})
    (directory / "train-00000.bin").write_bytes(b"\0\2")
    train = json.loads((directory / "manifest.json").read_bytes())["train"]
    train["shards"][0]["blake3"] = blake3(b"\0\2").hexdigest()
    rewrite(directory, {"train": train})
    with pytest.raises(CorruptDataError, match="ids below 2, found 2"):
        open_dataset(directory)


def test_no_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match="run prepare"):
        open_dataset(tmp_path / "none")


def test_tokens_are_mapped_read_only(directory: Path) -> None:
    for part in open_dataset(directory).train._parts:
        assert isinstance(part.base, np.memmap)
        assert not part.flags.writeable


LENGTHS = st.lists(st.integers(0, 5), max_size=6)


@given(
    LENGTHS,
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from([np.int32, np.uint32, np.int64]),
)
def test_reading_across_shards(lengths: list[int], start: int, count: int, dtype: type) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    tokens = Tokens(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else [])
    assert len(tokens) == len(whole)
    out = np.full(count, -1).astype(dtype)
    if start + count > len(whole):
        with pytest.raises(IndexError):
            tokens.read(start, out)
    else:
        tokens.read(start, out)
        assert out.tolist() == whole[start : start + count].tolist()
    assert tokens[start : start + count].tolist() == whole[start : start + count].tolist()
    assert tokens[-count:].tolist() == whole[-count:].tolist()


def test_single_tokens() -> None:
    tokens = Tokens([np.array([5, 6], np.uint8), np.array([7], np.uint8)])
    assert [tokens[row] for row in (0, 1, 2, -1)] == [5, 6, 7, 7]
    for row in (3, -4):
        with pytest.raises(IndexError):
            tokens[row]
    with pytest.raises(IndexError, match="step"):
        tokens[::2]
    with pytest.raises(IndexError):
        tokens.read(-1, np.zeros(1, np.int32))
