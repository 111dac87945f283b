"""`fetch`: what it writes, and that it writes all or nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import rfc8785
from blake3 import blake3

from data_pipeline import NoSpaceError, StorageError, fetch
from data_pipeline.sources import file as file_source
from tests.data_pipeline.corpora import make_spec, write_files

FILES = {"a.txt": b"a\r\n\xff\0", "b.txt": b""}


def test_raw_files_and_manifest(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    spec = make_spec()
    manifest = fetch(spec, tmp_path / "raw", tmp_path)
    data = (tmp_path / "raw" / "manifest.json").read_bytes()
    assert data == rfc8785.dumps(json.loads(data))
    assert json.loads(data) == {
        "format": "samebits raw 1",
        "sources": [{"kind": "file", "paths": ["text/**"]}],
        "documents": [
            {
                "name": f"text/{name}",
                "source": 0,
                "file": f"documents/{row:06d}.txt",
                "size": len(content),
                "blake3": blake3(content).hexdigest(),
            }
            for row, (name, content) in enumerate(FILES.items())
        ],
    }
    for document, content in zip(manifest.documents, FILES.values(), strict=True):
        assert (tmp_path / "raw" / document.file).read_bytes() == content
    found = {path.relative_to(tmp_path / "raw").as_posix() for path in (tmp_path / "raw").rglob("*")}
    assert found == {"manifest.json", "documents", "documents/000000.txt", "documents/000001.txt"}


def test_an_earlier_fetch_is_replaced(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    fetch(make_spec(), tmp_path / "raw", tmp_path)
    (tmp_path / "text" / "a.txt").unlink()
    assert len(fetch(make_spec(), tmp_path / "raw", tmp_path).documents) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "text"]


def test_a_failed_fetch_leaves_the_earlier_one(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    fetch(make_spec(), tmp_path / "raw", tmp_path)
    before = (tmp_path / "raw" / "manifest.json").read_bytes()
    (tmp_path / "text" / "a.txt").write_bytes(b"changed")
    with pytest.raises(Exception, match="none"):
        fetch(make_spec(sources=[{"kind": "file", "paths": ["none"]}]), tmp_path / "raw", tmp_path)
    assert (tmp_path / "raw" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_not_a_raw_directory_is_never_replaced(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, FILES)
    target = tmp_path / "raw"
    precious = target / "thesis.txt" if kind == "directory" else target
    precious.parent.mkdir(exist_ok=True)
    precious.write_bytes(b"precious")
    with pytest.raises(StorageError, match="holds no manifest"):
        fetch(make_spec(), target, tmp_path)
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    write_files(tmp_path, FILES)

    def full(path: Path) -> Iterator[bytes]:
        yield b"half"
        raise OSError(number, "full", str(path))

    monkeypatch.setattr(file_source, "file_chunks", full)
    with pytest.raises(NoSpaceError) as caught:
        fetch(make_spec(), tmp_path / "raw", tmp_path)
    assert caught.value.exit_code == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_leftovers_of_a_killed_process_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    dead, living = (tmp_path / f".raw.{digit * 16}.partial" for digit in "01")
    other = tmp_path / ".raw.mine.partial"
    for path in (dead, living, other):
        path.mkdir()
        (path / "x").write_bytes(b"x")
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    fetch(make_spec(), tmp_path / "raw", tmp_path)
    os.close(lock)
    assert not dead.exists()
    assert (living / "x").exists()
    assert (other / "x").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    (tmp_path / "blocked").write_bytes(b"")
    with pytest.raises(StorageError, match="blocked"):
        fetch(make_spec(), tmp_path / "blocked" / "raw", tmp_path)


def test_file_modes_follow_the_umask_and_change_no_bytes(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    before = os.umask(0o077)
    try:
        fetch(make_spec(), tmp_path / "raw", tmp_path)
        first = (tmp_path / "raw" / "manifest.json").read_bytes()
        os.umask(0o022)
        fetch(make_spec(), tmp_path / "raw", tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "raw" / "manifest.json").read_bytes() == first
    assert (tmp_path / "raw").stat().st_mode & 0o777 == 0o755
