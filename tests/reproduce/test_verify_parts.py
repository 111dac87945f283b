"""Verifying a part: chosen segments, several at once, and the sources of the record from Git."""

import json
import re
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import find_records, load_bundle, read_attestations, record_bundles, save_bundle
from artifacts.index import add
from reproduce.verification.jobs import thread_shares


@pytest.fixture(scope="module")
def looked_at(finished, committed):
    """A finished project; verifying adds attestations to it and nothing else."""
    copy = finished.with_name("looked at")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(finished, copy, symlinks=True)
    return type(committed)(copy)


@pytest.fixture(scope="module")
def record(looked_at):
    return looked_at.record()


def verify(project, *words, code=0):
    return json.loads(project.call("verify", *words, "--json", code=code).stdout)


def test_chosen_segments_say_their_seed_and_can_be_chosen_again(looked_at, record):
    said = looked_at.call("verify", record, "--segments", "2").stdout
    seed = re.search(r"--seed (\d+)", said).group(1)
    assert "in 2 segments between steps" in said
    again = verify(looked_at, record, "--segments", "2", "--seed", seed)
    assert again["seed"] == int(seed)
    assert all(f"segment {s['first']}:{s['last']}: bit-exact" in said for s in again["segments"])
    newest = [a.verdict for a in read_attestations(looked_at.store(), record).values()]
    assert any(v.get("segments") and v["seed"] == int(seed) for v in newest)


def test_several_jobs_come_to_the_same_as_one(looked_at, record):
    one = verify(looked_at, record)
    many = verify(looked_at, record, "--jobs", "2")
    assert [s["first"] for s in many["segments"]] == [1, 6, 11]
    assert one["verdict"] == many["verdict"] == "bit-exact"
    assert one["compared"] == many["compared"] == {"digests": 12, "bundles": 4, "evaluations": 4}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 128))
def test_jobs_share_the_cores(tasks, jobs, cores):
    """Those of one turn have no more threads than cores, or one each, and leave fewer cores idle than they are."""
    jobs = min(jobs, tasks)
    shares = thread_shares(tasks, jobs, cores)
    assert len(shares) == tasks
    for first in range(0, tasks, jobs):
        turn = shares[first : first + jobs]
        assert sum(turn) <= max(cores, len(turn))
        assert sum(turn) > cores - len(turn)


def test_one_segment_costs_its_own_steps_only(looked_at, record):
    found = verify(looked_at, record, "--segments", "1", "--seed", "3")
    (segment,) = found["segments"]
    assert found["compared"]["digests"] == segment["last"] - segment["first"] + 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--segments", "2", "--steps", "1:2"], "exclude each other"),
        (["--seed", "2"], "give --segments"),
        (["--segments", "0"], "0 is not in the range"),
        (["--jobs", "0"], "0 is not in the range"),
    ],
)
def test_contradictions(looked_at, record, words, says):
    assert says in looked_at.call("verify", record, *words, code=2).stderr


@pytest.fixture
def exchanged(looked_at, record):
    """A record whose list names another bundle at step 5: one with a weight flipped, everything else as it was."""
    store = looked_at.store()
    path = store.path / "index" / "records" / record
    before = path.read_bytes()
    bundle = load_bundle(store, record_bundles(store, record)[5])
    bundle.tensors["weights/embed.token"][1, 2] += 1
    forged = save_bundle(store, bundle.tensors, bundle.state)
    path.unlink()
    add(store, record, {5: forged})
    yield forged
    path.write_bytes(before)


def test_an_exchanged_bundle_in_between_is_found_from_either_side(looked_at, record, exchanged):
    after = verify(looked_at, record, "--steps", "6:7", code=1)
    assert after["differences"][0]["what"].startswith("bundle, which has not the state")
    assert (after["differences"][0]["step"], after["differences"][0]["bundle"]) == (5, exchanged)
    before = verify(looked_at, record, "--steps", "1:5", code=1)
    assert before["differences"][0]["tensors"] == [
        {"tensor": "weights/embed.token", "elements": 1, "index": [1, 2]}
        | {key: before["differences"][0]["tensors"][0][key] for key in ("expected", "found")}
    ]


def test_a_checkout_replays_with_the_sources_of_the_record(looked_at, record):
    """The sources here compute something else; the commit that the record was made with does not."""
    path = looked_at.root / "data_pipeline" / "order.py"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"ROUNDS = 8", b"ROUNDS = 6"))
    looked_at.git("commit", "-q", "-a", "-m", "another order")
    try:
        words = ("verify", record, "--steps", "11:12", "--json")
        here = json.loads(looked_at.reproduce(*words, code=1).stdout)
        assert here["sources_changed"] == ["data_pipeline/order.py"]
        said = looked_at.reproduce("verify", record, "--steps", "11:12", code=1).stdout
        commit = looked_at.git("rev-parse", "sources").strip()
        assert f"Git commit {commit} has the record's: --checkout" in said
        there = json.loads(looked_at.reproduce(*words, "--checkout").stdout)
        assert (there["verdict"], there["checkout"], there["sources_changed"]) == ("bit-exact", commit, [])
        assert "checkouts" not in looked_at.git("worktree", "list")
    finally:
        looked_at.git("reset", "-q", "--hard", "sources")


def test_a_checkout_of_sources_that_git_does_not_have(looked_at, record):
    assert find_records(looked_at.store()) == [record]
    path = looked_at.root / "data_pipeline" / "order.py"
    path.write_bytes(path.read_bytes() + b"# without effect\n")
    aside = looked_at.root.parent / "git aside"
    (looked_at.root / ".git").rename(aside)
    try:
        done = looked_at.reproduce("verify", record, "--steps", "12:12", "--checkout", "--json", code=3)
        assert "no commit that Git knows here" in json.loads(done.stdout)["reason"]
    finally:
        aside.rename(looked_at.root / ".git")
        looked_at.git("checkout", "-q", "--", "data_pipeline")
