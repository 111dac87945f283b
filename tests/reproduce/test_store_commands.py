"""push, pull, export, import, attest and `show --html` on a project that has trained."""

import html.parser
import json
import math
import re
import shutil
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import Store, find_records, load_bundle, read_attestations, read_record
from artifacts.attestation import statement
from artifacts.bundle import load_manifest
from reproduce.page import curve, page, ticks


@pytest.fixture
def other(prepared):
    """The project once more, with an empty store and no data; the trained one is at `shelf` already."""
    prepared.call("push", str(prepared.root / "shelf"))
    shutil.rmtree(prepared.root / ".samebits" / "store")
    shutil.rmtree(prepared.root / "data" / "dataset")
    return prepared


def test_push_and_pull(other):
    record = other.record()
    said = other.call("pull", str(other.root / "shelf"), record[:10]).stdout
    assert "pulled 1 record: " in said
    assert record in said
    assert find_records(other.store()) == [record]
    assert "were there already" in other.call("pull", str(other.root / "shelf")).stdout
    assert "0 missing, 0 corrupt" in other.call("fsck").stdout
    (other.root / "empty").mkdir()
    for nothing in ("nothing", "empty"):
        said = other.call("pull", str(other.root / nothing), code=2).stderr
        assert "is not a store" in said
        assert not (other.root / nothing / "STORE_FORMAT").exists()
    other.call("pull", str(other.root / "shelf"), "0000", code=2)


@pytest.mark.parametrize("command", ["push", "pull"])
def test_a_file_is_no_place_for_a_store(prepared, command):
    said = prepared.call(command, "params.yaml", code=2).stderr
    assert said.startswith("reproduce: params.yaml is a file: name a folder or a URL")


def test_a_capsule_is_verified_without_the_sources_of_its_data(prepared):
    record = prepared.record()
    prepared.call("export", record, "c.capsule", "--data", "--all-bundles")
    for gone in (".samebits", "data/dataset", "corpus", "run/bundle"):
        shutil.rmtree(prepared.root / gone)
    said = prepared.call("import", "c.capsule").stdout
    assert f"reproduce verify {record[:12]}" in said
    assert "verdict: bit-exact" in prepared.reproduce("verify", record[:12]).stdout
    prepared.call("import", "c.capsule", "--files", "files")
    found = read_record(prepared.store(), record)
    sources = prepared.root / "files" / "sources"
    assert {p.relative_to(sources).as_posix() for p in sources.rglob("*") if p.is_file()} == set(found.sources)
    assert (prepared.root / "files" / "dataset").is_dir()


def test_a_capsule_without_data_names_only_what_it_has(prepared):
    prepared.call("export", prepared.record(), "c.capsule")
    prepared.call("export", prepared.record(), "c.capsule", code=2)
    prepared.call("import", "c.capsule")
    data = (prepared.root / "c.capsule").read_bytes()
    (prepared.root / "cut").write_bytes(data[:-2000])
    prepared.call("import", "cut", code=4)


def test_the_dataset_of_another_record_is_not_exported(prepared):
    (prepared.root / "corpus" / "more.txt").write_text("More text, which makes another dataset.\n", encoding="utf-8")
    prepared.call("stage", "fetch")
    prepared.call("stage", "prepare")
    prepared.call("export", prepared.record(), "c.capsule", "--data", code=3)
    assert not (prepared.root / "c.capsule").exists()


def test_andrea_there_and_back(prepared):
    final = read_record(prepared.store(), prepared.record()).final_bundle
    prepared.call("export", final, "c.bin", "--as", "andrea")
    step, count = struct.unpack("<ii", (prepared.root / "c.bin").read_bytes()[:8])
    bundle = load_bundle(prepared.store(), final)
    assert (step, count) == (12, sum(a.size for n, a in bundle.tensors.items() if n.startswith("weights/")))
    said = prepared.call("import", "c.bin", "--as", "andrea").stdout
    for lacking in ("loss and digest of every step", "seed", "hashes of configuration"):
        assert lacking in said
    again = load_bundle(prepared.store(), said.split()[1])
    assert again.state["step"] == 12
    assert again.state["imported"]["kind"] == "andrea"
    assert {name: a.tobytes() for name, a in again.tensors.items()} == {
        name: a.tobytes() for name, a in bundle.tensors.items() if not name.startswith("history/")
    }
    assert "imported-" in prepared.call("log").stdout
    assert "imported" in prepared.call("show", said.split()[1]).stdout
    # It is no run's own: nothing goes on from it without a word.
    prepared.call("resume", said.split()[1], code=3)


def test_gpt2_there_and_back(prepared):
    pytest.importorskip("safetensors")
    final = read_record(prepared.store(), prepared.record()).final_bundle
    prepared.call("export", prepared.record(), "gpt2", "--as", "gpt2")
    prepared.call("export", final, "gpt2", "--as", "gpt2", code=2)
    config = json.loads(prepared.read("gpt2/config.json"))
    assert (config["model_type"], config["n_embd"], config["vocab_size"]) == ("gpt2", 16, 48)
    said = prepared.call("import", "gpt2", "--as", "gpt2").stdout
    assert "Adam's moments" in said
    weights = load_bundle(prepared.store(), final).tensors
    again = load_bundle(prepared.store(), said.split()[1])
    for name, array in again.tensors.items():
        expected = weights[name].tobytes() if name.startswith("weights/") else bytes(array.nbytes)
        assert array.tobytes() == expected
    prepared.write_params({"model": {"tied": False}})
    prepared.call("import", "gpt2", "--as", "gpt2", code=2)
    prepared.write_params({"model": {"hidden": 48}})
    prepared.call("import", "gpt2", "--as", "gpt2", code=4)


def test_part_of_a_store_is_checked(prepared):
    said = prepared.call("fsck").stdout
    for whole in ("100%", "1", "1.0"):
        assert prepared.call("fsck", "--sample", whole).stdout == said
    count = int(said.split()[0])
    for part in ("5%", "0.05"):
        read = int(prepared.call("fsck", "--sample", part).stdout.split()[2])
        assert 0 < read < count
    for wrong in ("101%", "-1", "nan", "inf", "five", "%", ""):
        assert "such as 5% or 0.05" in prepared.call("fsck", "--sample", wrong, code=2).stderr


def test_what_a_store_has_lost_comes_back_from_another(other):
    other.call("pull", str(other.root / "shelf"))
    store = other.store()
    final = load_manifest(store, read_record(store, other.record()).final_bundle)
    (lost, *_), (spoilt, *_) = final.tensors[0].chunks, final.tensors[-1].chunks
    store.object_path(lost).unlink()
    store.object_path(spoilt).chmod(0o644)
    store.object_path(spoilt).write_bytes(b"no object")
    said = other.call("fsck", code=4).stdout
    assert "1 missing, 1 corrupt" in said
    assert "reproduce pull" in said
    other.call("pull", str(other.root / "shelf"))
    assert "0 missing, 0 corrupt" in other.call("fsck").stdout


@pytest.mark.parametrize("kind", ["andrea", "gpt2"])
def test_text_of_an_imported_bundle(prepared, kind):
    """It takes a tokenizer that the user names, and then is the text of the same weights trained here."""
    prepared.call("export", "final", "there", "--as", kind)
    imported = prepared.call("import", "there", "--as", kind).stdout.split()[1]
    options = ("--prompt", "The fox", "--tokens", "30", "--seed", "5")
    expected = prepared.call("sample", "final", *options).stdout
    assert prepared.call("sample", imported, *options, "--tokenizer", "data/dataset").stdout == expected
    assert "--tokenizer data/dataset" in prepared.call("sample", imported, *options, code=2).stderr
    prepared.call("sample", imported, *options, "--tokenizer", "nothing", code=2)
    prepared.call("sample", imported, *options, "--tokenizer", "corpus", code=2)
    said = prepared.call("sample", "final", *options, "--tokenizer", "data/dataset", code=2).stderr
    assert "trained with its own" in said
    prepared.call("export", imported, "again", "--as", kind)
    prepared.write_params({"model": {"hidden": 48}})
    said = prepared.call("sample", imported, *options, "--tokenizer", "data/dataset", code=2).stderr
    assert "not of the model in params.yaml" in said


def test_what_is_no_capsule_is_told_as_that(prepared):
    prepared.call("export", "final", "plain", "--as", "folder")
    prepared.call("export", "final", "gpt2", "--as", "gpt2")
    (prepared.root / "text").write_text("hello\n", encoding="utf-8")
    (prepared.root / "empty").write_bytes(b"")
    for path, remedy in (
        ("plain", "--as folder"),
        ("gpt2", "--as gpt2"),
        ("gpt2/model.safetensors", "--as gpt2"),
        ("text", "reproduce export RECORD FILE"),
        ("empty", "reproduce export RECORD FILE"),
        ("corpus", "reproduce export RECORD FILE"),
    ):
        said = prepared.call("import", path, code=2).stderr
        assert "is not a capsule" in said
        assert remedy in said
    for kind in ("capsule", "folder", "gpt2", "andrea"):
        assert "does not exist" in prepared.call("import", "nothing", "--as", kind, code=2).stderr


def test_final_is_a_name_wherever_a_bundle_is(prepared):
    final = read_record(prepared.store(), prepared.record()).final_bundle
    shown = prepared.call("show", "final").stdout
    assert shown == prepared.call("show", final).stdout
    prepared.call("show", "final", "--html", "a.html")
    prepared.call("show", final, "--html", "b.html")
    assert prepared.read("a.html") == prepared.read("b.html")
    # `dvc pull` brings the bundle, not the store.
    shutil.rmtree(prepared.root / ".samebits" / "store")
    assert final in prepared.call("show", "final").stdout
    prepared.call("show", final, code=2)


def test_results_that_are_not_there_yet(prepared):
    (prepared.root / "run" / "run.json").unlink()
    for command in (("show",), ("show", "final"), ("sample", "final"), ("export", "final", "x", "--as", "andrea")):
        assert "`dvc repro` makes or finishes it" in prepared.call(*command, code=3).stderr
    (prepared.root / "run" / "record.json").unlink()
    prepared.call("show", "--html", "x.html", code=3)


def test_a_bundle_as_a_folder(prepared):
    final = read_record(prepared.store(), prepared.record()).final_bundle
    prepared.call("export", final, "plain", "--as", "folder")
    assert final in prepared.call("import", "plain", "--as", "folder").stdout


def test_attest_shows_what_disagrees(prepared):
    record = prepared.record()
    (seen,) = json.loads(prepared.call("attest", record).stdout)
    assert seen["predicate"]["activity"] == "trained"
    seen["predicate"] |= {"activity": "verified", "verdict": {"verdict": "differs", "step": 3}}
    (prepared.root / "seen.json").write_bytes(
        json.dumps(seen, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    )
    both = json.loads(prepared.call("attest", record, "--add", "seen.json", code=1).stdout)
    assert {item["predicate"]["verdict"]["verdict"] for item in both} == {"trained", "differs"}
    assert both == [statement(item) for item in read_attestations(prepared.store(), record).values()]
    (prepared.root / "seen.json").write_bytes(b"{}")
    prepared.call("attest", record, "--add", "seen.json", code=4)
    prepared.call("attest", read_record(prepared.store(), record).final_bundle, code=2)


class Outline(html.parser.HTMLParser):
    """What a page loads and shows."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.open = [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_holds_everything_and_loads_nothing(prepared):
    record = prepared.record()
    prepared.call("show", record, "--html", "record.html")
    written = prepared.read("record.html")
    prepared.call("show", "--html", "again.html")
    assert prepared.read("again.html") == written
    outline = Outline(written)
    assert outline.open == []
    assert outline.links == []
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert "url(" not in written
    assert "@import" not in written
    assert {"svg", "polyline"} <= set(outline.tags)
    found = read_record(prepared.store(), record)
    for shown in (record, found.final_bundle, found.dataset, "train.learning_rate", "after step 4", "cpu.model"):
        assert shown in outline.text
    prepared.call("show", found.final_bundle[:12], "--html", "bundle.html")
    assert record in Outline(prepared.read("bundle.html")).text
    prepared.call("show", "0000", "--html", "none.html", code=2)


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e5))
def test_axes_have_a_few_round_numbers(low, span):
    marks = ticks(low, low + span)
    assert 2 <= len(marks) <= 8
    assert all(low - 1e-6 * span <= at <= low + span * (1 + 1e-6) for _, at in marks)
    assert len({text for text, _ in marks}) == len(marks)
    assert all(math.isclose(float(text), at, abs_tol=1e-9) for text, at in marks)


def test_the_curve_holds_every_number():
    losses = np.array([4.0, 3.0, 2.5, 2.0], np.float32)
    drawn = curve(losses, {"2": 3.1, "4": 2.2, "9": None})
    assert drawn.count("<circle") == 2
    (points,) = re.findall(r'points="([^"]*)"', drawn)
    assert len(points.split()) == 4
    assert curve(np.ones(5000, np.float32), {}).count(",") > 700
    assert "No steps" in curve(None, {})


def test_what_comes_from_elsewhere_is_escaped(prepared):
    record = prepared.record()
    (seen,) = json.loads(prepared.call("attest", record).stdout)
    seen["predicate"]["environment"] = {"<script>alert(1)</script>": "<img src=x onerror=alert(1)>"}
    seen["predicate"]["verdict"] = {"verdict": "</h3><script>"}
    (prepared.root / "seen.json").write_bytes(json.dumps(seen, sort_keys=True, separators=(",", ":")).encode())
    prepared.call("attest", record, "--add", "seen.json")
    outline = Outline(page(Store(prepared.root / ".samebits" / "store"), record))
    assert not {"script", "img"} & set(outline.tags)
    assert "<script>alert(1)</script>" in outline.text
