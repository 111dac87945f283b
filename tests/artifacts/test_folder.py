"""A bundle as a folder of plain files."""

import numpy as np
import pytest

from artifacts import (
    Store,
    folder_hash,
    import_folder,
    load_bundle,
    read_folder,
    save_bundle,
    write_folder,
)
from artifacts.errors import Corrupt, InvalidInput, Missing, NoSpace
from artifacts.manifest import CHUNK_SIZE


@pytest.fixture
def big(tensors):
    return tensors | {"big": np.arange(CHUNK_SIZE // 4 + 3, dtype=np.uint32)}


@pytest.fixture
def written(store, big, tmp_path):
    name = save_bundle(store, big, {"step": 2})
    write_folder(store, name, tmp_path / "ein Bündel")
    return tmp_path / "ein Bündel", name


def test_round_trip(written, big, tmp_path):
    folder, name = written
    bundle = read_folder(folder, name)
    assert folder_hash(folder) == name
    assert bundle.state == {"step": 2}
    assert {key: tensor.tobytes() for key, tensor in bundle.tensors.items()} == {
        key: tensor.tobytes() for key, tensor in big.items()
    }
    other = Store(tmp_path / "other")
    assert import_folder(other, folder) == name
    load_bundle(other, name)


def test_the_same_bytes_from_every_store(written, big, tmp_path):
    folder, name = written
    other = Store(tmp_path / "other", level=9)
    save_bundle(other, dict(reversed(big.items())), {"step": 2})
    write_folder(other, name, tmp_path / "again")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) == 1 + len(big)
    again = tmp_path / "again"
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert all((folder / file).read_bytes() == (again / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("no manifest", Missing, "manifest.json"),
        ("no tensor", Missing, "00003.bin"),
        ("extra tensor", Corrupt, r"unknown files \['00099.bin'\]"),
        ("extra file", Corrupt, r"unknown files \['notes.txt'\]"),
        ("swapped", Corrupt, "tensor m/wte: chunk 0"),
        ("shortened", Corrupt, "tensor big: expected"),
        ("lengthened", Corrupt, "tensor big: expected"),
        ("a folder", Corrupt, "00000.bin: tensor big"),
    ],
)
def test_damage(written, damage, error, message):
    folder, _ = written
    first = folder / "tensors" / "00000.bin"
    match damage:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "no tensor":
            (folder / "tensors" / "00003.bin").unlink()
        case "extra tensor":
            (folder / "tensors" / "00099.bin").write_bytes(b"")
        case "extra file":
            (folder / "notes.txt").write_bytes(b"")
        case "swapped":
            m, v = folder / "tensors" / "00003.bin", folder / "tensors" / "00005.bin"
            assert m.stat().st_size == v.stat().st_size
            m.rename(folder / "tmp")
            v.rename(m)
            (folder / "tmp").rename(v)
        case "shortened":
            first.write_bytes(first.read_bytes()[:-1])
        case "lengthened":
            first.write_bytes(first.read_bytes() + b"\0")
        case "a folder":
            first.unlink()
            first.mkdir()
    with pytest.raises(error, match=message) as found:
        read_folder(folder)
    assert found.value.exit_code == 4


def test_another_bundle_than_expected(written):
    with pytest.raises(Corrupt, match="expected bundle " + "0" * 64):
        read_folder(written[0], "0" * 64)


def test_a_folder_is_not_written_over(written, store):
    folder, name = written
    with pytest.raises(InvalidInput, match="not empty"):
        write_folder(store, name, folder)


def test_too_little_space(written, store, tmp_path, monkeypatch):
    monkeypatch.setattr("artifacts.filesystem.free_space", lambda path: 1000)
    with pytest.raises(NoSpace, match="1000 available"):
        write_folder(store, written[1], tmp_path / "other")
