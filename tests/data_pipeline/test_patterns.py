"""Which names a pattern matches, and in which order they come."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import SourceError
from data_pipeline.patterns import files_matching, in_order, select

NAMES = [
    "a",
    "b.md",
    "p/a.md",
    "p/q/a.md",
    "p/q/r/a.md",
    "p/.a.md",
    "p/.q/a.md",
    "p/[a].md",
    "P/a.md",
]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("a", ["a"]),
        ("*", ["a", "b.md"]),
        ("?", ["a"]),
        ("*.md", ["b.md"]),
        ("p/*.md", ["p/a.md", "p/[a].md"]),
        ("p/*/*.md", ["p/q/a.md"]),
        ("p/**/*.md", ["p/a.md", "p/q/a.md", "p/q/r/a.md", "p/[a].md"]),
        ("p/**/a.md", ["p/a.md", "p/q/a.md", "p/q/r/a.md"]),
        ("p/**", ["p/a.md", "p/q/a.md", "p/q/r/a.md", "p/[a].md"]),
        ("p/.*", ["p/.a.md"]),
        ("p/[a].md", ["p/[a].md"]),
        ("p/.q/*", ["p/.q/a.md"]),
        ("p", []),
        ("p/a?md", ["p/a.md"]),
        ("p/a+md", []),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, matches: list[str]) -> None:
    assert select(NAMES, pattern) == matches
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert sorted(files_matching(tmp_path, pattern)) == sorted(matches)


def test_order_is_that_of_utf8_bytes() -> None:
    # UTF-16 order would put U+10000 before U+FFFD; a locale would put a before Z, and é before z.
    names = ["Z", "a", "a/b", "a0", "z", "é", "\ufffd", "\U00010000"]
    expected = ["Z", "a", "a/b", "a0", "z", "é", "\ufffd", "\U00010000"]
    random.Random(1).shuffle(names)
    assert in_order(names) == expected


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.randoms())
def test_order_does_not_depend_on_the_order_of_finding(names: list[str], randomness: random.Random) -> None:
    shuffled = names * 2
    randomness.shuffle(shuffled)
    assert in_order(shuffled) == in_order(names)


def test_links_to_files_are_followed_and_links_to_folders_only_by_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_bytes(b"a")
    (tmp_path / "real" / "dangling.txt").symlink_to("nowhere")
    (tmp_path / "link.txt").symlink_to("real/a.txt")
    (tmp_path / "folder").symlink_to("real")
    assert sorted(files_matching(tmp_path, "**/*.txt")) == ["link.txt", "real/a.txt"]
    assert files_matching(tmp_path, "folder/*.txt") == ["folder/a.txt"]


@pytest.mark.skipif(sys.platform == "darwin", reason="the filesystem takes UTF-8 names only")
def test_a_name_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_bytes(b"")
    with pytest.raises(SourceError, match=r"not UTF-8"):
        files_matching(tmp_path, "*.txt")
