"""A file of another kind than was said is a slip (2), a damaged one of that kind is corrupt (4)."""

import contextlib
import io

import pytest

from reproduce import cli


def call(lab, *words, code):
    """What is said on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(lab.project.root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = cli.main(words)
    assert found == code, out.getvalue() + err.getvalue()
    return err.getvalue()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("folder", "is not the folder of a bundle"),
        ("gpt2", "is not a safetensors file"),
        ("andrea", "is no ANDREA checkpoint of the model in params.yaml"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"short", b"Some text of no kind at all.\n" * 9])
def test_a_file_of_another_kind(spoilt, kind, says, content):
    (spoilt.project.root / "text").write_bytes(content)
    said = call(spoilt, "import", "text", "--as", kind, code=2)
    assert says in said


@pytest.mark.parametrize(
    ("kind", "says"),
    [("folder", "no manifest.json"), ("gpt2", "there is no such file"), ("andrea", "is not a file")],
)
def test_a_folder_of_another_kind(spoilt, kind, says):
    assert says in call(spoilt, "import", "corpus", "--as", kind, code=2)


@pytest.mark.parametrize("content", [b"", b"# Text\n", b"[]"])
def test_what_is_no_statement(spoilt, content):
    (spoilt.project.root / "text").write_bytes(content)
    assert "is not an in-toto statement" in call(spoilt, "attest", spoilt.record, "--add", "text", code=2)


def test_a_damaged_statement_is_corrupt(spoilt):
    (spoilt.project.root / "text").write_bytes(b'{"_type": 1')
    call(spoilt, "attest", spoilt.record, "--add", "text", code=4)


@pytest.mark.parametrize("kind", ["gpt2", "andrea"])
def test_a_cut_file_of_its_kind_is_corrupt(spoilt, kind):
    root = spoilt.project.root
    if kind == "gpt2":
        pytest.importorskip("safetensors")
    call(spoilt, "export", "final", "whole", "--as", kind, code=0)
    path = root / "whole" / "model.safetensors" if kind == "gpt2" else root / "whole"
    path.write_bytes(path.read_bytes()[:-4])
    call(spoilt, "import", "whole", "--as", kind, code=4)


def test_a_damaged_head_is_corrupt_where_the_length_is_right(spoilt):
    path = spoilt.project.root / "whole"
    call(spoilt, "export", "final", "whole", "--as", "andrea", code=0)
    path.write_bytes(path.read_bytes()[:4] + b"\1\0\0\0" + path.read_bytes()[8:])
    call(spoilt, "import", "whole", "--as", "andrea", code=4)


@pytest.mark.parametrize("kind", ["folder", "gpt2", "andrea"])
def test_the_right_kind_is_taken(spoilt, kind):
    if kind == "gpt2":
        pytest.importorskip("safetensors")
    call(spoilt, "export", "final", "whole", "--as", kind, code=0)
    call(spoilt, "import", "whole", "--as", kind, code=0)
