"""Files of other programs: safetensors, and ANDREA checkpoints."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import Corrupt, InvalidInput, Missing, NoSpace
from artifacts.interchange.andrea import LACKS, read_andrea, write_andrea
from artifacts.interchange.names import Renamed, to_ours, to_theirs

LAYOUT = [("wte", (5, 4)), ("ln.gain", (4,)), ("scalar", ())]
NAMES = [Renamed("wte", "there.wte", (5, 4), True), Renamed("ln.gain", "there.ln", (4,))]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def parameters():
    return {"wte": numbers(5, 4), "ln.gain": numbers(4, seed=1)}


@pytest.fixture
def state():
    kinds = {"weights": numbers, "m": numbers, "v": lambda *shape, seed: abs(numbers(*shape, seed=seed))}
    return {
        f"{kind}/{name}": np.asarray(make(*shape, seed=seed), np.float32)
        for kind, make in kinds.items()
        for seed, (name, shape) in enumerate(LAYOUT)
    }


def test_renaming_there_and_back(parameters):
    theirs = to_theirs(parameters, NAMES)
    assert theirs["there.wte"].shape == (4, 5)
    assert theirs["there.wte"].flags.c_contiguous
    assert np.array_equal(theirs["there.wte"], parameters["wte"].T)
    ours = to_ours(theirs, NAMES, "file")
    assert {name: array.tobytes() for name, array in ours.items()} == {
        name: array.tobytes() for name, array in parameters.items()
    }


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "dtype"])
def test_what_does_not_fit_is_refused(parameters, change):
    theirs = to_theirs(parameters, NAMES)
    for tensors, name in ((parameters, "wte"), (theirs, "there.wte")):
        match change:
            case "missing":
                del tensors[name]
            case "unknown":
                tensors["more"] = tensors[name]
            case "shape":
                tensors[name] = tensors[name].T
            case "dtype":
                tensors[name] = tensors[name].astype(np.float64)
    with pytest.raises(InvalidInput):
        to_theirs(parameters, NAMES)
    with pytest.raises(Corrupt, match="file"):
        to_ours(theirs, NAMES, "file")


def test_andrea_there_and_back(state, tmp_path):
    path = tmp_path / "ein Punkt 倉庫.bin"
    write_andrea(path, 7, {**state, "history/loss": numbers(3)}, LAYOUT)
    again = read_andrea(path, LAYOUT)
    assert again.step == 7
    assert {name: array.tobytes() for name, array in again.tensors.items()} == {
        name: array.tobytes() for name, array in state.items()
    }
    assert [array.shape for array in again.tensors.values()] == [shape for _, shape in LAYOUT] * 3
    assert len(LACKS) == 4


def test_andrea_byte_for_byte(state, tmp_path):
    """Written from the description alone."""
    write_andrea(tmp_path / "c", 7, state, LAYOUT)
    flat = b"".join(
        struct.pack(f"<{array.size}f", *array.reshape(-1))
        for kind in ("weights", "m", "v")
        for array in (state[f"{kind}/{name}"] for name, _ in LAYOUT)
    )
    assert (tmp_path / "c").read_bytes() == struct.pack("<ii", 7, 25) + flat


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda data: b"", Corrupt, "shorter"),
        (lambda data: data[:7], Corrupt, "shorter"),
        (lambda data: data[:-1], Corrupt, "make 308 bytes, it has 307"),
        (lambda data: data + b"\0", Corrupt, "it has 309"),
        (lambda data: struct.pack("<ii", -1, 25) + data[8:], Corrupt, "step -1"),
        (lambda data: struct.pack("<ii", 1, -25) + data[8:], Corrupt, "parameters"),
        (lambda data: struct.pack("<ii", 1, 0), Corrupt, "0 parameters"),
        (lambda data: struct.pack("<ii", 1, 2**31 - 1) + data[8:], Corrupt, "2147483647"),
        (lambda data: struct.pack("<ii", 1, 24) + data[8:-12], InvalidInput, "has 24 parameters"),
        (lambda data: data[:8] + struct.pack("<f", float("nan")) + data[12:], Corrupt, "weights/wte: number 0 is nan"),
        (lambda data: data[:108] + struct.pack("<f", float("inf")) + data[112:], Corrupt, "m/wte: number 0 is inf"),
        (lambda data: data[:-4] + struct.pack("<f", -1.0), Corrupt, r"v/scalar: number 0 is -1\.0"),
    ],
)
def test_andrea_files_that_are_wrong(state, tmp_path, change, error, message):
    write_andrea(tmp_path / "good", 7, state, LAYOUT)
    (tmp_path / "bad").write_bytes(change((tmp_path / "good").read_bytes()))
    with pytest.raises(error, match=message):
        read_andrea(tmp_path / "bad", LAYOUT)


@given(st.binary(max_size=400), st.sampled_from([None, 0, 1, 25, 2**31 - 1]))
def test_andrea_files_with_anything_in_them(tmp_path_factory, data, count):
    path = tmp_path_factory.getbasetemp() / "any andrea"
    path.write_bytes(data if count is None else struct.pack("<ii", 1, count) + data)
    try:
        found = read_andrea(path, LAYOUT)
    except (Corrupt, InvalidInput):
        return
    assert sum(array.size for array in found.tensors.values()) == 75


def test_andrea_wrong_use(state, tmp_path):
    write_andrea(tmp_path / "c", 7, state, LAYOUT)
    with pytest.raises(InvalidInput, match="there already"):
        write_andrea(tmp_path / "c", 7, state, LAYOUT)
    for step, layout in ((-1, LAYOUT), (2**31, LAYOUT), (1, [])):
        with pytest.raises(InvalidInput, match="cannot hold"):
            write_andrea(tmp_path / "d", step, state, layout)
    del state["v/ln.gain"]
    with pytest.raises(InvalidInput, match=r"v/ln\.gain"):
        write_andrea(tmp_path / "d", 7, state, LAYOUT)
    with pytest.raises(Missing):
        read_andrea(tmp_path / "d", LAYOUT)


def test_andrea_disk_full(state, tmp_path, disk):
    import errno

    disk.arm(1, errno.ENOSPC)
    with pytest.raises(NoSpace):
        write_andrea(tmp_path / "c", 7, state, LAYOUT)
    disk.arm(None, None)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def module():
    pytest.importorskip("safetensors")
    from artifacts.interchange import tensor_file

    return tensor_file


class TestSafetensors:
    def test_there_and_back(self, module, parameters, tmp_path):
        parameters["empty"] = np.empty((0, 3), np.float32)
        path = tmp_path / "Gewichte 倉庫.safetensors"
        module.write_safetensors(path, parameters, {"format": "pt"})
        tensors, metadata = module.read_safetensors(path)
        assert metadata == {"format": "pt"}
        assert {name: (a.shape, a.tobytes()) for name, a in tensors.items()} == {
            name: (a.shape, a.tobytes()) for name, a in parameters.items()
        }
        assert [path.name for path in tmp_path.iterdir()] == [path.name]
        with pytest.raises(InvalidInput, match="there already"):
            module.write_safetensors(path, parameters, {})

    def test_the_same_numbers_give_the_same_bytes(self, module, parameters, tmp_path):
        module.write_safetensors(tmp_path / "a", parameters, {"format": "pt"})
        module.write_safetensors(tmp_path / "b", dict(reversed(parameters.items())), {"format": "pt"})
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_other_numbers_are_refused(self, module, tmp_path):
        from safetensors.numpy import save_file

        save_file({"x": np.zeros(3, np.float16)}, tmp_path / "half")
        with pytest.raises(InvalidInput, match="x is F16"):
            module.read_safetensors(tmp_path / "half")
        with pytest.raises(Missing):
            module.read_safetensors(tmp_path / "nothing")

    @given(data=st.binary(max_size=200), size=st.sampled_from([None, 0, 2, 100, 2**40, 2**64 - 1]))
    def test_files_with_anything_in_them(self, module, tmp_path_factory, data, size):
        path = tmp_path_factory.getbasetemp() / "any.safetensors"
        path.write_bytes(data if size is None else struct.pack("<Q", size) + data)
        try:
            module.read_safetensors(path)
        except (Corrupt, InvalidInput):
            return

    def test_every_cut_is_noticed(self, module, parameters, tmp_path):
        module.write_safetensors(tmp_path / "a", parameters, {})
        data = (tmp_path / "a").read_bytes()
        for length in range(len(data)):
            (tmp_path / "cut").write_bytes(data[:length])
            with pytest.raises(Corrupt):
                module.read_safetensors(tmp_path / "cut")
