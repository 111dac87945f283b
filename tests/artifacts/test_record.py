"""Records, their index, and attestations."""

import dataclasses

import pydantic
import pytest

from artifacts import (
    Attestation,
    Record,
    find_records,
    open_run,
    read_attestations,
    read_digests,
    read_record,
    record_bundles,
    resolve,
    save_bundle,
    sources_digest,
    write_attestation,
    write_digests,
    write_record,
)
from artifacts import record as record_module
from artifacts.errors import Ambiguous, Corrupt, InvalidInput, Missing, RunDiffers, UnknownVersion
from artifacts.hashing import hash_bytes
from artifacts.manifest import Manifest, write_manifest

SOURCES = {"engine/numerics/sums.py": "1" * 64, "engine/schedule.py": "2" * 64}
OTHER_SOURCES = {**SOURCES, "engine/schedule.py": "3" * 64}


@pytest.fixture
def bundles(store, tensors):
    return {step: save_bundle(store, tensors, {"step": step}) for step in (0, 1, 2)}


@pytest.fixture
def fields(store, bundles):
    return {
        "pipeline": "a" * 64,
        "lock": {"prepare": {"cmd": "reproduce stage prepare", "outs": [{"md5": "0" * 32}]}},
        "configuration": {"train": {"steps": 2, "rate": 3e-4}},
        "specification": "b" * 64,
        "dataset": "c" * 64,
        "tokenizer": "d" * 64,
        "tier": "portable",
        "first_bundle": bundles[0],
        "final_bundle": bundles[2],
        "steps": 2,
        "digests": write_digests(store, [b"\x01" * 32, b"\x02" * 32]),
        "results": {"train_loss": 1.5, "validation_loss": 2.0},
        "sources": SOURCES,
        "sources_digest": sources_digest(SOURCES),
        "hardware": None,
        "tolerance": None,
    }


def test_round_trip(store, fields, bundles):
    record = Record(**fields)
    name = write_record(store, record, {1: bundles[1]})
    assert read_record(store, name) == record
    assert find_records(store) == [name]
    assert record_bundles(store, name) == bundles
    assert read_digests(store, record) == [b"\x01" * 32, b"\x02" * 32]


def test_what_lies_between_changes_no_hash_and_is_gathered(store, fields, bundles):
    record = Record(**fields)
    name = write_record(store, record, {})
    assert record_bundles(store, name) == {0: bundles[0], 2: bundles[2]}
    assert write_record(store, record, {1: bundles[1]}) == name
    assert write_record(store, record, {}) == name
    assert record_bundles(store, name) == bundles
    with pytest.raises(RunDiffers, match="step 1"):
        write_record(store, record, {1: bundles[2]})


CHANGES = {
    "pipeline": {"pipeline": "e" * 64},
    "lock": {"lock": []},
    "configuration": {"configuration": {"train": {"steps": 2, "rate": 3e-5}}},
    "specification": {"specification": "e" * 64},
    "dataset": {"dataset": "e" * 64},
    "tokenizer": {"tokenizer": "e" * 64},
    "first_bundle": {"first_bundle": "e" * 64},
    "final_bundle": {"final_bundle": "e" * 64},
    "steps": {"steps": 3},
    "digests": {"digests": "e" * 64},
    "results": {"results": {"train_loss": 1.5000000000000002, "validation_loss": 2.0}},
    "sources": {"sources": OTHER_SOURCES, "sources_digest": sources_digest(OTHER_SOURCES)},
    "tier": {"tier": "debug", "hardware": {}, "tolerance": {}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_field_changes_the_hash(fields, change):
    changed = Record(**{**fields, **CHANGES[change]})
    assert record_module.dumps(changed) != record_module.dumps(Record(**fields))


def test_hardware_and_tolerance_change_the_hash(fields):
    fields |= {"tier": "prod", "hardware": {"gpu": "A"}, "tolerance": {"loss": 1e-3}}
    data = {
        record_module.dumps(Record(**{**fields, **change}))
        for change in ({}, {"hardware": {"gpu": "B"}}, {"tolerance": {"loss": 1e-2}})
    }
    assert len(data) == 3


def test_every_field_has_a_test_of_its_hash(fields):
    named = {name for change in CHANGES.values() for name in change}
    assert named == set(fields) == set(Record.model_fields)


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"tier": "fast"},
        {"tier": "debug"},
        {"hardware": {"gpu": "A"}},
        {"tolerance": {}},
        {"steps": -1},
        {"steps": "2"},
        {"steps": 2.0},
        {"dataset": "C" * 64},
        {"dataset": "c" * 63},
        {"dataset": "c" * 64 + "\n"},
        {"sources_digest": "0" * 64},
        {"results": {"loss": float("nan")}},
        {"configuration": None},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(fields, change):
    with pytest.raises((pydantic.ValidationError, InvalidInput)):
        record_module.dumps(Record(**{**fields, **change}))


def test_a_missing_field_is_refused(fields):
    for name in fields:
        with pytest.raises(pydantic.ValidationError, match=name):
            Record(**{key: value for key, value in fields.items() if key != name})


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b'"version":1', b'"version":2', UnknownVersion),
        (b'"samebits record"', b'"samebits bundle"', Corrupt),
        (b'"steps":2', b'"steps":-2', Corrupt),
        (b'"steps":2', b'"steps":true', Corrupt),
        (b'"version":1', b'"version":1,"when":0', Corrupt),
        (b'"hardware":null,', b"", Corrupt),
    ],
)
def test_other_documents_are_refused(fields, old, new, error):
    data = record_module.dumps(Record(**fields))
    assert old in data
    with pytest.raises(error, match="record R"):
        record_module.loads(data.replace(old, new), "record R")


def test_a_record_of_what_is_not_there_is_refused(store, fields):
    for name in ("first_bundle", "final_bundle", "digests"):
        with pytest.raises(Missing, match="e" * 64):
            write_record(store, Record(**{**fields, name: "e" * 64}), {})
    with pytest.raises(Corrupt, match="3 steps"):
        write_record(store, Record(**{**fields, "steps": 3}), {})
    with pytest.raises(InvalidInput, match="31 bytes"):
        write_digests(store, [b"\x00" * 31])
    assert find_records(store) == []


def test_resolving_prefixes(store, fields, bundles):
    name = write_record(store, Record(**fields), {1: bundles[1]})
    with open_run(store, "r") as run:
        run.record_bundle(1, bundles[1])
    assert resolve(store, name[:8]).kind == "record"
    assert resolve(store, name).hash == name
    found = resolve(store, bundles[1][:8])
    assert (found.kind, found.hash, found.records) == ("bundle", bundles[1], (name,))
    assert resolve(store, bundles[0][:8]).records == (name,)
    for wrong in ("", "abc", "ABCD", "x" * 64, name + "0", name[:8] + "\n"):
        with pytest.raises(InvalidInput, match="4 to 64"):
            resolve(store, wrong)
    with pytest.raises(InvalidInput, match="no record"):
        resolve(store, "0" * 64)


def test_bundles_of_runs_are_found_without_a_record(store, bundles):
    with open_run(store, "r") as run:
        run.record_bundle(1, bundles[1])
    assert resolve(store, bundles[1][:6]).records == ()


def test_an_ambiguous_prefix_lists_all_candidates(store):
    by_prefix = {}
    for step in range(2000):
        prefix = hash_bytes(write_manifest(Manifest((), {"step": step})))[:4]
        if prefix in by_prefix:
            break
        by_prefix[prefix] = step
    names = [save_bundle(store, {}, {"step": found}) for found in (by_prefix[prefix], step)]
    with open_run(store, "r") as run:
        for number, name in enumerate(names):
            run.record_bundle(number, name)
    with pytest.raises(Ambiguous) as error:
        resolve(store, prefix)
    assert error.value.candidates == tuple(sorted(names))
    assert all(name in str(error.value) for name in names)


@pytest.fixture
def attestation(store, fields):
    return Attestation(
        record=write_record(store, Record(**fields), {}),
        activity="verified",
        verdict={"verdict": "bit-exact"},
        environment={"cpu": "X"},
        started="2026-01-01T00:00:00Z",
        finished="2026-01-01T00:01:00Z",
    )


def test_attestations_that_disagree_are_both_kept(store, attestation):
    other = dataclasses.replace(attestation, verdict={"verdict": "differs", "step": 1})
    names = {write_attestation(store, item): item for item in (attestation, other, attestation)}
    assert read_attestations(store, attestation.record) == names
    assert len(names) == 2
    assert read_attestations(store, "0" * 64) == {}


def attestation_file(store, attestation, name):
    return store.path / "attestations" / attestation.record / f"{name}.json"


@pytest.mark.parametrize("damage", ["altered", "renamed", "moved", "stray"])
def test_an_altered_attestation_is_corrupt(store, attestation, damage):
    name = write_attestation(store, attestation)
    path = attestation_file(store, attestation, name)
    record = attestation.record
    data = path.read_bytes()
    match damage:
        case "altered":
            path.write_bytes(data.replace(b"bit-exact", b"differs"))
        case "renamed":
            path.rename(path.with_name("0" * 64 + ".json"))
        case "moved":
            record = "0" * 64
            (path.parent.parent / record).mkdir()
            path.rename(path.parent.parent / record / path.name)
        case "stray":
            (path.parent / "notes.txt").write_bytes(b"")
    with pytest.raises(Corrupt, match="attestation"):
        read_attestations(store, record)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"in-toto.io/Statement/v1", b"in-toto.io/Statement/v2"),
        (b"attestation:1", b"attestation:2"),
        (b'"verified"', b'"guessed"'),
        (b'"started":"2026-01-01T00:00:00Z"', b'"started":0'),
        (b'{"verdict":"bit-exact"}', b'"bit-exact"'),
        (b'"_type"', b'"_a":1,"_type"'),
    ],
)
def test_a_rehashed_statement_of_another_form_is_corrupt(store, attestation, old, new):
    path = attestation_file(store, attestation, write_attestation(store, attestation))
    data = path.read_bytes()
    assert old in data
    data = data.replace(old, new)
    path.unlink()
    path.with_name(f"{hash_bytes(data)}.json").write_bytes(data)
    with pytest.raises(Corrupt, match="attestation"):
        read_attestations(store, attestation.record)


def test_an_attestation_to_nothing_is_refused(store, attestation):
    with pytest.raises(InvalidInput, match="no record"):
        write_attestation(store, dataclasses.replace(attestation, record="0" * 64))
    with pytest.raises(InvalidInput, match="of the wrong kind"):
        write_attestation(store, dataclasses.replace(attestation, activity="guessed"))
