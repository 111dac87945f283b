"""The commands `plan` and `model`, as a user meets them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline import fetch, prepare
from reproduce.cli import main
from reproduce.configuration import load_configuration
from reproduce.model.code import write_code
from reproduce.planning.devices import CARDS
from tests.plan.models import EXAMPLE, EXPERIMENTS

BAD = EXAMPLE.replace("hidden=4 * d,", "hidden=4 * d, out=4 * d,")
CLASSIC = ["-S", "train.batch=64", "-S", "model.context=512", "-S", "model.attention=stored", "-S", "train.shards=1"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the experiments and tiny as the current one."""
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    (tmp_path / "experiments").mkdir()
    for path in EXPERIMENTS:
        (tmp_path / "experiments" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "params.yaml").write_bytes((tmp_path / "experiments" / "tiny.yaml").read_bytes())
    (tmp_path / "example.model").write_text(EXAMPLE, encoding="utf-8", newline="")
    (tmp_path / "bad.model").write_text(BAD, encoding="utf-8", newline="")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plan_itemises(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--budget", "4GiB"]) == 0
    out = capsys.readouterr().out
    for word in ("parameters", "gradients", "optimizer state", "attention buffers", "workspace", "bundles", "ln(84)"):
        assert word in out
    assert "fits: " in out and "the budget is 4.0 GiB" in out
    assert "measured" not in out
    assert "\x1b" not in out


def test_plan_refuses_with_remedies(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "char-4.8m", "--budget", "4GiB", *CLASSIC]) == 5
    out = " ".join(capsys.readouterr().out.split())
    assert "refused: the plan needs" in out
    assert "Largest item: attention buffers (attn.weights: 64·8·512·512 floats, 512.0 MiB a layer, 3.0 GiB" in out
    assert "1 compute attention weights again: model.attention=tiled" in out
    assert "--apply N writes change N" in out


def test_plan_says_what_the_whole_batch_would_take(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The classic in its 8 shards: accepted, and what makes the difference is named."""
    assert main(["plan", "char-4.8m", "--budget", "4GiB", *CLASSIC[:6]]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "largest item: attention buffers (attn.weights: 8·8·512·512 floats, 64.0 MiB a layer, 384.0 MiB in" in out
    assert "The whole batch at once would take 64·8·512·512 floats, 512.0 MiB a layer, 3.0 GiB in all" in out
    assert "fits: " in out


def test_plan_marks_what_does_not_suffice(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "char-4.8m", "--budget", "60MiB", *CLASSIC]) == 5
    out = capsys.readouterr().out
    table = out.partition("What would help")[2].splitlines()
    changes = [line.split() for line in table if "MiB " in line]
    assert changes
    assert all("no" in words and "yes" not in words for words in changes)
    assert "No single change makes it fit" in out and "--apply" not in out


def test_plan_states_the_cost_of_recomputation(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "char-4.8m", "-S", "run.recompute=6"]) == 0
    assert "of these: blocks computed again, 33.2 % more" in capsys.readouterr().out
    assert main(["plan", "char-4.8m"]) == 0
    assert "computed again" not in capsys.readouterr().out


def test_plan_of_too_small_a_vocabulary(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused as soon as the dataset is there, and only if it is this configuration's."""
    (project / "text.txt").write_text("to be or not to be, that is it\n" * 400, encoding="utf-8", newline="")
    source = "data.sources=[{kind: file, paths: [text.txt]}]"
    configuration = load_configuration(project / "params.yaml", [source])
    small = ["plan", "-S", source, "-S", "model.vocab=12"]
    assert main(small) == 0
    fetch(configuration.data, project / "data" / "raw", project)
    prepare(configuration.data, project / "data" / "raw", project / "data" / "dataset")
    capsys.readouterr()
    assert main(small) == 2
    assert capsys.readouterr().err == (
        "reproduce: model.vocab: expected at least the tokenizer's 13 tokens, found 12: set model.vocab=13\n"
    )
    assert main(["plan", "-S", source, "-S", "model.vocab=13"]) == 0
    assert main(["plan", "-S", "model.vocab=12"]) == 0
    assert main([*small, "-S", "data.tokenizer={kind: bpe, vocabulary: 300}"]) == 0
    (project / "data" / "dataset" / "manifest.json").write_bytes(b"{}")
    assert main(small) == 4
    assert "manifest.json" in capsys.readouterr().err


def test_plan_as_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "char-4.8m", "--budget", "4GiB", "--json", *CLASSIC]) == 5
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["limit"] == 4 * 2**30
    assert found["memory"]["by_category"]["attention"] == 6 * 512 * 2**20
    assert found["remedies"][0]["changes"] == {"model.attention": "tiled"}
    assert found["remedies"][0]["changes_bits"] is False
    assert found["tokens_per_second_measured_here"] is None
    assert found["graph"]["logits"] == "head.y"


def test_plan_applies_a_remedy(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "char-4.8m", "--budget", "4GiB", "--apply", "1", *CLASSIC]) == 0
    assert capsys.readouterr().out == (
        "params.yaml is now char-4.8m, train.batch=64, model.context=512, model.attention=stored, train.shards=1, with "
        "compute attention weights again: model.attention=tiled\n"
    )
    written = load_configuration(project / "params.yaml")
    assert (written.model.attention, written.train.batch, written.model.context) == ("tiled", 64, 512)
    assert main(["plan", "--budget", "4GiB"]) == 0
    assert main(["plan", "--budget", "4GiB", "--apply", "1"]) == 2
    assert "the plan fits as it is" in capsys.readouterr().err


def test_a_remedy_for_another_device_leaves_the_device(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "char-4.8m", "--device", "h200", "--budget", "600MiB", "--apply", "1"]) == 0
    assert capsys.readouterr().out.endswith("; run.device is still cpu\n")
    assert load_configuration(project / "params.yaml").run.device == "cpu"


def test_plan_for_a_card(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2-124m", "--device", "gtx1650"]) == 5
    assert "an NVIDIA GeForce GTX 1650 leaves 3.8 GiB" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "gpt2-124m", "--device", "h200"]) == 0


def test_time_is_measured_on_this_device_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measure", "--device", "h200"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--measure trains on run.device, which is cpu: it cannot tell the time that h200 takes" in said


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_plan_of_the_tier_prod(project: Path, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all devices in the list only those of compute capability 8.0 or more are planned for."""
    prod = ["plan", "-S", "tier=prod", "-S", f"train.precision={precision}"]
    for name, (title, _, capability) in CARDS.items():
        assert main([*prod, "--device", name]) == (0 if capability >= 80 else 2)
        said = capsys.readouterr().err
        wanted = f"reproduce: {title} has compute capability {capability / 10}, the tier prod needs at least 8.0: use "
        assert said == ("" if capability >= 80 else f"{wanted}the tier portable\n")
    assert {name for name, (_, _, capability) in CARDS.items() if capability < 80} >= {"gtx1650", "rtx2080ti", "t4"}
    assert main([*prod, "--device", "cpu"]) == 2
    assert "the tier prod runs on a card: name one, such as --device h200" in capsys.readouterr().err


def test_plan_of_the_precision_fp8(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eight = ["plan", "-S", "tier=prod", "-S", "train.precision=fp8", "--device"]
    assert main([*eight, "h200"]) == 0
    assert main([*eight, "a100-80"]) == 2
    said = capsys.readouterr().err
    assert "has compute capability 8.0, train.precision: fp8 needs at least 8.9: use bf16" in said


def test_plan_draws(project: Path) -> None:
    assert main(["plan", "--graph", "graph.svg"]) == 0
    first = (project / "graph.svg").read_bytes()
    assert main(["plan", "--graph", "graph.svg"]) == 0
    assert (project / "graph.svg").read_bytes() == first
    assert first.startswith(b"<svg ")


def test_plan_of_a_model_file_refuses_and_fixes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hidden width typed into the MLP's output projection."""
    assert main(["plan", "--model", "bad.model"]) == 2
    error = capsys.readouterr().err
    assert (
        "bad.model, line 6, column 44: the out projection of mlp (block.mlp.out.y) gives [B, T, 1024], the residual "
        "sum (block.sum2.branch) expects [B, T, 256]: set out = d\n"
    ) in error
    assert error.endswith("--fix does that\n")
    assert (project / "bad.model").read_text(encoding="utf-8") == BAD
    assert main(["plan", "--model", "bad.model", "--fix"]) == 0
    assert (project / "bad.model").read_text(encoding="utf-8") == BAD.replace("out=4 * d", "out=d")
    assert "mended in bad.model" in capsys.readouterr().err


def test_what_cannot_be_mended_is_left(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = BAD.replace("causal=true", "causal=false")
    (project / "bad.model").write_text(text, encoding="utf-8", newline="")
    assert main(["model", "check", "bad.model", "--fix"]) == 2
    assert (project / "bad.model").read_text(encoding="utf-8") == text
    assert "expected causal=true" in capsys.readouterr().err


def test_model_code_and_form_and_back(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (project / "params.yaml").read_bytes()
    for name in (path.stem for path in EXPERIMENTS):
        spec = load_configuration(project / "experiments" / f"{name}.yaml").model
        assert main(["model", "code", name]) == 0
        text = capsys.readouterr().out
        assert text == write_code(spec)
        (project / "m.model").write_text(text, encoding="utf-8", newline="")
        assert main(["model", "form", "m.model", "--write"]) == 0
        assert load_configuration(project / "params.yaml").model == spec
        capsys.readouterr()
    assert main(["model", "code", "tiny", "-o", "m.model"]) == 0
    assert main(["model", "form", "m.model", "--write"]) == 0
    assert (project / "params.yaml").read_bytes() == before


def test_model_code_leaves_a_file_that_says_it(project: Path) -> None:
    assert main(["model", "code", "char-4.8m", "-S", "model.attention=tiled", "-o", "example.model"]) == 0
    assert (project / "example.model").read_text(encoding="utf-8") == EXAMPLE


def test_model_code_overwrites_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing: a number that somebody changed in what it wrote would be lost."""
    named = write_code(load_configuration(project / "experiments" / "char-4.8m.yaml").model, "Mine")
    (project / "own.model").write_text(named, encoding="utf-8", newline="")
    for name in ("own.model", "example.model", "bad.model", "params.yaml", "dvc.yaml"):
        before = (project / name).read_bytes()
        assert main(["model", "code", "tiny", "-o", name]) == 2
        assert f"{name} is there already and is not this model" in capsys.readouterr().err
        assert (project / name).read_bytes() == before


@pytest.mark.parametrize("words", [["plan", "--graph"], ["model", "code", "-o"], ["show", "--html"]])
def test_a_file_to_write_is_in_a_folder_that_is_there(
    project: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "absent/file"]) == 2
    assert capsys.readouterr().err == (
        "reproduce: absent/file: there is no such folder, absent: make it or name another file\n"
    )
    assert not (project / "absent").exists()
    assert main([*words, "experiments"]) == 2
    assert "experiments is a folder: name a file" in capsys.readouterr().err


def test_model_check(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "check", "example.model"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("example.model is sound: 4,829,184 parameters, specification ")
    assert 'memory="tiled"' in out
    assert main(["model", "check", "example.model", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 4_829_184 and found["specification"] in out
    assert found["model"]["d_model"] == 256


def test_model_check_says_faults_as_json_too(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, mended in (("bad.model", True), ("params.yaml", False)):
        assert main(["model", "check", name, "--json"]) == 2
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        assert found["fault"].startswith(f"{name}, line ") and found["mended_by_fix"] is mended
        assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "--fix"], "--fix mends a model's file: name it with --model FILE"),
        (["plan", "--budget", "much"], "expected a size with its unit, such as 4GiB"),
        (["plan", "--budget", "4"], "found '4': write 4GiB or whatever the unit is"),
        (["plan", "--device", "abacus"], "there is no 'abacus' in the list of devices"),
        (["plan", "--model", "absent"], "absent: cannot be read: No such file or directory"),
        (["plan", "--apply", "1"], "--apply 1: the plan fits as it is, there is nothing to apply"),
        (["plan", "--graph", "graph.png"], "graph.png: the drawing is SVG: name it graph.svg"),
        (["plan", "tinny"], "did you mean 'tiny'?"),
        (["model", "check", "params.yaml"], "params.yaml, line 2, column 1: expected model, found the name tier"),
        (["model", "form", "."], "cannot be read: Is a directory"),
        (["model", "code", "-S", "model.heads=7"], "heads must divide d_model"),
    ],
)
def test_wrong_use(project: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_a_terminal_without_these_letters(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reproduce", "plan"],
        env={**os.environ, "PYTHONPATH": str(EXPERIMENTS[0].parents[1]), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        encoding="ascii",
        check=True,
    )
    assert "\\xd7" in done.stdout
    assert done.stderr == ""
