"""Errors at the command line: one message, the right exit code, never a traceback unless asked for."""

import errno
import io
import json
import os
import subprocess
import sys

import pytest

from reproduce import cli
from reproduce.display import say
from reproduce.errors import Busy
from reproduce.waiting import one_stage_at_a_time


def test_outside_a_project(tmp_path, committed):
    done = subprocess.run(
        [sys.executable, "-m", "reproduce", "log"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(committed.root)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("reproduce: expected dvc.yaml in")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["stage", "trian"], 2, "'trian' is not one of"),
        (["nonsense"], 2, "No such command"),
        (["plan", "-S", "train.step=3"], 2, "did you mean 'steps'?"),
        (["plan", "-S", "train.steps=zero"], 2, "expected a whole number, found the text 'zero'"),
        (["show"], 3, "`dvc repro` makes"),
        (["show", "12"], 2, "expected 4 to 64"),
        (["stage", "prepare"], 3, "run `dvc repro`"),
        (["stage", "plan"], 3, "run `dvc repro`"),
        (["stage", "train"], 3, "run `dvc repro`"),
        (["train"], 3, "run `dvc repro`"),
        (["resume"], 3, "`dvc repro`"),
        (["stage", "evaluate"], 3, "run `dvc repro`"),
        (["commit"], 3, "run `dvc repro`"),
        (["sample", "final"], 3, "`dvc repro` makes"),
        (["use", "nothing-like-it"], 2, "expected one of andrea-120m"),
        (["gc", "--keep-last", "0"], 2, "0 is not in the range"),
    ],
)
def test_messages_and_codes(project, words, code, says):
    done = project.call(*words, code=code)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version(project):
    assert "anyone can check the bits" in project.call("--help").stdout
    listed = project.call("--help").stdout
    for command in ("use", "train", "resume", "verify", "log", "show", "sample", "plan", "commit", "fsck", "gc"):
        assert f"\n  {command} " in listed


def test_a_broken_configuration_stops_dvc_with_the_message(project):
    path = project.root / "params.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("vocab:", "vocba:"), encoding="utf-8", newline="")
    done = project.dvc("repro", code=None)
    assert done.returncode != 0
    assert "model.vocba: no such key: did you mean 'vocab'?" in done.stderr


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"model": {"vocab": 5}}, 2, "model.vocab: expected at least the tokenizer's"),
        ({"model": {"context": 512}}, 2, "one window of context 512"),
        ({"model": {"context": 10**6}}, 2, "one window of context 1000000"),
        ({"sampling": {"prompt": "€"}}, 2, "sampling.prompt"),
        ({"model": {"d_model": 2**16, "heads": 2**9, "layers": 4}}, 5, "the plan needs"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(project, changes, code, says):
    for stage in ("fetch", "prepare"):
        project.call("stage", stage)
    project.write_params(changes)
    for stage in ("plan", "train"):
        assert says in project.call("stage", stage, code=code).stderr


@pytest.mark.parametrize(
    ("text", "last", "says"),
    [
        ("", "prepare", "validation split needs"),
        ("x", "prepare", "validation split needs"),
        ("The\r\n" * 60, "plan", "the validation split has 15 tokens, but one window of context 16 needs 17"),
        ("a lone byte \udcff here" * 50, "prepare", "UTF-8"),
    ],
)
def test_texts_that_cannot_be_trained_on(project, text, last, says):
    path = project.root / "corpus" / "fox.txt"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    project.call("stage", "fetch")
    if last == "plan":
        project.call("stage", "prepare")
    assert says in project.call("stage", last, code=2).stderr


def test_an_unexpected_error_hides_its_traceback_until_asked(monkeypatch, capsys):
    def fail(*arguments):
        raise RuntimeError("gremlins")

    monkeypatch.setattr("reproduce.project.Project.find", fail)
    assert cli.main(["log"]) == 70
    said = capsys.readouterr().err
    assert "unexpected RuntimeError: gremlins" in said
    assert "Traceback" not in said
    assert cli.main(["--debug", "log"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_error(prepared):
    reader = subprocess.Popen(
        f'"{sys.executable}" -m reproduce show | true', shell=True, cwd=prepared.root, stderr=subprocess.PIPE
    )
    assert b"Traceback" not in reader.communicate(timeout=100)[1]


def test_letters_that_a_terminal_cannot_show_are_escaped(monkeypatch):
    """In stages, in messages of errors and in text that was asked for."""
    for show in (say, lambda text: cli.main(["use", text])):
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        show("mäh")
        out.flush()
        assert b"m\\xe4h" in out.buffer.getvalue()


def test_a_read_only_project_is_named(prepared):
    probe = prepared.root / "run"
    if os.access(probe, os.W_OK) and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    probe.chmod(0o555)
    try:
        assert "Permission denied" in prepared.call("stage", "evaluate", code=None).stderr
    finally:
        probe.chmod(0o755)


def test_one_stage_at_a_time_waits_says_so_and_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr("reproduce.waiting.PATIENCE_SECONDS", 0.5)
    said = []
    with (
        one_stage_at_a_time(tmp_path, said.append),
        pytest.raises(Busy, match="did not end within"),
        one_stage_at_a_time(tmp_path, said.append),
    ):
        raise AssertionError("two stages at once")
    assert len(said) == 1
    with one_stage_at_a_time(tmp_path, said.append):
        pass
    assert len(said) == 1


def test_no_git_repository(project):
    """Everything but DVC's own use of Git works; DVC is told once."""
    aside = project.root.parent / "git"
    (project.root / ".git").rename(aside)
    project.dvc("config", "--local", "core.no_scm", "true")
    try:
        project.dvc("repro")
        assert json.loads(project.read("run/metrics.json"))
        assert "verdict: bit-exact" in project.reproduce("verify", project.record()).stdout
    finally:
        aside.rename(project.root / ".git")


def test_errors_of_the_system_have_a_message(monkeypatch, capsys):
    def fail(*arguments):
        raise OSError(errno.EACCES, "Permission denied", "/somewhere")

    monkeypatch.setattr("reproduce.project.Project.find", fail)
    assert cli.main(["log"]) == 2
    assert "/somewhere: Permission denied" in capsys.readouterr().err


def test_interrupted_while_modules_load(project):
    """Ctrl-C at the moment when the command line's modules are looked for: one line, as later on."""
    program = (
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored below a shell's background job
        "class Interrupting:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'reproduce.cli':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "runpy.run_module('reproduce', run_name='__main__')\n"
    )
    done = project.run(sys.executable, "-c", program, code=130)
    assert (done.stdout, done.stderr) == ("", "reproduce: interrupted\n")


def test_prepare_says_what_the_model_needs(project):
    project.call("stage", "fetch")
    done = project.call("stage", "prepare")
    assert "held out, a vocabulary of 43: model.vocab must be at least 43\n" in done.stdout + done.stderr


def test_use_keeps_what_nothing_else_has(project):
    """An edited params.yaml is kept; the committed one and an experiment's are not, and Git does not see the copy."""
    before = project.root / "params.yaml.before"
    assert "kept" not in project.call("use", "tiny").stdout
    assert "kept" not in project.call("use", "char-4.8m").stdout
    assert not before.exists()
    project.git("checkout", "-q", "params.yaml")
    edited = project.read("params.yaml") + "# mine\n"
    (project.root / "params.yaml").write_text(edited, encoding="utf-8", newline="")
    said = project.call("use", "tiny").stdout
    assert said.startswith("params.yaml was edited: it is kept as params.yaml.before\nparams.yaml is now ")
    assert before.read_text(encoding="utf-8") == edited
    assert "before" not in project.git("status", "--porcelain")


def test_the_stage_plan_refuses_the_tier_prod_without_a_card(prepared):
    prepared.write_params({"tier": "prod", "train": {"precision": "bf16"}})
    try:
        said = prepared.call("stage", "plan", code=2).stderr
    finally:
        prepared.write_params()
    assert "the tier prod runs on a card: name one" in said


@pytest.mark.parametrize("command", [["log"], ["fsck"], ["gc"], ["train"]])
@pytest.mark.parametrize("store", ["dvc.yaml", "dvc.yaml/store"])
def test_a_store_that_is_a_file(prepared, command, store):
    prepared.write_params({"run": {"store": store}})
    try:
        said = prepared.call(*command, code=2).stderr
    finally:
        prepared.write_params()
    assert (
        said == f"reproduce: run.store: expected a folder, found the file {prepared.root / 'dvc.yaml'}: name a folder\n"
    )


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EACCES, "Permission denied: give yourself the right to it or name another place"),
        (errno.EROFS, "Read-only file system: name a place that can be written"),
        (errno.ENOTDIR, "Not a directory: a folder is expected there: name one"),
        (errno.EISDIR, "Is a directory: a file is expected there: name one"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_errors_of_the_system_name_the_file_that_was_meant(project, monkeypatch, number, says):
    """The name that a file has while it is written is nobody's business."""

    def refuse(path, data):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", refuse)
    assert project.call("use", "tiny", code=2).stderr == f"reproduce: {project.root / 'params.yaml'}: {says}\n"
