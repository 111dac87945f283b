"""A finished run becomes a record: what `reproduce verify` is given."""

from typing import Any

from artifacts import (
    Attestation,
    Record,
    hash_bytes,
    load_bundle,
    read_run,
    sources_digest,
    write_attestation,
    write_digests,
    write_record,
)
from artifacts.record import dumps
from reproduce import outputs
from reproduce.configuration import Configuration
from reproduce.environment import fingerprint, hardware_class
from reproduce.errors import CorruptOutput
from reproduce.lineage import Lineage
from reproduce.project import Project
from reproduce.yaml12 import load_yaml

STAGES_BEFORE = ("fetch", "prepare", "train", "evaluate")  # plan decides no bit
REMEDY = "run `dvc repro`"


def commit(project: Project, configuration: Configuration) -> str:
    """Writes the record to the store and to run/record.json, attests that this machine trained it; returns its hash."""
    run = outputs.read_json(project.outputs / "run.json", REMEDY)
    store = project.store(configuration.run)
    info = read_run(store, run["run"])
    lineage = None if info is None else Lineage.read(info.lineage, run["run"])
    if info is None or lineage is None:
        raise CorruptOutput(f"run {run['run']} is not in {store.path}: {REMEDY}")
    for bundle in (run["first_bundle"], run["final_bundle"]):
        if bundle not in info.bundles.values():
            raise CorruptOutput(f"bundle {bundle} is not in the list of its run: {REMEDY}")
    final = load_bundle(store, run["final_bundle"])
    digests = [bytes(row) for row in final.tensors["history/digest"]]
    with store.using():
        record = Record(
            pipeline=hash_bytes(project.pipeline.read_bytes()),
            lock=lock_entries(project),
            configuration=lineage.configuration,
            specification=run["specification"],
            dataset=run["dataset"],
            tokenizer=run["tokenizer"],
            tier=configuration.tier,
            first_bundle=run["first_bundle"],
            final_bundle=run["final_bundle"],
            steps=run["steps"],
            digests=write_digests(store, digests),
            results={
                **outputs.read_json(project.outputs / "metrics.json", REMEDY),
                **outputs.read_json(project.outputs / "training.json", REMEDY),
                "validation": run["validation"],
            },
            sources=lineage.sources,
            sources_digest=sources_digest(lineage.sources),
            hardware=None if configuration.tier == "portable" else hardware_class(),
            tolerance=None if configuration.tier == "portable" else {"method": "none"},
        )
        name = write_record(store, record, dict(info.bundles))
    outputs.write_bytes(project.outputs / "record.json", dumps(record))
    write_attestation(
        store,
        Attestation(
            record=name,
            activity="trained",
            verdict={"verdict": "trained", "final_bundle": run["final_bundle"]},
            environment=fingerprint(project.root, configuration.run.thread_count()),
            started=lineage.sessions[0].started,
            finished=lineage.sessions[-1].ended or lineage.sessions[-1].started,
        ),
    )
    return name


def lock_entries(project: Project) -> dict[str, Any]:
    """What dvc.lock says of the stages before commit; DVC writes it after every stage.

    Of the dependencies only those that another of these stages wrote: sources are covered by the normative sources'
    digest, so that an edit which decides no bit changes no record.
    """
    lock = load_yaml(project.lock.read_text(encoding="utf-8"), "dvc.lock")
    stages = lock.get("stages", {}) if isinstance(lock, dict) else {}
    if missing := [name for name in STAGES_BEFORE if name not in stages]:
        raise CorruptOutput(f"dvc.lock has no entry of {', '.join(missing)}: {REMEDY}")
    written = {out["path"] for name in STAGES_BEFORE for out in stages[name].get("outs", [])}
    return {
        name: {
            **stages[name],
            "deps": [dep for dep in stages[name].get("deps", []) if dep["path"] in written],
        }
        for name in STAGES_BEFORE
    }
