"""Split fp32 numbers: every bit comes back, and only what belongs is taken."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import encoding, load_bundle, save_bundle, verify_bundle
from artifacts.errors import Corrupt
from artifacts.floats import join_floats, split_floats
from artifacts.hashing import hash_bytes

COUNT = 2**14


def trained(count, seed, scale=0.02):
    return (np.random.default_rng(seed).standard_normal(count) * scale).astype("<f4")


def split(content):
    parts = split_floats(memoryview(content))
    return None if parts is None else b"".join(bytes(part) for part in parts)


def join(payload, length):
    target = bytearray(length)
    join_floats(memoryview(payload), memoryview(target), "it")
    return bytes(target)


@given(
    st.integers(1, 600),
    st.integers(0, 2**32),
    st.floats(-44, 37),
    st.binary(max_size=3),
    st.lists(st.tuples(st.integers(0, 599), st.integers(0, 2**32 - 1)), max_size=12),
)
def test_every_bit_comes_back(count, seed, power, rest, others):
    """Numbers of one scale, with any bits at all in a few places: NaN, infinities, both zeros, subnormals."""
    numbers = trained(count, seed, 10.0**power)
    words = numbers.view("<u4")
    for place, word in others:
        words[place % count] = word
    content = numbers.tobytes() + rest
    payload = split(content)
    if payload is not None:
        assert join(payload, len(content)) == content


@pytest.mark.parametrize("exponent", [0, 1, 7, 127, 240, 241, 254, 255])
@pytest.mark.parametrize("count", [COUNT, COUNT + 1])
def test_any_exponent_may_be_the_common_one(exponent, count):
    words = np.random.default_rng(exponent).integers(0, 2**32, count, np.uint32)
    words = words & np.uint32(0x807FFFFF) | np.uint32(exponent << 23)
    payload = split(words.tobytes())
    assert len(payload) == 1 + 3 * count + (count + 1) // 2
    assert join(payload, words.nbytes) == words.tobytes()


@pytest.mark.parametrize(
    "numbers",
    [
        np.zeros(COUNT, "<f4"),
        np.ones(COUNT, "<f4"),
        np.arange(COUNT, dtype="<i4"),
        np.repeat(trained(COUNT // 64, 1), 64),
        np.where(np.arange(COUNT) % 8 < 2, 0, trained(COUNT, 2)).astype("<f4"),
        np.arange(COUNT).astype("<f4"),
    ],
    ids=["zeros", "ones", "integers", "repeated", "quarter zeros", "whole"],
)
def test_what_compresses_better_is_compressed(numbers):
    content = memoryview(numbers).cast("B")
    assert split_floats(content) is None
    file = b"".join(bytes(part) for part in encoding.encode(content, 4, 1))
    assert file[5] == 1
    assert len(file) < 0.8 * len(content)


def test_numbers_of_all_scales_are_not_split():
    words = np.random.default_rng(3).integers(0, 2**32, COUNT, np.uint32)
    assert split(words.tobytes()) is None


def test_trained_numbers_are_split():
    weights, spread = trained(2**16, 4), np.exp(trained(2**16, 5, 1.0))
    for numbers in (weights, weights * spread, spread**2 * (1 + abs(weights))):
        content = memoryview(numbers.astype("<f4")).cast("B")
        file = b"".join(bytes(part) for part in encoding.encode(content, 4, 1))
        assert file[5] == 2
        assert len(file) < 0.89 * len(content)
        assert bytes(encoding.decode(file, len(content), "it")) == bytes(content)
        assert encoding.encode(content, 8, 1)[0][5] != 2


def test_only_exactly_the_bytes_that_belong_are_taken():
    content = trained(1001, 6).tobytes() + b"xyz"
    payload = split(content)
    for wrong in (payload[:-1], payload + b"\0", payload[:100], b""):
        with pytest.raises(Corrupt, match="it"):
            join(wrong, len(content))
    for length in (len(content) - 1, len(content) + 1, len(content) - 4, len(content) + 4):
        with pytest.raises(Corrupt, match="it"):
            join(payload, length)
    padded = bytearray(payload)
    padded[1 + 3 * 1001 + 500] |= 0x10
    with pytest.raises(Corrupt, match="after the last number"):
        join(bytes(padded), len(content))


@given(st.integers(0, 40), st.integers(0, 3), st.data())
def test_any_payload_of_the_right_length_is_one_of_numbers_or_refused(count, rest, data):
    """And what is taken is what docs/format.md makes of it, number by number."""
    fixed = 1 + 3 * count + (count + 1) // 2 + rest
    payload = data.draw(st.binary(min_size=fixed, max_size=fixed + 6))
    try:
        content = join(payload, 4 * count + rest)
    except Corrupt:
        return
    assert content == independent_join(payload, 4 * count + rest)


def independent_join(payload, length):
    """Written from docs/format.md."""
    k = length // 4
    h = (k + 1) // 2
    low, high = payload[1 : 1 + 2 * k], payload[1 + 2 * k : 1 + 3 * k]
    codes, rare = payload[1 + 3 * k : 1 + 3 * k + h], iter(payload[1 + 3 * k + h :])
    content = b""
    for i in range(k):
        code = codes[i] & 15 if i < h else codes[i - h] >> 4
        exponent = (payload[0] + code - 1) % 256 if code else next(rare)
        word = int.from_bytes(low[2 * i : 2 * i + 2], "little")
        word |= (high[i] & 127) << 16 | exponent << 23 | (high[i] >> 7) << 31
        content += word.to_bytes(4, "little")
    return content + bytes(rare)


def test_the_independent_reader_agrees():
    content = trained(1001, 7).tobytes() + b"xyz"
    assert independent_join(split(content), len(content)) == content


def test_every_flipped_bit_is_noticed_or_changes_nothing(store):
    content = trained(301, 8).tobytes() + b"xyz"
    name = hash_bytes(content)
    head = b"SBOB" + bytes([1, 2, 4, 0]) + len(content).to_bytes(8, "little")
    file = head + split(content)
    store.adopt_object(name, file, len(content))
    for bit in range(8 * len(file)):
        flipped = bytearray(file)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            store.adopt_object(name, bytes(flipped), len(content))
        except Corrupt:
            continue
        pytest.fail(f"bit {bit} was not noticed")


@pytest.mark.parametrize("threads", [1, 8])
def test_bundles_of_split_numbers_of_many_lengths(store, threads):
    """Threads use their memory again and again; nothing of one chunk is left in another."""
    lengths = (20_000, 2**20, 2**20 + 1, 70_001, 3 * 2**20 // 2)
    tensors = {f"t{n}": trained(length, n, 10.0**-n) for n, length in enumerate(lengths)}
    name = save_bundle(store, tensors, {}, threads)
    encodings = [store.object_path(object_).read_bytes()[5] for object_ in store.objects()]
    assert encodings.count(2) >= len(lengths)
    loaded = load_bundle(store, name).tensors
    assert {key: array.tobytes() for key, array in loaded.items()} == {
        key: array.tobytes() for key, array in tensors.items()
    }
    verify_bundle(store, name)
