"""A store, a folder and a record of format version 1, made long ago, are read for ever."""

import json
import math
import shutil
from pathlib import Path

import blake3
import numpy as np
import pytest
import zstandard

from artifacts import (
    Store,
    encoding,
    find_records,
    import_folder,
    list_runs,
    load_bundle,
    read_attestations,
    read_digests,
    read_folder,
    read_record,
    record_bundles,
    resolve,
    save_bundle,
    write_folder,
)
from artifacts.fsck import fsck

FORMAT_1 = Path(__file__).parent / "fixtures" / "format-1"
RECORD = "75af06c52892db55e54c35c59cc93c31bf90f8e2d390f38065ce436ed790e5d0"
FINAL = "13eae848c01d33bbf77a51a0d142e207aa975b545c29d7221df8e942af5a792d"


def expected(step):
    return {
        "history/digest": np.arange(32 * step, dtype=np.uint8).reshape(step, 32),
        "history/loss": np.arange(step, dtype=np.float32) / 4,
        "m/w": np.linspace(-1, 1, 96, dtype=np.float32).reshape(12, 8),
        "numbers/f8": np.linspace(0, 1, 64, dtype=np.float64),
        "numbers/i4": np.arange(-32, 32, dtype=np.int32),
        "numbers/i8": np.array(-step, np.int64),
        "numbers/u2": np.arange(65472, 65536, dtype=np.uint16),
        "numbers/u4": np.arange(64, dtype=np.uint32) * 65537,
        "numbers/u8": np.array([2**64 - 1, step], np.uint64),
        "special": np.float32([np.inf, -np.inf, -0.0, 1e-45]),
        "v/w": np.zeros((12, 8), np.float32),
    }


# An object with the encoding for trained fp32 numbers, which those in the store are too few for.
SPLIT = "d3a7c63026969bf56d391877936ea3ed1fa9ca064303e49843d3c0bac5a7688a"


def split_content():
    words, x = [], 1
    for number in range(1001):
        x = (x * 1664525 + 1013904223) % 2**32
        words.append((x & 0x807FFFFF) | (120 + number % 15) << 23)
    words[500], words[1000] = 0x7F800000, 0x80000001
    return b"".join(word.to_bytes(4, "little") for word in words) + b"end"


def check_tensors(tensors, step):
    wanted = expected(step)
    assert sorted(tensors) == sorted(wanted)
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape)
        assert tensor.tobytes() == wanted[name].tobytes()


@pytest.fixture
def old():
    return Store(FORMAT_1 / "store", read_only=True)


def test_bundles(old):
    bundles = record_bundles(old, RECORD)
    assert sorted(bundles) == [0, 1, 2]
    assert bundles[2] == FINAL
    for step, name in bundles.items():
        bundle = load_bundle(old, name)
        assert bundle.state == {"step": step, "é": "☃"}
        check_tensors(bundle.tensors, step)


def test_record_and_attestations(old):
    assert find_records(old) == [RECORD]
    record = read_record(old, RECORD)
    assert record.tier == "debug"
    assert record.configuration == {"train": {"rate": 3e-4, "steps": 2}}
    assert record.results == {"train_loss": 1.5, "validation_loss": 2.0}
    assert record.tolerance == {"loss": 1e-3}
    assert read_digests(old, record) == [b"\x01" * 32, b"\x02" * 32]
    seen = [(a.activity, a.verdict["verdict"]) for a in read_attestations(old, RECORD).values()]
    assert sorted(seen) == [("trained", "complete"), ("verified", "bit-exact")]
    assert resolve(old, FINAL[:8]).records == (RECORD,)


def test_run(old):
    [run] = list_runs(old)
    assert (run.run_id, run.status, run.lineage) == ("tiny", "complete", {"from": None})
    assert run.bundles == record_bundles(old, RECORD)


def test_folder(tmp_path):
    bundle = read_folder(FORMAT_1 / "bundle", FINAL)
    check_tensors(bundle.tensors, 2)
    store = Store(tmp_path / "store")
    assert import_folder(store, FORMAT_1 / "bundle") == FINAL
    write_folder(store, FINAL, tmp_path / "again")
    for path in (FORMAT_1 / "bundle").rglob("*.*"):
        again = tmp_path / "again" / path.relative_to(FORMAT_1 / "bundle")
        assert again.read_bytes() == path.read_bytes()


def test_split_numbers():
    file = (FORMAT_1 / "objects" / SPLIT).read_bytes()
    assert (file[5], file[6]) == (2, 4)
    assert bytes(encoding.decode(file, len(split_content()), "it")) == split_content()


def test_it_is_whole_and_saving_the_same_gives_the_same_hashes(tmp_path):
    shutil.copytree(FORMAT_1 / "store", tmp_path / "store")
    store = Store(tmp_path / "store")
    report = fsck(store)
    assert (report.missing, report.corrupt, report.dangling, report.leftovers) == ((), (), (), ())
    before = set(store.objects())
    assert save_bundle(store, expected(2), {"é": "☃", "step": 2}) == FINAL
    assert set(store.objects()) == before


# The rest is written from docs/format.md alone and uses nothing of the package.


def independent_object(store, name):
    return independent_content((store / "objects" / name[:2] / name[2:]).read_bytes(), name)


def independent_split(payload, length):
    count = length // 4
    half = (count + 1) // 2
    base, low, rest = payload[0], payload[1 : 1 + 2 * count], payload[1 + 2 * count :]
    high, codes, rare = rest[:count], rest[count : count + half], iter(rest[count + half :])
    content = bytearray()
    for i in range(count):
        code = codes[i] % 16 if i < half else codes[i - half] // 16
        exponent = (base + code - 1) % 256 if code else next(rare)
        sign, mantissa = high[i] // 128, high[i] % 128 * 65536 + low[2 * i + 1] * 256 + low[2 * i]
        content += (sign * 2**31 + exponent * 2**23 + mantissa).to_bytes(4, "little")
    return bytes(content) + bytes(rare)


def independent_content(file, name):
    assert file[:5] == b"SBOB\x01"
    assert file[7] == 0
    encoding, width, length = file[5], file[6], int.from_bytes(file[8:16], "little")
    payload = file[16:]
    if encoding == 1:
        payload = zstandard.ZstdDecompressor().decompress(payload)
        count = length // width
        numbers = bytearray(payload)
        for i in range(count):
            for j in range(width):
                numbers[i * width + j] = payload[j * count + i]
        payload = bytes(numbers)
    elif encoding == 2:
        payload = independent_split(payload, length)
    assert len(payload) == length
    assert blake3.blake3(payload).hexdigest() == name
    return payload


def independent_bundle(name, chunk):
    manifest = json.loads(chunk(name))
    assert (manifest["format"], manifest["version"]) == ("samebits bundle", 1)
    tensors = {}
    for tensor in manifest["tensors"]:
        content = b"".join(chunk(name) for name in tensor["chunks"])
        dtype = np.dtype(tensor["dtype"]).newbyteorder("<")
        assert len(content) == math.prod(tensor["shape"]) * dtype.itemsize
        tensors[tensor["name"]] = np.frombuffer(content, dtype).reshape(tensor["shape"])
    return tensors, manifest["state"]


def independent_sealed(path):
    digits, document = path.read_bytes().split(b"\n", 1)
    assert blake3.blake3(document).hexdigest().encode() == digits
    return json.loads(document)


def test_an_independent_reader_of_split_numbers():
    assert independent_content((FORMAT_1 / "objects" / SPLIT).read_bytes(), SPLIT) == split_content()


def test_an_independent_reader():
    store = FORMAT_1 / "store"
    assert (store / "STORE_FORMAT").read_bytes() == b"samebits store 1\n"
    record = json.loads(independent_object(store, RECORD))
    assert independent_object(store, record["digests"]) == b"\x01" * 32 + b"\x02" * 32
    for listed in (
        independent_sealed(store / "index" / "records" / RECORD),
        independent_sealed(store / "runs" / "tiny" / "bundles"),
    ):
        for entry in listed["bundles"]:
            tensors, state = independent_bundle(entry["bundle"], lambda name: independent_object(store, name))
            assert state["step"] == entry["step"]
            check_tensors(tensors, entry["step"])
    assert record["final_bundle"] == entry["bundle"]
    assert independent_sealed(store / "runs" / "tiny" / "state")["value"]["status"] == "complete"
    for path in (store / "attestations" / RECORD).iterdir():
        assert blake3.blake3(path.read_bytes()).hexdigest() == path.stem
        assert json.loads(path.read_bytes())["subject"][0]["digest"]["blake3"] == RECORD


def test_an_independent_reader_of_the_folder():
    folder = FORMAT_1 / "bundle"
    data = (folder / "manifest.json").read_bytes()
    assert blake3.blake3(data).hexdigest() == FINAL
    for number, tensor in enumerate(json.loads(data)["tensors"]):
        content = (folder / "tensors" / f"{number:05}.bin").read_bytes()
        assert content == expected(2)[tensor["name"]].tobytes()
