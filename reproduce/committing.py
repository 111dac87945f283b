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
from artifacts.runs import run_ids
from reproduce import outputs
from reproduce.configuration import Configuration, differences
from reproduce.environment import fingerprint, hardware_class
from reproduce.errors import ConfigurationError, CorruptOutput, Inconclusive
from reproduce.lineage import Lineage
from reproduce.project import Project
from reproduce.state import Identity
from reproduce.tolerance import measure_tolerance
from reproduce.verification.lock import check_lock
from reproduce.yaml12 import load_yaml

STAGES_BEFORE = ("fetch", "prepare", "train", "evaluate")  # plan decides no bit
REMEDY = "run `dvc repro`"


def commit(project: Project, configuration: Configuration) -> str:
    """Writes the record to the store and to run/record.json, attests that this machine trained it; returns its hash.

    Raises ConfigurationError if params.yaml or dvc.lock is not that of the run, Inconclusive if the store has no such
    run.
    """
    run = outputs.read_json(project.outputs / "run.json", REMEDY)
    results = {
        **outputs.read_json(project.outputs / "metrics.json", REMEDY),
        **outputs.read_json(project.outputs / "training.json", REMEDY),
        "validation": run["validation"],
    }
    name, record = commit_run(project, configuration, run["run"], run["final_bundle"], results, lock_entries(project))
    outputs.write_bytes(project.outputs / "record.json", dumps(record))
    return name


def commit_run(
    project: Project,
    configuration: Configuration,
    run_id: str,
    final_bundle: str,
    results: dict[str, Any],
    lock: dict[str, Any],
) -> tuple[str, Record]:
    """The record of a finished run, in the store and attested to, and its hash."""
    store = project.store(configuration.run)
    if run_id not in run_ids(store):
        raise Inconclusive(f"run {run_id} is not in {store.path}: `reproduce train` makes it anew")
    info = read_run(store, run_id)
    lineage = None if info is None else Lineage.read(info.lineage, run_id)
    if info is None or lineage is None:
        raise CorruptOutput(f"run {run_id} is not in {store.path}: {REMEDY}")
    if changes := differences(lineage.configuration, configuration.identity()):
        listed = "\n".join(f"  {line}" for line in changes)
        raise ConfigurationError(
            f"params.yaml has changed since run {run_id[:12]}:\n{listed}\nUndo these changes to commit it, or {REMEDY}"
        )
    steps = configuration.train.steps
    if info.bundles.get(steps) != final_bundle or lineage.first_step not in info.bundles:
        raise CorruptOutput(f"bundle {final_bundle} is not in the list of its run: {REMEDY}")
    final = load_bundle(store, final_bundle)
    digests = [bytes(row) for row in final.tensors["history/digest"]]
    identity = Identity(lineage.configuration, lineage.dataset, lineage.tokenizer)
    portable = configuration.tier == "portable"
    with store.using():
        record = Record(
            pipeline=hash_bytes(project.pipeline.read_bytes()),
            lock=lock,
            configuration=lineage.configuration,
            specification=identity.specification,
            dataset=lineage.dataset,
            tokenizer=lineage.tokenizer,
            tier=configuration.tier,
            first_bundle=info.bundles[lineage.first_step],
            final_bundle=final_bundle,
            steps=steps,
            digests=write_digests(store, digests),
            results=results,
            sources=lineage.sources,
            sources_digest=sources_digest(lineage.sources),
            hardware=None if portable else hardware_class(configuration.run.device),
            tolerance=None if portable else measure_tolerance(project, configuration, store, info.bundles, results),
        )
        try:
            check_lock(record)
        except CorruptOutput as error:
            raise ConfigurationError(f"dvc.lock is not of run {run_id[:12]}: {error}. {REMEDY.capitalize()}") from error
        name = write_record(store, record, dict(info.bundles))
    write_attestation(
        store,
        Attestation(
            record=name,
            activity="trained",
            verdict={"verdict": "trained", "final_bundle": final_bundle},
            environment=fingerprint(project.root, configuration.run.thread_count()),
            started=lineage.sessions[0].started,
            finished=lineage.sessions[-1].ended or lineage.sessions[-1].started,
        ),
    )
    return name, record


def lock_entries(project: Project) -> dict[str, Any]:
    """What dvc.lock says of the stages before commit; DVC writes it after every stage.

    Of the dependencies only those that another of these stages wrote: sources are covered by the normative sources'
    digest, so that an edit which decides no bit changes no record.
    """
    try:
        text = project.lock.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise Inconclusive(f"{project.lock} is missing, and DVC writes it: {REMEDY}") from error
    lock = load_yaml(text, "dvc.lock")
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
