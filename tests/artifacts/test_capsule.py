"""One file that holds a record: written and read back, by others too, and every way to make it wrong."""

import io
import json
import tarfile
import tracemalloc

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import (
    Store,
    canonical,
    find_records,
    load_bundle,
    read_attestations,
    read_digests,
    read_record,
    record_bundles,
    ustar,
)
from artifacts.capsule import export_capsule, import_capsule
from artifacts.errors import ArtifactError, Corrupt, InvalidInput, Missing, NoSpace, UnknownVersion
from artifacts.fsck import fsck
from artifacts.gc import gc


@pytest.fixture
def other(tmp_path):
    return Store(tmp_path / "other")


@pytest.fixture
def files(tmp_path):
    for name in ("tokens.bin", "empty"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 7 if name == "tokens.bin" else b"")
    return {"data/tokens.bin": tmp_path / "tokens.bin", "data/empty": tmp_path / "empty"}


@pytest.fixture
def capsule(store, committed, files, tmp_path):
    path = tmp_path / "eine Kapsel 倉庫.capsule"
    export_capsule(store, committed, path, files, every_bundle=True)
    return path


def test_there_and_back(store, other, committed, capsule, files, tmp_path):
    contents = import_capsule(other, capsule, tmp_path / "taken" / "out")
    assert contents.record == committed
    assert read_record(other, committed) == read_record(store, committed)
    assert record_bundles(other, committed) == record_bundles(store, committed) == contents.bundles
    assert read_attestations(other, committed) == read_attestations(store, committed)
    assert read_digests(other, read_record(other, committed)) == [b"\x01" * 32, b"\x02" * 32]
    for bundle in contents.bundles.values():
        mine, its = load_bundle(store, bundle).tensors, load_bundle(other, bundle).tensors
        assert {name: t.tobytes() for name, t in mine.items()} == {name: t.tobytes() for name, t in its.items()}
    report = fsck(other)
    assert (report.missing, report.corrupt, report.dangling, report.leftovers) == ((), (), (), ())
    for name, path in files.items():
        assert (tmp_path / "taken" / "out" / name).read_bytes() == path.read_bytes()
    assert len([path for path in (tmp_path / "taken").rglob("*") if path.is_file()]) == len(files)


def test_the_same_content_gives_the_same_bytes(other, committed, capsule, files, tmp_path):
    """Whatever the store's compression, the order of the files and the umask."""
    other.level = 19
    import_capsule(other, capsule)
    again = tmp_path / "again"
    export_capsule(other, committed, again, dict(reversed(files.items())), every_bundle=True)
    assert again.read_bytes() == capsule.read_bytes()


def test_only_the_ends_unless_asked(store, other, committed, tmp_path):
    contents = export_capsule(store, committed, tmp_path / "c")
    assert sorted(contents.bundles) == [0, 2]
    assert import_capsule(other, tmp_path / "c") == contents
    assert sorted(record_bundles(other, committed)) == [0, 2]


def test_what_is_known_of_the_record_already_stays(store, committed, capsule, tmp_path):
    before = record_bundles(store, committed)
    export_capsule(store, committed, tmp_path / "c")
    import_capsule(store, tmp_path / "c")
    assert record_bundles(store, committed) == before
    assert len(read_attestations(store, committed)) == 2


def test_an_independent_reader(capsule, committed, files):
    """Written from docs/format.md, with the tar of the standard library."""
    with tarfile.open(capsule, "r:") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}
        assert all(member.isreg() and member.mtime == 0 and member.mode == 0o644 for member in archive.getmembers())
    names = list(members)
    contents = json.loads(members["capsule.json"])
    assert names[0] == "capsule.json"
    assert (contents["format"], contents["version"], contents["record"]) == ("samebits capsule", 1, committed)
    for name, data in members.items():
        kind, _, rest = name.partition("/")
        if kind in ("objects", "attestations"):
            assert blake3.blake3(data).hexdigest() == rest.removesuffix(".json")
    for file in contents["files"]:
        data = members[f"files/{file['name']}"]
        assert (blake3.blake3(data).hexdigest(), len(data)) == (file["hash"], file["size"])
        assert data == files[file["name"]].read_bytes()
    record = json.loads(members[f"objects/{committed}"])
    order = [committed, record["digests"]]
    for bundle in contents["bundles"]:
        order.append(bundle["bundle"])
        order += [chunk for t in json.loads(members[f"objects/{bundle['bundle']}"])["tensors"] for chunk in t["chunks"]]
    expected = [f"objects/{name}" for name in dict.fromkeys(order)]
    expected += [f"attestations/{name}.json" for name in contents["attestations"]]
    assert names[1:] == expected + [f"files/{file['name']}" for file in contents["files"]]
    assert [file["name"] for file in contents["files"]] == sorted(files)
    assert capsule.read_bytes().endswith(bytes(1024))


@given(st.integers(0, ustar.MAX_SIZE), st.sampled_from(["a", "a/b.c", "x" * 100, "files/" + "y" * 94]))
def test_headers_are_those_of_the_standard_library(size, name):
    member = tarfile.TarInfo(name)
    member.size = size
    assert ustar.header(name, size) == member.tobuf(tarfile.USTAR_FORMAT)


NAMES = ["", ".", "..", "../x", "/x", "a/../b", "a//b", "a/", "a/.b", ".x", "a\\b", "é", "a b", "a\n", "con:", "x" * 95]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_could_lead_out_are_not_written(store, committed, tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidInput):
        export_capsule(store, committed, tmp_path / "c", {name: tmp_path / "file"})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("names", [["a", "A"], ["a", "a/b"], ["A", "a/b"], ["x/y", "x/y/z"]])
def test_names_that_meet_are_not_written(store, committed, tmp_path, names):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidInput):
        export_capsule(store, committed, tmp_path / "c", dict.fromkeys(names, tmp_path / "file"))


def rebuild(capsule, change, tmp_path):
    """The capsule with its members, a list of [name, content], changed."""
    with tarfile.open(capsule, "r:") as archive:
        members = [[member.name, archive.extractfile(member).read()] for member in archive]
    change(members)
    target = tmp_path / "changed"
    with target.open("wb") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(1024))
    return target


def contents_with(**fields):
    def change(members):
        value = json.loads(members[0][1])
        value.update(fields)
        members[0][1] = canonical.dumps(value)

    return change


def file_called(name):
    """The first extra file renamed, in the contents and in the archive."""

    def change(members):
        value = json.loads(members[0][1])
        value["files"][0]["name"] = name
        members[0][1] = canonical.dumps(value)
        next(member for member in members if member[0] == "files/data/empty")[0] = f"files/{name}"

    return change


def damage(number):
    def change(members):
        members[number][1] = members[number][1][:-1] + b"?"

    return change


def emptied(members):
    members[-1][1] = b""


CHANGES = {
    "no contents": lambda members: members.pop(0),
    "object missing": lambda members: members.pop(3),
    "object twice": lambda members: members.insert(3, members[3]),
    "object more": lambda members: members.insert(3, ["objects/" + "0" * 64, b""]),
    "objects swapped": lambda members: members.insert(3, members.pop(4)),
    "objects' contents swapped": lambda members: members.insert(3, [members[3][0], members.pop(4)[1]]),
    "file missing": lambda members: members.pop(),
    "file more": lambda members: members.append(["files/x", b""]),
    "file damaged": damage(-1),
    "file emptied": emptied,
    "record damaged": damage(1),
    "digests damaged": damage(2),
    "chunk damaged": damage(5),
    "attestation damaged": damage(-3),
    "contents damaged": damage(0),
    "version": contents_with(version=2),
    "format": contents_with(format="samebits bundle"),
    "field": contents_with(more=1),
    "record": contents_with(record="../x"),
    "other record": contents_with(record="0" * 64),
    "bundles": contents_with(bundles=[]),
    "bundle": contents_with(bundles=[{"bundle": "0" * 64, "step": 0}, {"bundle": "1" * 64, "step": 2}]),
    "bundles' kind": contents_with(bundles=1),
    "attestations": contents_with(attestations=["1" * 64, "0" * 64]),
    "attestations' kind": contents_with(attestations=["../x"]),
    "no attestations": contents_with(attestations=[]),
    "files unsorted": contents_with(files=[{"hash": "0" * 64, "name": name, "size": 0} for name in "ba"]),
    "files' kind": contents_with(files=[[]]),
    "file's kind": contents_with(files=[{"hash": "0" * 64, "name": 1, "size": 0}]),
    "file's size": contents_with(files=[{"hash": "0" * 64, "name": "a", "size": -1}]),
    "file's boolean size": contents_with(files=[{"hash": "0" * 64, "name": "a", "size": True}]),
    **{f"file called {name!r}": file_called(name) for name in NAMES if len(name) < 90},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_capsule_is_refused(other, committed, capsule, tmp_path, change):
    inside = tmp_path / "inside"
    outside = sorted(tmp_path.rglob("*"))
    target = rebuild(capsule, CHANGES[change], tmp_path)
    with pytest.raises(Corrupt, match="capsule") as error:
        import_capsule(other, target, inside / "folder")
    assert isinstance(error.value, UnknownVersion) == (change == "version")
    assert find_records(other) == []
    gc(other)
    assert list(other.objects()) == []
    written = [path for path in tmp_path.rglob("*") if path not in outside and path != target]
    assert all(path.is_relative_to(inside) or path.is_relative_to(other.path) for path in written)


@pytest.mark.parametrize("kind", [bytes([kind]) for kind in b"\x001234567xgLKSV"])
@pytest.mark.parametrize("place", [0, -1])
def test_links_and_devices_are_refused(other, capsule, tmp_path, kind, place):
    with tarfile.open(capsule, "r:") as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive]
    with (tmp_path / "changed").open("wb") as file:
        for number, (member, data) in enumerate(members):
            if number == place % len(members):
                member.type, member.linkname = kind, "../../x"
            file.write(member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(1024))
    with pytest.raises(Corrupt, match=r"header|may not be called"):
        import_capsule(other, tmp_path / "changed", tmp_path / "out")
    assert not (tmp_path / "x").exists()


def test_every_cut_is_noticed(other, capsule, tmp_path):
    data = capsule.read_bytes()
    cut = tmp_path / "cut"
    ends = (0, 512, len(data) - 1024, len(data) - 512, len(data) - 1)
    places = {*range(0, len(data), len(data) // 50), *(end + by for end in ends for by in (-1, 0, 1))}
    for length in sorted(place for place in places if 0 <= place < len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises(Corrupt):
            import_capsule(other, cut)
    cut.write_bytes(data + b"\0")
    with pytest.raises(Corrupt, match="something follows"):
        import_capsule(other, cut)


def test_flipped_bits_are_noticed_wherever_they_are(other, capsule, tmp_path):
    data = capsule.read_bytes()
    flipped = tmp_path / "flipped"
    for place in range(0, len(data), len(data) // 150):
        flipped.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(Corrupt):
            import_capsule(other, flipped)
    assert find_records(other) == []


def test_a_size_beyond_what_fits_takes_no_memory(other, committed, capsule, tmp_path):
    """A header that announces 8 GiB, in place of the record and of the contents."""
    for at in (0, capsule.read_bytes().index(b"objects/")):
        data = bytearray(capsule.read_bytes())
        name = bytes(data[at : at + 100]).rstrip(b"\0").decode()
        data[at : at + 512] = ustar.header(name, ustar.MAX_SIZE)
        (tmp_path / "large").write_bytes(data)
        tracemalloc.start()
        with pytest.raises(Corrupt, match="at most"):
            import_capsule(other, tmp_path / "large")
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        tracemalloc.stop()


@given(st.binary(max_size=2000), st.booleans())
def test_capsules_with_anything_in_them(tmp_path_factory, data, with_header):
    base = tmp_path_factory.getbasetemp()
    (base / "any").write_bytes(ustar.header("capsule.json", len(data)) + data if with_header else data)
    with pytest.raises(Corrupt):
        import_capsule(Store(base / "any store"), base / "any", base / "any folder")
    assert not (base / "any folder").exists()


def test_memory_stays_within_an_object(store, other, committed, tmp_path):
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(100 * 2**20)
    tracemalloc.start()
    export_capsule(store, committed, tmp_path / "c", {"large": large})
    import_capsule(other, tmp_path / "c", tmp_path / "out")
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()
    assert (tmp_path / "out" / "large").stat().st_size == 100 * 2**20


@pytest.mark.parametrize("kind", ["crash", "space"])
def test_export_and_import_stopped_at_any_call(store, other, committed, capsule, tmp_path, disk, crash, kind):
    import errno
    import shutil

    fault = "crash" if kind == "crash" else errno.ENOSPC
    disk.arm(None, None)
    shutil.copytree(other.path, tmp_path / "counting")
    import_capsule(Store(tmp_path / "counting"), capsule, tmp_path / "counted")
    calls = len(disk.calls)
    for number in range(0, calls, 7):
        target = tmp_path / f"store{number}"
        shutil.copytree(other.path, target)
        disk.arm(number, fault)
        with pytest.raises((crash, NoSpace)):
            import_capsule(Store(target), capsule, tmp_path / f"out{number}")
        disk.arm(None, None)
        report = fsck(Store(target))
        assert (report.missing, report.corrupt) == ((), ())
        import_capsule(Store(target), capsule, tmp_path / f"again{number}")
        assert find_records(Store(target)) == [committed]
        shutil.rmtree(target)
    disk.arm(None, None)
    export_capsule(store, committed, tmp_path / "counted capsule")
    for number in range(len(disk.calls)):
        disk.arm(number, fault)
        with pytest.raises((crash, NoSpace)):
            export_capsule(store, committed, tmp_path / f"c{number}")
        disk.arm(None, None)
        written = tmp_path / f"c{number}"
        assert not written.exists() or written.read_bytes() == (tmp_path / "counted capsule").read_bytes()


def test_wrong_use(store, other, committed, capsule, files, tmp_path):
    with pytest.raises(InvalidInput, match="there already"):
        export_capsule(store, committed, capsule)
    with pytest.raises(InvalidInput, match="0000"):
        export_capsule(store, "0" * 64, tmp_path / "c")
    with pytest.raises(InvalidInput, match="cannot be read"):
        export_capsule(store, committed, tmp_path / "c", {"x": tmp_path / "nothing"})
    with pytest.raises(Missing, match="cannot open"):
        import_capsule(other, tmp_path / "nothing")
    with pytest.raises(InvalidInput, match="not empty"):
        import_capsule(other, capsule, tmp_path)
    with pytest.raises(InvalidInput, match="read-only"):
        import_capsule(Store(other.path, read_only=True), capsule)


def test_a_file_that_changes_meanwhile_is_noticed(store, committed, tmp_path, monkeypatch):
    from artifacts import capsule as module

    growing = tmp_path / "growing"
    growing.write_bytes(b"1234")
    real = module._members

    def later(*arguments):
        growing.write_bytes(b"12345")
        return real(*arguments)

    monkeypatch.setattr(module, "_members", later)
    with pytest.raises(InvalidInput, match="changed while"):
        export_capsule(store, committed, tmp_path / "c", {"x": growing})
    assert not (tmp_path / "c").exists()


def test_one_capsule_holds_numbers_of_every_kind(tmp_path, store, committed, other):
    """Chunks are stored as the numbers they are, so they compress as well as where they came from."""
    export_capsule(store, committed, tmp_path / "c")
    import_capsule(other, tmp_path / "c")
    for name in other.objects():
        assert other.object_path(name).stat().st_size == store.object_path(name).stat().st_size
    assert np.array_equal(load_bundle(other, read_record(other, committed).final_bundle).tensors["step"], np.array(2))


def test_errors_have_exit_codes(other, capsule, tmp_path):
    (tmp_path / "noise").write_bytes(io.BytesIO(b"\xff" * 3000).read())
    with pytest.raises(ArtifactError) as error:
        import_capsule(other, tmp_path / "noise")
    assert error.value.exit_code == 4
