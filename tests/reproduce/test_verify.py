"""Verdicts: bit-exact where it is, and every kind of damage and forgery named for what it is."""

import json
import shutil

import numpy as np
import pytest

from artifacts import (
    Attestation,
    load_bundle,
    read_attestations,
    read_digests,
    read_record,
    save_bundle,
    sources_digest,
    write_attestation,
    write_digests,
    write_record,
)


def verify(project, *words, code):
    return json.loads(project.call("verify", *words, "--json", code=code).stdout)


def verify_with_its_sources(project, *words, code):
    """In a process of its own, with the sources in the project's folder."""
    return json.loads(project.reproduce("verify", *words, "--json", code=code).stdout)


@pytest.fixture
def record(prepared):
    return prepared.record()


@pytest.fixture
def forge(prepared, record):
    """Writes a record like the true one but for `changes`."""
    store = prepared.store()

    def write(**changes):
        forged = type(read_record(store, record)).model_validate({**read_record(store, record).model_dump(), **changes})
        return write_record(store, forged, {})

    return write


def altered_final(prepared, record, name, change):
    """A bundle like the final one, with one tensor changed; its hash."""
    store = prepared.store()
    final = load_bundle(store, read_record(store, record).final_bundle)
    change(final.tensors[name])
    return save_bundle(store, final.tensors, final.state)


def test_the_true_record_is_bit_exact_and_attested(prepared, record):
    said = prepared.call("verify", record[:12]).stdout
    assert "verdict: bit-exact: 12 step digests, 4 bundles and 4 evaluations up to step 12 of 12 are the same" in said
    found = [a for a in read_attestations(prepared.store(), record).values() if a.activity == "verified"]
    assert found[-1].verdict["verdict"] == "bit-exact"
    assert found[-1].environment["cpu"]
    assert "verified 1 time (bit-exact)" in prepared.call("log").stdout


def test_log_goes_from_the_oldest_to_the_newest(prepared, record):
    """Whatever their hashes are: records by the first attestation of them."""
    store = prepared.store()
    original, environment = read_record(store, record), {"cpu": {"model": "x"}}
    names = {}
    for year in (1999, 1997, 1998, 2090):
        name = write_record(store, original.model_copy(update={"results": {**original.results, "tokens": year}}), {})
        when = f"{year}-01-01T00:00:00+00:00"
        write_attestation(store, Attestation(name, "trained", {}, environment, when, when))
        names[year] = name
    listed = [line.split()[1] for line in prepared.call("log").stdout.splitlines() if line.startswith("record")]
    assert listed == [name[:12] for name in (names[1997], names[1998], names[1999], record, names[2090])]


def test_show_lists_what_is_within(prepared, record):
    said = prepared.call("show", record).stdout
    assert "\nvalidation\n  0              " in said
    times = [line.split()[4] for line in said.splitlines() if line.startswith("attestation")]
    assert times == sorted(times)
    final = read_record(prepared.store(), record).final_bundle
    assert "\nsampler\n  position       " in prepared.call("show", final).stdout


def test_another_number_of_threads_hash_seed_and_locale_are_harmless(prepared, record):
    prepared.write_params({"run": {"threads": 3}})
    done = prepared.reproduce("verify", record, "--json", PYTHONHASHSEED="99", LC_ALL="C", TZ="Asia/Tokyo")
    found = json.loads(done.stdout)
    assert found["verdict"] == "bit-exact"
    assert found["environment"]["threads"] == 3


def test_a_part_is_replayed_from_the_bundle_before_it(prepared, record):
    found = verify(prepared, record, "--steps", "7:9", code=0)
    assert (found["verdict"], found["steps"], found["compared"]["digests"]) == ("bit-exact", [7, 9], 4)
    assert verify(prepared, record, "--steps", "11:", code=0)["compared"]["digests"] == 2


@pytest.mark.parametrize("steps", ["0:3", "3:99", "5:4", "5", "a:b", "-1:2"])
def test_steps_that_are_none(prepared, record, steps):
    assert "expected" in prepared.call("verify", record, "--steps", steps, code=2).stderr


def test_a_bundle_stands_for_its_record(prepared, record):
    final = read_record(prepared.store(), record).final_bundle
    assert verify(prepared, final[:12], "--steps", "12:12", code=0)["record"] == record


def test_the_record_is_enough_where_there_is_no_store(prepared, record):
    """As after `git clone` and `dvc pull`: the record and the final bundle in run/."""
    shutil.rmtree(prepared.root / ".samebits")
    assert verify(prepared, record[:12], code=0)["compared"]["digests"] == 12


def test_without_the_final_bundle_it_says_what_is_missing(prepared, record):
    shutil.rmtree(prepared.root / ".samebits")
    shutil.rmtree(prepared.root / "run" / "bundle")
    assert "dvc pull" in prepared.call("verify", record, code=3).stderr


def test_a_record_that_came_with_git_alone_is_shown(prepared, record):
    shutil.rmtree(prepared.root / ".samebits")
    shown = prepared.call("show", record[:12]).stdout
    assert record in shown and "validation_loss" in shown
    assert "none in" in shown and "`dvc repro` makes them" in shown
    assert "begins with" in prepared.call("show", "0000000000", code=2).stderr


def test_a_hash_of_nothing(prepared):
    assert "begins with 00000000" in prepared.call("verify", "00000000", code=2).stderr


def test_a_damaged_object_is_corrupt(prepared, record):
    store = prepared.store()
    path = store.object_path(read_record(store, record).digests)
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found = verify(prepared, record, code=4)
    assert found["verdict"] == "corrupt"
    assert path.name in found["reason"]


def test_a_missing_object_is_corrupt(prepared, record):
    store = prepared.store()
    path = store.object_path(read_record(store, record).final_bundle)
    path.rename(path.with_name("away"))
    assert verify(prepared, record, code=4)["verdict"] == "corrupt"


def test_a_flipped_weight_bit_is_named(prepared, record, forge):
    def flip(tensor):
        tensor.view(np.uint32).reshape(-1)[5] ^= 1

    forged = forge(final_bundle=altered_final(prepared, record, "weights/embed.token", flip))
    found = verify(prepared, forged, code=1)
    (difference,) = found["differences"]
    assert (difference["step"], difference["what"]) == (12, "bundle")
    assert difference["tensors"][0]["tensor"] == "weights/embed.token"
    assert difference["tensors"][0]["index"] == [0, 5]
    assert "first at step 12" in found["reason"]


def test_a_forged_step_digest_is_named_by_its_step(prepared, record, forge):
    """Consistent in itself: the digest is changed in the final bundle as in the record."""

    def change(tensor):
        tensor[6] ^= 1

    final = altered_final(prepared, record, "history/digest", change)
    digests = [bytes(row) for row in load_bundle(prepared.store(), final).tensors["history/digest"]]
    forged = forge(final_bundle=final, digests=write_digests(prepared.store(), digests))
    found = verify(prepared, forged, code=1)
    assert (found["differences"][0]["step"], found["differences"][0]["what"]) == (7, "step digest")


def test_digests_that_are_not_those_of_the_final_bundle_are_corrupt(prepared, record, forge):
    digests = read_digests(prepared.store(), read_record(prepared.store(), record))
    digests[3], digests[4] = digests[4], digests[3]
    assert verify(prepared, forge(digests=write_digests(prepared.store(), digests)), code=4)["verdict"] == "corrupt"


@pytest.mark.parametrize(
    "change",
    [
        {"validation_loss": 1.0},
        {"validation": {"0": 1.0}},
    ],
    ids=["final", "before"],
)
def test_a_polished_evaluation_differs(prepared, record, forge, change):
    results = {**read_record(prepared.store(), record).results, **change}
    found = verify(prepared, forge(results=results), code=1)
    assert found["differences"][0]["what"] == "validation loss"


@pytest.mark.parametrize("change", [{"last_loss": 0.5}, {"accuracy": 1.0}], ids=["wrong", "unknown"])
def test_results_that_nothing_supports_are_corrupt(prepared, record, forge, change):
    results = {**read_record(prepared.store(), record).results, **change}
    assert verify(prepared, forge(results=results), code=4)["verdict"] == "corrupt"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "learning_rate", float(np.nextafter(np.float32(2e-3), np.float32(1)))),
        ("train", "seed", 1338),
        ("train", "clip_norm", 0.5),
        ("train", "beta1", 0.8),
        ("model", "dropout", 0.2),
        ("train", "extra", 1),
        ("train", "steps", 13),
    ],
)
def test_a_doctored_configuration_is_not_that_of_the_bundles(prepared, record, forge, section, key, value):
    configuration = json.loads(json.dumps(read_record(prepared.store(), record).configuration))
    configuration[section][key] = value
    assert verify(prepared, forge(configuration=configuration), code=4)["verdict"] == "corrupt"


def test_damaged_data_is_built_anew_from_its_sources(prepared, record):
    shard = prepared.root / "data" / "dataset" / "train-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    found = verify(prepared, record, "--steps", "12:12", code=0)
    assert found["dataset_from"] == "its sources"


def test_data_that_cannot_be_had_any_more_is_inconclusive(prepared, record):
    shard = prepared.root / "data" / "dataset" / "train-00000.bin"
    text = prepared.root / "corpus" / "fox.txt"
    shard.unlink()
    text.write_bytes(text.read_bytes().replace(b"fox", b"cat", 1))
    found = verify(prepared, record, code=3)
    assert found["verdict"] == "inconclusive"
    assert "its sources now give" in found["reason"]


def test_sources_changed_without_effect_are_reported_and_still_bit_exact(prepared, record):
    path = prepared.root / "data_pipeline" / "order.py"
    before = path.read_bytes()
    path.write_bytes(before + b"# without effect\n")
    found = verify_with_its_sources(prepared, record, "--steps", "12:12", code=0)
    assert found["sources_changed"] == ["data_pipeline/order.py"]
    assert found["verdict"] == "bit-exact"


def test_a_record_of_other_sources_says_so(prepared, record, forge):
    sources = {**read_record(prepared.store(), record).sources, "engine/lost.py": "0" * 64}
    forged = forge(sources=sources, sources_digest=sources_digest(sources))
    assert verify(prepared, forged, "--steps", "12:12", code=0)["sources_changed"] == ["engine/lost.py"]


def test_a_changed_data_order_differs_at_the_first_step(prepared, record):
    path = prepared.root / "data_pipeline" / "order.py"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"ROUNDS = 8", b"ROUNDS = 6"))
    found = verify_with_its_sources(prepared, record, code=1)
    assert found["differences"][0]["step"] == 1
    assert {d["tensor"] for d in found["differences"][1]["tensors"]} >= {"history/loss", "weights/embed.token"}


def test_a_store_that_cannot_be_written_is_verified(prepared, record, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    for call in ("open_new", "open_lock", "make_directory", "rename", "unlink", "sync_directory"):
        monkeypatch.setattr(f"artifacts.filesystem.{call}", refuse)
    done = prepared.call("verify", record, code=0)
    assert "verdict: bit-exact" in done.stdout
    assert "the verdict is not kept as an attestation: cannot write" in done.stdout
