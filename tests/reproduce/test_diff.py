"""Where two runs part: the step exactly, the tensor and element where a state can be had, and evidence."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from artifacts import list_runs, load_bundle, read_record
from reproduce.diff import diff
from reproduce.diff.sides import find_side
from reproduce.diff.stores import diff_stores
from reproduce.diff.tensors import compare_states, ulps
from reproduce.selftest.lab import Deviation, bits, make_lab, quietly

FLOATS = st.floats(width=32, allow_nan=False)


def compare(lab, a, b):
    """The exit code, what it says as JSON, and as text."""
    store = lab.store
    sides = find_side(store, a), find_side(store, b)
    code, said = quietly(lambda: diff(lab.project, lab.configuration.run, *sides, True))
    again, text = quietly(lambda: diff(lab.project, lab.configuration.run, *sides, False))
    assert code == again
    return code, json.loads(said), text


def test_a_record_and_its_own_run_are_the_same(lab):
    (run,) = list_runs(lab.store)
    for other in (lab.record, run.run_id, lab.read().final_bundle):
        code, found, text = compare(lab, lab.record, other)
        assert (code, found["same"]) == (0, True)
        assert "the same: configuration, data and the states after all 12 steps" in text


@pytest.mark.parametrize("seed", range(4))
def test_a_fault_at_a_random_step_and_tensor_is_found_at_that_step(spoilt, seed):
    """A bit flips in one weight after a random step: what differs first is the state of that step."""
    random = np.random.default_rng(seed)
    step = int(random.integers(2, 12))

    def around(trainer, at):
        if at == step:
            state = trainer.state()
            names = [name for name in sorted(state) if name.startswith("weights/")]
            chosen = bits(state[names[random.integers(len(names))]])
            chosen[random.integers(chosen.size)] ^= 1 << 22
            trainer.backend.weights_changed()
        trainer.train_step()

    forged = spoilt.forge_run(Deviation(around_step=around))
    code, found, text = compare(spoilt, spoilt.record, forged)
    assert (code, found["step"]) == (1, step)
    assert f"the states differ first after step {step}" in text
    assert "a replay here does not come to what record " + forged[:12] in text or step in (5, 10, 12)
    assert all(state["replayed_steps"] <= 5 for state in found["states"])
    assert found["tensors"]
    assert found["compared_at"] == min(s for s in (5, 10, 12) if s >= step)


def test_two_configurations_are_compared_at_the_step_itself_by_replay(spoilt):
    """Both sides can be computed again, so the states after step 3 are there though nobody saved them."""
    other = make_lab(spoilt.project.root.parent / "other", {"train": {"learning_rate": 1e-3}})
    code, found, text = compare(spoilt, spoilt.record, f"{other.store.path}:{other.record}")
    assert (code, found["step"]) == (1, 1)
    assert found["configuration"] == ["train.learning_rate: was 0.002, is 0.001"]
    assert [state["origin"] for state in found["states"]] == ["replayed", "replayed"]
    assert all(entry["ulp"] > 0 for entry in found["tensors"])
    assert not any(entry["tensor"].startswith("m/") for entry in found["tensors"])
    assert "the loss of step 1 is the same" in text


def test_a_change_of_one_element_is_told_in_ulp(spoilt):
    def change(tensors):
        tensors["m/embed.position"][3, 2] = np.nextafter(tensors["m/embed.position"][3, 2], np.float32(9))

    forged = spoilt.forge_final(change)
    code, found, text = compare(spoilt, spoilt.record, forged)
    (entry,) = found["tensors"]
    assert code == 1 and found["step"] is None
    assert (entry["tensor"], entry["elements"], entry["index"], entry["ulp"]) == ("m/embed.position", 1, [3, 2], 1)
    assert "1 of 256 elements, first at [3, 2]" in text


@pytest.fixture(scope="module")
def debug(tmp_path_factory):
    return make_lab(tmp_path_factory.mktemp("debug") / "project", {"tier": "debug"})


@pytest.mark.parametrize("kind", ["weights", "m", "v"])
def test_in_the_tier_debug_step_and_tensor_are_named_without_a_replay(debug, tmp_path, kind):
    """A bit flips in one tensor after step 6, which nobody saved: its name is all that differs, where a replay or the
    next saved state would show every tensor."""
    flipped = f"{kind}/block0.mlp_up.weight"

    def around(trainer, at):
        finished = trainer.backend.train_step

        def then_flipped(*words):
            outcome = finished(*words)
            bits(trainer.state()[flipped])[5] ^= 1 << 20
            return outcome

        trainer.backend.train_step = then_flipped if at == 6 else finished
        trainer.train_step()
        trainer.backend.train_step = finished
        trainer.backend.weights_changed()

    spoilt = debug.copy(tmp_path / "spoilt")
    forged = spoilt.forge_run(Deviation(around_step=around))
    code, found, text = compare(spoilt, spoilt.record, forged)
    assert (code, found["step"], found["compared_at"], found["states"]) == (1, 6, 6, [])
    assert [entry["tensor"] for entry in found["tensors"]] == [flipped]
    after = [
        load_bundle(spoilt.store, name).tensors
        for name in (spoilt.read().final_bundle, read_record(spoilt.store, forged).final_bundle)
    ]
    at = sorted(name for name in after[0] if not name.startswith("history/")).index(flipped)
    assert found["tensors"][0]["blake3"] == [bytes(state["history/tensors"][5, at]).hex() for state in after]
    assert "the states differ first after step 6\n" in text
    assert f"tensor: {flipped}: another content, BLAKE3 A " in text


def test_in_the_tier_debug_saved_states_still_tell_the_element(debug, tmp_path):
    def around(trainer, at):
        if at == 5:
            bits(trainer.state()["weights/embed.token"])[0] ^= 1
            trainer.backend.weights_changed()
        trainer.train_step()

    spoilt = debug.copy(tmp_path / "spoilt")
    code, found, _ = compare(spoilt, spoilt.record, spoilt.forge_run(Deviation(around_step=around)))
    assert (code, found["step"]) == (1, 5)
    assert [state["origin"] for state in found["states"]] == ["saved", "saved"]
    assert all("index" in entry for entry in found["tensors"])


def test_a_loss_alone_that_differs_is_told(debug, tmp_path):
    def around(trainer, at):
        finished = trainer.backend.train_step
        more = 2**20 if at == 6 else 0
        trainer.backend.train_step = lambda *words: replace(
            outcome := finished(*words), loss_total=outcome.loss_total + more
        )
        trainer.train_step()
        trainer.backend.train_step = finished

    spoilt = debug.copy(tmp_path / "spoilt")
    code, found, text = compare(spoilt, spoilt.record, spoilt.forge_run(Deviation(around_step=around)))
    assert (code, found["step"], found["tensors"]) == (1, 6, [])
    assert "tensor: all are the same, the loss is not" in text


def test_evidence_never_accuses(spoilt):
    def around(trainer, at):
        trainer.train_step()
        if at == 6:
            bits(trainer.state()["weights/embed.token"])[0] ^= 1
            trainer.backend.weights_changed()

    forged = spoilt.forge_run(Deviation(around_step=around))
    _, found, text = compare(spoilt, spoilt.record, forged)
    assert found["step"] == 7
    assert any("the same bits were to be expected" in line for line in found["evidence"])
    assert any("says on which machine" in line for line in found["evidence"])
    assert not any(word in text for word in ("fault of", "cheat", "wrong", "forged", "blame"))


def test_names_that_are_none(lab):
    with pytest.raises(Exception, match="no run either") as caught:
        find_side(lab.store, "0000000")
    assert caught.value.exit_code == 2


def test_a_folder_that_is_no_store(lab, tmp_path):
    with pytest.raises(Exception, match="is no store: expected a folder") as caught:
        find_side(lab.store, f"{tmp_path}:abcd")
    assert caught.value.exit_code == 2


def test_stores_are_the_same_or_the_pair_to_look_at_is_named(lab, spoilt):
    code, said = quietly(lambda: diff_stores(lab.store, spoilt.store, False))
    assert (code, said.splitlines()[-1]) == (0, "the same records, and runs with the same bundles")

    def around(trainer, at):
        if at == 3:
            bits(trainer.state()["weights/embed.token"])[7] ^= 1 << 20
            trainer.backend.weights_changed()
        trainer.train_step()

    forged = spoilt.forge_run(Deviation(around_step=around))
    (spoilt.store.path / "index" / "records" / spoilt.record).unlink()
    code, said = quietly(lambda: diff_stores(lab.store, spoilt.store, True))
    found = json.loads(said)
    assert (code, found["only_a"], found["only_b"]) == (1, [lab.record], [forged])
    assert found["same_claim"] == [[lab.record, forged]]
    _, text = quietly(lambda: diff_stores(lab.store, spoilt.store, False))
    assert f"reproduce diff {lab.store.path}:{lab.record[:12]} {spoilt.store.path}:{forged[:12]}" in text


@given(FLOATS, st.integers(0, 1000))
def test_ulps_count_the_numbers_between(start, count):
    there = np.float32(start)
    for _ in range(count):
        there = np.nextafter(there, np.float32(np.inf))
    here = np.float32(start)
    extra = 1 if np.signbit(here) and not np.signbit(there) else 0
    reached = ulps(np.array([here]), np.array([there]))[0]
    assert reached <= count + extra
    if np.isfinite(there):
        assert reached >= count - extra


@given(arrays(np.float32, 5, elements=FLOATS), st.integers(0, 4), st.integers(0, 31))
def test_every_flipped_bit_is_found_where_it_is(values, index, bit):
    other = values.copy()
    bits(other)[index] ^= np.uint32(1 << bit)
    (entry,) = compare_states({"weights/x": values}, {"weights/x": other})
    assert (entry["index"], entry["elements"]) == ([index], 1)
    assert entry["ulp"] > 0
