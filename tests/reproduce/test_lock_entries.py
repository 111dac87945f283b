"""What of dvc.lock a record holds: nothing that decides no bit."""

from pathlib import Path

from reproduce.committing import lock_entries
from reproduce.project import Project

LOCK = """
schema: '2.0'
stages:
  fetch:
    cmd: sh tools/stage.sh fetch
    deps:
    - path: data_pipeline
      hash: md5
      md5: SOURCE.dir
    outs:
    - path: data/raw
      hash: md5
      md5: aa.dir
  prepare:
    cmd: sh tools/stage.sh prepare
    deps:
    - path: data/raw
      hash: md5
      md5: aa.dir
    - path: data_pipeline
      hash: md5
      md5: SOURCE.dir
    outs:
    - path: data/dataset
      hash: md5
      md5: bb.dir
  plan:
    cmd: sh tools/stage.sh plan
    outs:
    - path: run/plan.json
      hash: md5
      md5: PLAN
  train:
    cmd: sh tools/stage.sh train
    deps:
    - path: data/dataset
      hash: md5
      md5: bb.dir
    - path: engine
      hash: md5
      md5: SOURCE.dir
    - path: run/plan.json
      hash: md5
      md5: PLAN
    outs:
    - path: run/run.json
      hash: md5
      md5: cc
  evaluate:
    cmd: sh tools/stage.sh evaluate
    deps:
    - path: run/run.json
      hash: md5
      md5: cc
    outs:
    - path: run/metrics.json
      hash: md5
      md5: dd
"""


def entries(root: Path, source: str, plan: str, raw: str = "aa") -> dict[str, object]:
    text = LOCK.replace("SOURCE", source).replace("PLAN", plan).replace("aa.dir", f"{raw}.dir")
    (root / "dvc.lock").write_text(text, encoding="utf-8", newline="")
    return lock_entries(Project(root))


def test_sources_and_the_plan_change_no_record_but_data_does(tmp_path: Path) -> None:
    first = entries(tmp_path, "11", "22")
    assert entries(tmp_path, "33", "44") == first
    assert entries(tmp_path, "11", "22", raw="ee") != first
