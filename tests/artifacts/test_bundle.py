"""Bundles: the same tensors and state have the same hash, and come back bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from artifacts import Store, load_bundle, save_bundle, verify_bundle
from artifacts.bundle import load_manifest
from artifacts.errors import Corrupt, InvalidInput, NoSpace
from artifacts.manifest import CHUNK_SIZE, TensorEntry

STATE = {"step": 2, "tier": "portable"}
DTYPES = [np.dtype(name) for name in TensorEntry.ITEM_SIZES]


def same_bits(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def test_round_trip(store, tensors):
    name = save_bundle(store, tensors, STATE)
    bundle = load_bundle(store, name)
    assert bundle.state == STATE
    assert sorted(bundle.tensors) == sorted(tensors)
    assert all(same_bits(bundle.tensors[key], tensors[key]) for key in tensors)


@settings(max_examples=50)
@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(
            dtype,
            hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
            elements=hnp.from_dtype(dtype),  # NaN payloads, infinities and denormals among them
        )
    )
)
def test_every_dtype_and_shape_round_trips(tmp_path_factory, tensor):
    store = Store(tmp_path_factory.mktemp("store"))
    name = save_bundle(store, {"x": tensor}, {})
    assert same_bits(load_bundle(store, name).tensors["x"], tensor)


@pytest.mark.parametrize("size", [CHUNK_SIZE - 4, CHUNK_SIZE, CHUNK_SIZE + 4, 2 * CHUNK_SIZE + 8])
def test_chunk_boundaries(store, size):
    tensor = np.arange(size // 4, dtype=np.uint32)
    name = save_bundle(store, {"x": tensor}, {})
    assert len(load_manifest(store, name).tensor("x").chunks) == -(-size // CHUNK_SIZE)
    assert same_bits(load_bundle(store, name).tensors["x"], tensor)


def test_the_hash_does_not_depend_on_level_order_or_layout(tmp_path, tensors):
    names = {save_bundle(Store(tmp_path / f"{level}", level=level), tensors, STATE) for level in (-5, 1, 3, 19)}
    turned = dict(reversed(tensors.items()))
    names.add(save_bundle(Store(tmp_path / "turned"), turned, dict(reversed(STATE.items()))))
    laid_out = {key: np.array(tensor, tensor.dtype.newbyteorder(">"), order="F") for key, tensor in tensors.items()}
    names.add(save_bundle(Store(tmp_path / "laid out"), laid_out, STATE))
    assert len(names) == 1


def test_the_hash_of_a_known_bundle(store):
    """Format version 1 for ever: this hash never changes."""
    name = save_bundle(store, {"b": np.arange(3, dtype=np.int32), "a": np.float32([1])}, {"k": "é"})
    assert name == "c9af3643ef4465cbbcf57f193bcbc5f5321c66a4c130a7597e1e07030d4e46ab"


@pytest.mark.parametrize("change", ["value", "name", "shape", "dtype", "state", "added", "removed"])
def test_every_change_changes_the_hash(store, tensors, change):
    before = save_bundle(store, tensors, STATE)
    state = dict(STATE)
    match change:
        case "value":
            tensors["weights/ln_f.bias"][3] = -0.0
        case "name":
            tensors["weights/wpe"] = tensors.pop("weights/wte")
        case "shape":
            tensors["m/wte"] = tensors["m/wte"].reshape(8, 40)
        case "dtype":
            tensors["m/wte"] = tensors["m/wte"].view(np.uint32)
        case "state":
            state["step"] = 3
        case "added":
            tensors["empty"] = np.empty(0, np.uint8)
        case "removed":
            del tensors["history/loss"]
    assert save_bundle(store, tensors, state) != before


def test_equal_chunks_are_stored_once(store):
    zeros = np.zeros(CHUNK_SIZE, np.float32)  # four chunks
    save_bundle(store, {"m": zeros, "v": zeros}, {})
    assert len(list(store.objects())) == 2  # the chunk and the manifest


def test_saving_again_writes_nothing(store, tensors, tmp_path):
    def files():
        return {
            path: (path.stat().st_ino, path.stat().st_mtime_ns)
            for path in (store.path / "objects").rglob("*")
            if path.is_file()
        }

    save_bundle(store, tensors, STATE)
    before = files()
    save_bundle(Store(store.path), tensors, STATE)
    assert files() == before


def test_numbers_are_stored_smaller_shuffled(store):
    weights = (np.random.default_rng(1).standard_normal(2**20) * 0.02).astype(np.float32)
    name = save_bundle(store, {"w": weights}, {})
    chunk = load_manifest(store, name).tensor("w").chunks[0]
    assert store.object_path(chunk).stat().st_size < 0.88 * weights.nbytes


def test_loading_into_given_arrays(store, tensors):
    name = save_bundle(store, tensors, STATE)
    given = {"weights/wte": np.full((40, 8), np.nan, np.float32)}
    bundle = load_bundle(store, name, into=given)
    assert bundle.tensors["weights/wte"] is given["weights/wte"]
    assert all(same_bits(bundle.tensors[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize(
    "given",
    [
        {"unknown": np.empty(1, np.float32)},
        {"weights/wte": np.empty((8, 40), np.float32)},
        {"weights/wte": np.empty((40, 8), np.int32)},
        {"weights/wte": np.empty((40, 16), np.float32)[:, ::2]},
        {"weights/wte": np.broadcast_to(np.float32(0), (40, 8))},
    ],
)
def test_arrays_that_do_not_fit_are_refused(store, tensors, given):
    name = save_bundle(store, tensors, STATE)
    with pytest.raises(InvalidInput, match=next(iter(given))):
        load_bundle(store, name, into=given)


@pytest.mark.parametrize(
    ("tensors", "state"),
    [
        ({"x": np.float16([1])}, {}),
        ({"x": np.array(["text"])}, {}),
        ({"x": np.array([object()])}, {}),
        ({"x": np.bool_([1])}, {}),
        ({"": np.float32([1])}, {}),
        ({"/x": np.float32([1])}, {}),
        ({"x//y": np.float32([1])}, {}),
        ({"é": np.float32([1])}, {}),
        ({"x" * 201: np.float32([1])}, {}),
        ({"x\n": np.float32([1])}, {}),
        ({"x": np.zeros((1,) * 17, np.float32)}, {}),
        ({}, {"loss": float("nan")}),
        ({}, {"step": 2**53}),
    ],
)
def test_what_a_bundle_may_not_hold_is_refused(store, tensors, state):
    with pytest.raises(InvalidInput):
        save_bundle(store, tensors, state)


def test_too_little_space_is_said_before_anything_is_written(store, tensors, monkeypatch):
    monkeypatch.setattr("artifacts.filesystem.free_space", lambda path: 1000)
    with pytest.raises(NoSpace, match=r"\d+ bytes needed, 1000 available") as error:
        save_bundle(store, tensors, STATE)
    assert error.value.exit_code == 6
    assert list(store.objects()) == []


def test_a_bundle_larger_than_memory_is_refused(store, tensors, monkeypatch):
    name = save_bundle(store, tensors, STATE)

    class Memory:
        available = 100

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    with pytest.raises(NoSpace, match="100 are available"):
        load_bundle(store, name)


def test_a_hash_of_something_else_is_not_a_bundle(store):
    with pytest.raises(Corrupt, match="not a document of the kind 'samebits bundle'"):
        load_bundle(store, store.put(b"{}"))
    with pytest.raises(InvalidInput, match="64 lower-case"):
        load_bundle(store, "../../etc/passwd")


def test_every_byte_is_verified(store, tensors):
    name = save_bundle(store, tensors, STATE)
    assert verify_bundle(store, name).state == STATE
    victim = load_manifest(store, name).tensor("v/wte").chunks[0]
    store.object_path(victim).unlink()
    for read in (verify_bundle, load_bundle):
        with pytest.raises(Corrupt, match=f"tensor v/wte, chunk 0: object {victim}") as error:
            read(store, name)
        assert error.value.exit_code == 4
