"""Small hostile documents: an error at once, whatever they claim."""

import contextlib
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import Store, attestation, canonical, encoding, load_bundle, read_folder, record, save_bundle
from artifacts.bundle_list import list_document, open_bundle_list
from artifacts.errors import Corrupt, InvalidInput, NoSpace, UnknownVersion
from artifacts.hashing import hash_bytes
from artifacts.manifest import CHUNK_SIZE, read_manifest
from artifacts.sealed import read_sealed

HASH = "0" * 64


def tensor(**fields):
    return {"name": "x", "dtype": "float32", "shape": [1], "chunks": [HASH], **fields}


def manifest(*tensors, **fields):
    return {
        "format": "samebits bundle",
        "state": {},
        "tensors": list(tensors),
        "version": 1,
        **fields,
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "not a document"),
        (manifest(format="samebits record"), "not a document"),
        (manifest(version=2), "version 2"),
        (manifest(version=True), "version"),
        (manifest(time=0), "fields"),
        (manifest(state=[]), "state"),
        (manifest(tensors={}), "tensors"),
        (manifest([]), "fields"),
        (manifest(tensor(extra=1)), "fields"),
        (manifest(tensor(name="")), "name"),
        (manifest(tensor(name="../x y")), "name"),
        (manifest(tensor(name=1)), "name"),
        (manifest(tensor(name="x" * 201)), "name"),
        (manifest(tensor(dtype="object")), "dtype"),
        (manifest(tensor(dtype="float16")), "dtype"),
        (manifest(tensor(dtype=["float32"])), "dtype"),
        (manifest(tensor(shape=1)), "shape"),
        (manifest(tensor(shape=[-1])), "natural"),
        (manifest(tensor(shape=[1.5])), "natural"),
        (manifest(tensor(shape=[True])), "natural"),
        (manifest(tensor(shape=["1"])), "natural"),
        (manifest(tensor(shape=[1] * 17)), "at most 16"),
        (manifest(tensor(shape=[2**53 - 1])), "too large"),
        (manifest(tensor(shape=[2**30, 2**30, 2**30])), "too large"),
        (manifest(tensor(shape=[0, 2**53 - 1, 2**53 - 1], chunks=[])), "too large"),
        (manifest(tensor(shape=[2**40])), "takes 1048576 chunks, 1 are listed"),
        (manifest(tensor(chunks=[])), "takes 1 chunks"),
        (manifest(tensor(chunks=[HASH, HASH])), "takes 1 chunks, 2"),
        (manifest(tensor(shape=[0])), "takes 0 chunks"),
        (manifest(tensor(chunks=HASH)), "chunks"),
        (manifest(tensor(chunks=["../../etc/passwd"])), "chunks"),
        (manifest(tensor(chunks=[HASH.replace("0", "A")])), "chunks"),
        (manifest(tensor(), tensor()), "sorted"),
        (manifest(tensor(name="b"), tensor(name="a")), "sorted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_manifests(value, message):
    with pytest.raises(Corrupt, match=message):
        read_manifest(canonical.dumps(value), "it")


def test_a_bomb_of_equal_chunks_is_refused_before_memory_is_taken(store):
    """A manifest that compresses to nothing and claims 400 GB, all of them whole zero chunks."""
    zero = store.put(bytes(CHUNK_SIZE))
    count = 100_000
    name = store.put(canonical.dumps(manifest(tensor(shape=[count * CHUNK_SIZE // 4], chunks=[zero] * count))))
    tracemalloc.start()
    with pytest.raises(NoSpace, match="419430400000 bytes of memory"):
        load_bundle(store, name)
    assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    tracemalloc.stop()


def test_a_chunk_longer_than_its_place_is_not_unpacked(store):
    long = store.put(bytes(CHUNK_SIZE))
    name = store.put(canonical.dumps(manifest(tensor(chunks=[long]))))
    with pytest.raises(Corrupt, match=f"tensor x, chunk 0: object {long}: .* at most 20 are allowed"):
        load_bundle(store, name)
    short = store.put(b"abc")
    name = store.put(canonical.dumps(manifest(tensor(chunks=[short]))))
    with pytest.raises(Corrupt, match=r"tensor x, chunk 0: .* expected 4 bytes, found 3"):
        load_bundle(store, name)


def test_a_folder_cannot_name_files_elsewhere(tmp_path):
    (tmp_path / "tensors").mkdir()
    (tmp_path / "manifest.json").write_bytes(canonical.dumps(manifest(tensor(name="../../x"))))
    with pytest.raises(Corrupt, match="name"):
        read_folder(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**53 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
VALID = manifest(tensor(), tensor(name="y", shape=[0], chunks=[]))


@st.composite
def nearly(draw, valid):
    """A document with one place in it replaced by something else."""
    value = json.loads(json.dumps(valid))
    place, key = value, draw(st.sampled_from(sorted(value)))
    while isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
        place = place[key]
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = draw(JSON)
    return value


@given(nearly(VALID))
def test_manifests_with_anything_anywhere(value):
    try:
        data = canonical.dumps(value)
    except InvalidInput:
        return
    try:
        found = read_manifest(data, "it")
    except Corrupt:
        return
    assert all(entry.nbytes <= len(entry.chunks) * CHUNK_SIZE for entry in found.tensors)


@given(
    st.dictionaries(st.text(max_size=12), JSON, max_size=4),
    st.sampled_from([0, 1, 2, True, "1", None]),
)
def test_records_with_anything_in_them(value, version):
    try:
        data = canonical.dumps({**value, "format": "samebits record", "version": version})
    except InvalidInput:
        return
    with pytest.raises(Corrupt) as error:
        record.loads(data, "it")
    assert isinstance(error.value, UnknownVersion) == (repr(version) != "1")


@given(st.binary(max_size=200), st.booleans())
def test_sealed_files_with_anything_in_them(tmp_path_factory, data, sealed):
    path = tmp_path_factory.getbasetemp() / "sealed"
    path.write_bytes(hash_bytes(data).encode() + b"\n" + data if sealed else data)
    try:
        value = read_sealed(path, "it")
    except Corrupt:
        return
    assert canonical.dumps(value) == data


def test_states_of_any_json_round_trip(tmp_path):
    store = Store(tmp_path / "store")
    state = {"": None, "é\u2028\0": [1, [2.5, {"\U0001f600": ""}]], "__class__": "x"}
    name = save_bundle(store, {"x": np.float32([1])}, state)
    assert load_bundle(store, name).state == state


RECORD = json.loads(
    record.dumps(
        record.Record(
            **dict.fromkeys(("pipeline", "specification", "dataset", "tokenizer"), HASH),
            lock={"prepare": {"deps": []}},
            configuration={"tier": "debug"},
            tier="debug",
            first_bundle=HASH,
            final_bundle=HASH,
            steps=3,
            digests=HASH,
            results={"validation": {"2": 1.5}},
            sources={"engine/plan.py": HASH},
            sources_digest=record.sources_digest({"engine/plan.py": HASH}),
            hardware={"cpu": "x"},
            tolerance={"loss": 0.5},
        )
    )
)
ATTESTATION = attestation.statement(
    attestation.Attestation(HASH, "verified", {"verdict": "differs", "step": 3}, {"cpu": {"model": "x"}}, "t", "u")
)
INDEX = list_document("samebits record index", {0: HASH, 7: "1" * 64})


@given(nearly(RECORD))
def test_records_with_anything_anywhere(value):
    read_or_refuse(value, lambda data: record.dumps(record.loads(data, "it")))


@given(nearly(ATTESTATION))
def test_attestations_with_anything_anywhere(value):
    read_or_refuse(value, lambda data: canonical.dumps(attestation.statement(attestation.loads(data, HASH, "it"))))


@given(nearly(INDEX))
def test_lists_of_bundles_with_anything_anywhere(value):
    kind = "samebits record index"
    read_or_refuse(
        value,
        lambda data: canonical.dumps(list_document(kind, open_bundle_list(canonical.loads(data), kind, "it"))),
    )


def read_or_refuse(value, read_and_write):
    """What is read is all that was there."""
    try:
        data = canonical.dumps(value)
    except InvalidInput:
        return
    try:
        again = read_and_write(data)
    except Corrupt:
        return
    assert again == data


def object_files():
    """One of every encoding, with their contents."""
    random = np.random.default_rng(5)
    numbers = (random.standard_normal(2**14 + 1) * 0.02).astype("<f4").tobytes() + b"xyz"
    contents = [
        (random.bytes(300), 1),
        (b"abc" * 100, 1),
        (np.arange(100, dtype="<u2").tobytes(), 2),
        (np.arange(100, dtype="<i8").tobytes() + b"xyz", 8),
        (numbers, 4),
    ]
    return [
        (b"".join(map(bytes, encoding.encode(memoryview(content), width, 1))), content) for content, width in contents
    ]


OBJECTS = object_files()


@given(st.data())
def test_object_files_with_a_piece_replaced(data):
    """The rest is the hash's: that whatever is decoded has at most the length that was expected, and nothing is written
    beyond it."""
    file, content = data.draw(st.sampled_from(OBJECTS))
    start = data.draw(st.integers(0, len(file)) | st.integers(0, encoding.HEADER_SIZE))
    end = data.draw(st.integers(start, min(len(file), start + 40)))
    spoilt = file[:start] + data.draw(st.binary(max_size=40)) + file[end:]
    room = bytearray(len(content) + 16)
    with contextlib.suppress(Corrupt):
        assert len(encoding.decode(spoilt, len(content), "it")) <= len(content)
    with contextlib.suppress(Corrupt):
        encoding.decode_into(spoilt, memoryview(room)[: len(content)], "it")
    assert room[len(content) :] == bytes(16)
