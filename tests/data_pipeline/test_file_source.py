"""Source `file`."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import SourceError, StorageError, fetch
from tests.data_pipeline.corpora import make_spec, write_files

FILES = {"b.txt": b"b", "a/x.txt": b"x", "Z.txt": b"Z", "é.txt": b"e"}


def names(root: Path, *paths: str) -> list[str]:
    spec = make_spec(sources=[{"kind": "file", "paths": list(paths)}])
    return [document.name for document in fetch(spec, root / "raw", root).documents]


def test_documents_are_sorted_and_taken_once(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    expected = ["text/Z.txt", "text/a/x.txt", "text/b.txt", "text/é.txt"]
    assert names(tmp_path, "text/b.txt", "text/**/*.txt", "text/*.txt") == expected


def test_directory_order_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, FILES | {f"{n}/{n}.txt": b"n" for n in range(20)})
    expected = names(tmp_path, "text/**")
    walk, randomness = os.walk, random.Random(1)

    def shuffled(*arguments: Any, **options: Any) -> Iterator[Any]:
        for folder, folders, files in walk(*arguments, **options):
            randomness.shuffle(folders)
            randomness.shuffle(files)
            yield folder, folders, files

    monkeypatch.setattr(os, "walk", shuffled)
    for _ in range(3):
        assert names(tmp_path, "text/**") == expected


@pytest.mark.parametrize("pattern", ["text/c.txt", "text/*.md", "none/**/*.txt", "text/a"])
def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path, pattern: str) -> None:
    write_files(tmp_path, FILES)
    with pytest.raises(SourceError) as caught:
        names(tmp_path, "text/b.txt", pattern)
    assert repr(pattern) in str(caught.value)
    assert caught.value.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_a_document_of_two_sources_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    source = {"kind": "file", "paths": ["text/b.txt"]}
    with pytest.raises(SourceError, match=r"'text/b\.txt' in sources 0 and 1"):
        fetch(make_spec(sources=[source, source]), tmp_path / "raw", tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, FILES)

    def denied(path: bytes) -> Iterator[bytes]:
        raise PermissionError(errno.EACCES, "Permission denied", path)
        yield

    monkeypatch.setattr("data_pipeline.sources.file.file_chunks", denied)
    with pytest.raises(StorageError, match=r"Z\.txt: Permission denied"):
        names(tmp_path, "text/*.txt")
