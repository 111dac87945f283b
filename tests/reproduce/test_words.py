"""Words that are not what a command takes: refused as wrong use, with what was probably meant."""

import contextlib
import io
import shutil

import pytest

from reproduce import cli


def call(lab, *words):
    """The exit code, and what is said on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(lab.project.root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    assert "Traceback" not in err.getvalue()
    return code, err.getvalue()


@pytest.mark.parametrize("at_hand", ["in the store", "in run/ only"])
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("", "expected 4 to 64 lower-case hexadecimal digits"),
        ("1", "expected 4 to 64"),
        ("abc", "expected 4 to 64"),
        ("0" * 65, "expected 4 to 64"),
        ("ABCD", "expected 4 to 64"),
        ("xyzw", "expected 4 to 64"),
        ("none.capsule", "there is no such file"),
        ("../none", "there is no such file"),
        ("final", "give the hash that `reproduce show` prints"),
    ],
)
def test_verify_takes_hashes(spoilt, word, says, at_hand):
    if at_hand == "in run/ only":
        shutil.rmtree(spoilt.project.private())
    code, said = call(spoilt, "verify", word)
    assert code == 2
    assert says in said
    assert "is another record" not in said


def test_a_hash_of_nothing_names_the_record_that_there_is(lab):
    code, said = call(lab, "verify", "00000000")
    assert code == 2
    assert "begins with 00000000, and" in said
    assert "is another record" in said


def test_the_first_digits_of_the_record_in_run_are_enough(spoilt):
    shutil.rmtree(spoilt.project.private())
    assert call(spoilt, "verify", spoilt.record[:4])[0] == 0


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("params.yaml", "is not a capsule: `reproduce export RECORD FILE` writes one"),
        ("x.safetensors", "it looks like GPT-2 weights"),
    ],
)
def test_verify_says_what_a_file_looks_like(spoilt, path, says):
    (spoilt.project.root / "x.safetensors").write_bytes(b"")
    code, said = call(spoilt, "verify", path)
    assert code == 2
    assert says in said


@pytest.mark.parametrize("words", [(".samebits/store", "corpus"), ("corpus", ".samebits/store")])
def test_diff_blames_the_folder_that_is_no_store(lab, words):
    code, said = call(lab, "diff", *words)
    assert code == 2
    assert said.startswith("reproduce: corpus is no store")


@pytest.mark.parametrize("there", [True, False])
def test_verify_says_whether_there_is_a_dataset(spoilt, there):
    shutil.rmtree(spoilt.project.dataset)
    if there:
        spoilt.project.dataset.mkdir()
    with contextlib.chdir(spoilt.project.root), contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["verify", spoilt.record, "--steps", "1:1"]) == 0
    expected = "data/dataset is not the record's" if there else "there is no data/dataset"
    assert f"data: {expected}; building the record's anew" in out.getvalue()


def test_diff_takes_no_final(lab):
    code, said = call(lab, "diff", lab.record, "final")
    assert code == 2
    assert "give the hash that `reproduce show` prints" in said
