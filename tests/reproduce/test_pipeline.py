"""The whole way, with real Git and DVC: from a text to a record, twice, and what DVC shows of it."""

import csv
import json
import shutil

import pytest

from artifacts import folder_hash
from engine.numerics.kernel_cache import ENGINE_FOLDER

OUTPUTS = [
    "dvc.lock",
    "run/metrics.json",
    "run/plan.json",
    "run/plots/training.csv",
    "run/plots/validation.csv",
    "run/record.json",
    "run/run.json",
    "run/sample.txt",
    "run/samples.txt",
    "run/training.json",
]


def bytes_of_outputs(project):
    return {path: (project.root / path).read_bytes() for path in OUTPUTS}


def test_a_second_run_from_scratch_leaves_git_clean(prepared):
    """Also with another number of threads, hash seed, time zone, locale and umask of byte-compiled files."""
    first = bytes_of_outputs(prepared)
    prepared.git("add", "-A")
    prepared.git("commit", "-q", "-m", "results")
    prepared.git("clean", "-q", "-ffdx")
    surroundings = {"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    prepared.dvc("repro", **surroundings)
    assert bytes_of_outputs(prepared) == first
    assert prepared.git("status", "--porcelain") == ""


class TestResults:
    """What one finished pipeline holds."""

    def test_the_files_fit_together(self, prepared):
        run = json.loads(prepared.read("run/run.json"))
        record = json.loads(prepared.read("run/record.json"))
        assert folder_hash(prepared.root / "run" / "bundle") == run["final_bundle"] == record["final_bundle"]
        assert record["results"]["validation_loss"] == json.loads(prepared.read("run/metrics.json"))["validation_loss"]
        assert list(record["lock"]) == ["evaluate", "fetch", "prepare", "train"]
        assert "run" not in record["configuration"]

    def test_the_curves_have_every_step(self, prepared):
        with (prepared.root / "run/plots/training.csv").open(encoding="utf-8", newline="") as file:
            training = list(csv.DictReader(file))
        with (prepared.root / "run/plots/validation.csv").open(encoding="utf-8", newline="") as file:
            validation = list(csv.DictReader(file))
        assert [int(row["step"]) for row in training] == list(range(1, 13))
        assert [int(row["step"]) for row in validation] == [0, 4, 8, 12]
        # ln(48), of a model that knows nothing yet.
        assert float(validation[0]["loss"]) == pytest.approx(3.8712, rel=0.01)

    def test_samples_are_the_text_at_their_steps(self, prepared):
        samples = prepared.read("run/samples.txt")
        assert [line for line in samples.splitlines() if line.startswith("== ")] == ["== step 4", "== step 8"]
        assert prepared.read("run/sample.txt").startswith("The")

    def test_nothing_names_the_machine_or_the_time(self, prepared):
        for path in OUTPUTS:
            text = prepared.read(path)
            assert str(prepared.root) not in text
            assert "20:" not in text.replace('"20":', "")
            assert "seconds" not in text

    def test_show_ends_with_what_to_compare(self, prepared):
        shown = prepared.call("show").stdout
        run = json.loads(prepared.read("run/run.json"))
        for expected in (run["final_bundle"], prepared.record(), "validation loss", "The"):
            assert expected in shown

    @pytest.mark.parametrize("field", ["final_bundle", "specification"])
    def test_show_names_no_record_of_another_run(self, prepared, field):
        """As where a stage was run by itself after the last commit."""
        run = json.loads(prepared.read("run/run.json"))
        (prepared.root / "run/run.json").write_text(json.dumps(run | {field: 64 * "0"}), encoding="utf-8")
        shown = prepared.call("show", code=3)
        assert "record.json is of another run" in shown.stderr and f"{field} is {run[field][:12]}" in shown.stderr
        assert prepared.record() not in shown.stdout

    def test_show_explains_records_and_bundles(self, prepared):
        run = json.loads(prepared.read("run/run.json"))
        shown = prepared.call("show", prepared.record()[:10]).stdout
        assert run["final_bundle"] in shown
        assert "trained" in shown
        shown = prepared.call("show", run["first_bundle"][:10]).stdout
        assert prepared.record() in shown
        assert "tensors" in shown

    def test_log_lists_runs_and_records(self, prepared):
        shown = prepared.call("log").stdout
        assert "complete" in shown
        assert f"record {prepared.record()[:12]}" in shown

    def test_metrics_plots_and_parameters(self, prepared):
        metrics = json.loads(prepared.dvc("metrics", "show", "--json").stdout)
        files = next(iter(metrics.values()))["data"]
        assert "validation_loss" in files["run/metrics.json"]["data"]
        plots = prepared.dvc("plots", "show", "--json").stdout
        assert "run/plots/training.csv" in plots
        assert "run/plots/validation.csv" in plots
        prepared.write_params({"train": {"learning_rate": 0.001}})
        difference = json.loads(prepared.dvc("params", "diff", "--json").stdout)
        assert difference["params.yaml"]["train.learning_rate"]["new"] == 0.001

    def test_a_second_repro_does_nothing(self, prepared):
        before = bytes_of_outputs(prepared)
        assert "Running stage" not in prepared.dvc("repro").stdout
        assert bytes_of_outputs(prepared) == before

    def test_run_options_and_the_choice_of_memory_do_not_train_again(self, prepared):
        """With other options nothing runs; attention tiled plans anew, but the run is known to be complete."""
        before = (prepared.root / "run/run.json").read_bytes()
        prepared.write_params({"run": {"threads": 1, "save_every_steps": 2}})
        assert "Running stage" not in prepared.dvc("repro").stdout
        prepared.write_params({"model": {"attention": "tiled"}})
        said = prepared.dvc("repro", "train").stdout
        assert "Running stage 'plan'" in said
        assert "training: step" not in said
        assert (prepared.root / "run/run.json").read_bytes() == before

    def test_samples_from_bundles(self, prepared):
        run = json.loads(prepared.read("run/run.json"))
        by_default = prepared.call("sample", "final").stdout
        assert by_default.strip() == prepared.read("run/sample.txt").strip()
        assert prepared.call("sample", run["final_bundle"][:12]).stdout == by_default
        assert prepared.call("sample", prepared.record()[:12]).stdout == by_default
        greedy = [
            prepared.call("sample", "final", "--temperature", "0", "--seed", seed, "--prompt", "fox").stdout
            for seed in ("1", "2")
        ]
        assert greedy[0] == greedy[1]
        assert greedy[0].startswith("fox")
        refused = prepared.call("sample", "final", "--prompt", "€", code=2).stderr
        assert "€" in refused or "\\u20ac" in refused

    def test_plan_tells_and_refuses(self, prepared):
        assert "parameters" in prepared.call("plan").stdout
        assert "98,698,752" in prepared.call("plan", "andrea-120m", "--budget", "1000GiB").stdout
        assert "the budget is 1.0 GiB" in prepared.call("plan", "andrea-120m", "--budget", "1GiB", code=5).stdout
        assert "4GiB" in prepared.call("plan", "--budget", "much", code=2).stderr
        more = prepared.call("plan", "-S", "train.batch=8").stdout
        assert more != prepared.call("plan").stdout

    def test_the_store_is_healthy_and_can_be_cleaned(self, prepared):
        assert "0 missing, 0 corrupt" in prepared.call("fsck").stdout
        assert "would remove 0 objects" in prepared.call("gc", "--dry-run").stdout


def test_an_experiment_run_changes_what_it_says(prepared):
    prepared.git("add", "-A")
    prepared.git("commit", "-q", "-m", "results")
    before = json.loads(prepared.read("run/run.json"))
    prepared.dvc("exp", "run", "-S", "train.learning_rate=1e-3", "-n", "slower")
    after = json.loads(prepared.read("run/run.json"))
    assert after["final_bundle"] != before["final_bundle"]
    assert after["dataset"] == before["dataset"]
    assert "slower" in prepared.dvc("exp", "show", "--csv").stdout


def test_another_experiment_is_one_argument_away(project):
    for name in ("char-4.8m", "tiny"):
        project.reproduce("use", name)
        assert project.read("params.yaml") == project.read(f"experiments/{name}.yaml")
    refused = project.reproduce("use", "tinny", code=2).stderr
    assert "did you mean 'tiny'?" in refused
    assert project.read("params.yaml") == project.read("experiments/tiny.yaml")


def test_a_change_of_what_decides_bits_is_another_run(prepared):
    """A new comment in the engine trains again: nobody can know that it changed nothing without looking."""
    before = json.loads(prepared.read("run/run.json"))
    path = prepared.root / "data_pipeline" / "order.py"
    path.write_bytes(path.read_bytes() + b"# one more line\n")
    prepared.dvc("repro")
    after = json.loads(prepared.read("run/run.json"))
    assert after["run"] != before["run"]
    assert after["final_bundle"] == before["final_bundle"]


def test_a_lost_store_is_made_anew(prepared):
    before = bytes_of_outputs(prepared)
    shutil.rmtree(prepared.root / ".samebits")
    prepared.dvc("repro", "--force", "--single-item", "train")
    prepared.dvc("repro", "--force", "--single-item", "commit")
    assert bytes_of_outputs(prepared) == before


def test_the_sources_that_run_are_those_of_the_project(project):
    shown = project.run("sh", "tools/stage.sh", "nonsense", code=2).stderr
    assert "nonsense" in shown
    assert ENGINE_FOLDER.name == "engine"
