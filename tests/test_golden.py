"""The hashes that README promises are those of the committed outputs, which `make repro` must come to again."""

import json
from pathlib import Path

from artifacts import hash_bytes

ROOT = Path(__file__).resolve().parent.parent


def test_readme_names_the_committed_hashes() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert json.loads((ROOT / "run" / "run.json").read_bytes())["final_bundle"] in readme
    assert hash_bytes((ROOT / "run" / "record.json").read_bytes()) in readme


def test_the_committed_run_is_of_the_default_experiment() -> None:
    assert (ROOT / "params.yaml").read_bytes() == (ROOT / "experiments" / "tiny.yaml").read_bytes()
