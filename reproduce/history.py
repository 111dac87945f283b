"""What there is in the store and in run/, for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from artifacts import (
    Resolved,
    RunInfo,
    Store,
    find_records,
    hash_bytes,
    list_runs,
    load_bundle,
    read_attestations,
    read_folder,
    read_record,
    record_bundles,
    resolve,
)
from reproduce import outputs
from reproduce.configuration import Configuration, SamplingSpec, differences, from_identity
from reproduce.errors import Changed, ConfigurationError, Inconclusive
from reproduce.lineage import Lineage
from reproduce.project import Project
from reproduce.workbench import open_workbench

REMEDY = "run `dvc repro`"


def find_bundle(store: Store, prefix: str) -> str:
    """The bundle that a hash or its first digits mean; of a record, its final one."""
    found = resolve(store, prefix)
    return read_record(store, found.hash).final_bundle if found.kind == "record" else found.hash


def show_committed(project: Project) -> Iterator[str]:
    """The results of the pipeline's last run."""
    folder = project.outputs
    run = outputs.read_json(folder / "run.json", REMEDY)
    metrics = outputs.read_json(folder / "metrics.json", REMEDY)
    text = (folder / "sample.txt").read_text(encoding="utf-8")
    yield text.rstrip("\n")
    yield ""
    yield f"steps            {run['steps']}"
    yield f"validation loss  {metrics['validation_loss']:.4f} nats per token"
    yield f"final bundle     {run['final_bundle']}"
    record = hash_bytes((folder / "record.json").read_bytes())
    yield f"record           {record}"
    yield ""
    yield f"Check it: reproduce verify {record[:12]}"


def log_lines(project: Project, configuration: Configuration) -> Iterator[str]:
    """One line per run and per record."""
    store = project.store(configuration.run)
    runs = list_runs(store)
    for info in runs:
        yield _run_line(info)
    records = find_records(store)
    for name in records:
        record = read_record(store, name)
        seen = [a for a in read_attestations(store, name).values() if a.activity == "verified"]
        verdicts = sorted({str(a.verdict.get("verdict")) for a in seen})
        verified = f"verified {len(seen)} times ({', '.join(verdicts)})" if seen else "not verified yet"
        yield (
            f"record {name[:12]}  {record.steps} steps  final bundle {record.final_bundle[:12]}  "
            f"validation loss {record.results.get('validation_loss')}  {verified}"
        )
    if not runs and not records:
        yield f"no runs in {store.path} yet: `dvc repro` makes one"


def _run_line(info: RunInfo) -> str:
    last = max(info.bundles, default=None)
    reached = "no bundle yet" if last is None else f"bundle {info.bundles[last][:12]} of step {last}"
    lineage = Lineage.read(info.lineage, info.run_id)
    steps = "?" if lineage is None else lineage.configuration["train"]["steps"]
    started = "" if lineage is None or not lineage.sessions else f"  since {lineage.sessions[0].started}"
    sessions = 0 if lineage is None else len(lineage.sessions)
    return (
        f"run {info.run_id[:12]}  {info.status}  {reached} of {steps}  "
        f"{sessions} session{'s' if sessions != 1 else ''}{started}{_fork(lineage)}"
    )


def _fork(lineage: Lineage | None) -> str:
    if lineage is None or lineage.fork is None:
        return ""
    return f"  fork of bundle {lineage.fork.bundle[:12]} at step {lineage.fork.step}"


def show_hash(project: Project, configuration: Configuration, prefix: str) -> Iterator[str]:
    """Everything about a record or bundle."""
    store = project.store(configuration.run)
    found = resolve(store, prefix)
    if found.kind == "record":
        yield from _show_record(store, found)
    else:
        yield from _show_bundle(store, found)


def _show_record(store: Store, found: Resolved) -> Iterator[str]:
    record = read_record(store, found.hash)
    yield f"record         {found.hash}"
    yield f"tier           {record.tier}"
    yield f"steps          {record.steps}"
    yield f"first bundle   {record.first_bundle}"
    yield f"final bundle   {record.final_bundle}"
    yield f"dataset        {record.dataset}"
    yield f"tokenizer      {record.tokenizer}"
    yield f"specification  {record.specification}"
    yield f"sources        {record.sources_digest}"
    if isinstance(record.lock, dict) and "fork" in record.lock:
        yield f"fork           {record.lock['fork']}"
    if record.tolerance is not None:
        yield f"hardware       {record.hardware}"
        yield f"tolerance      {record.tolerance}"
    for name, value in sorted(record.results.items()):
        if not isinstance(value, dict | list):
            yield f"{name:<14} {value}"
    yield "bundles"
    for step, bundle in record_bundles(store, found.hash).items():
        yield f"  step {step:>8}  {bundle}"
    for name, attestation in read_attestations(store, found.hash).items():
        yield (
            f"attestation {name[:12]}  {attestation.activity}  {attestation.verdict.get('verdict')}  "
            f"{attestation.finished}  {_machine(attestation.environment)}"
        )


def _machine(environment: Mapping[str, Any]) -> str:
    cpu = environment.get("cpu")
    return str(cpu.get("model")) if isinstance(cpu, Mapping) else "unknown machine"


def _show_bundle(store: Store, found: Resolved) -> Iterator[str]:
    bundle = load_bundle(store, found.hash)
    yield f"bundle         {found.hash}"
    for record in found.records:
        yield f"record         {record}"
    for info in list_runs(store):
        if found.hash in info.bundles.values():
            yield f"run            {info.run_id} ({info.status})"
    for name, value in sorted(bundle.state.items()):
        yield f"{name:<14} {value}"
    # An imported bundle has no history.
    losses = bundle.tensors.get("history/loss")
    if losses is not None and len(losses):
        yield f"last loss      {float(losses[-1]):.4f}"
    yield f"tensors        {len(bundle.tensors)}, all verified"


def sample_text(
    project: Project, configuration: Configuration, prefix: str, options: Mapping[str, Any]
) -> str:
    """Text from a bundle, with sampling options over those of its configuration."""
    if prefix == "final":
        name = outputs.read_json(project.outputs / "run.json", REMEDY)["final_bundle"]
        bundle = read_folder(project.outputs / "bundle", name)
    else:
        store = project.store(configuration.run)
        name = find_bundle(store, prefix)
        bundle = load_bundle(store, name)
        configuration = configuration_of(store, name, configuration)
    sampling = _with_options(configuration.sampling, options)
    with open_workbench(configuration, project.dataset) as workbench:
        workbench.load(bundle, f"bundle {name}")
        return workbench.sample(sampling)


def _with_options(sampling: SamplingSpec, options: Mapping[str, Any]) -> SamplingSpec:
    given = {**sampling.model_dump(), **options}
    try:
        return SamplingSpec.model_validate(given)
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
        raise ConfigurationError(f"these sampling options cannot be used: {faults}") from error


def configuration_of(store: Store, name: str, present: Configuration) -> Configuration:
    """The configuration that a bundle was made with, with the present run options."""
    return from_identity(_recorded(store, name), present.run, f"configuration of bundle {name}")


def require_same_configuration(store: Store, name: str, present: Configuration) -> None:
    """Raises Changed, listing every difference, if a bundle was made with another configuration."""
    if changes := differences(_recorded(store, name), present.identity()):
        listed = "\n".join(f"  {line}" for line in changes)
        raise Changed(
            f"bundle {name} was made with another configuration:\n{listed}\n"
            "Undo these changes in params.yaml to go on from it"
        )


def _recorded(store: Store, name: str) -> dict[str, Any]:
    """The identity of the configuration of a bundle, from the run or record that lists it."""
    for info in list_runs(store):
        lineage = Lineage.read(info.lineage, info.run_id)
        if lineage is not None and name in info.bundles.values():
            return lineage.configuration
    for record in find_records(store):
        if name in record_bundles(store, record).values():
            return read_record(store, record).configuration
    raise Inconclusive(
        f"bundle {name} belongs to no run or record in {store.path}, so its configuration is not known"
    )
