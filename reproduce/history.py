"""What there is in the store and in run/, for people."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from artifacts import (
    Attestation,
    Bundle,
    Record,
    Resolved,
    Store,
    find_records,
    hash_bytes,
    list_runs,
    load_bundle,
    read_attestations,
    read_record,
    read_run,
    record_bundles,
    resolve,
)
from artifacts.errors import Ambiguous, Corrupt, InvalidInput
from artifacts.record import loads
from artifacts.runs import run_ids
from reproduce import outputs
from reproduce.configuration import Configuration, SamplingSpec, differences, explain, from_identity
from reproduce.display import counted
from reproduce.errors import Changed, ConfigurationError, CorruptOutput, Inconclusive, ReproduceError
from reproduce.imported import is_imported, sample_imported
from reproduce.lineage import Lineage
from reproduce.naming import FINAL, REMEDY, committed_record, digits, final_from_folder, find_state
from reproduce.project import Project
from reproduce.workbench import open_workbench

_RESULTS = ("run.json", "metrics.json", "sample.txt", "record.json")
_LONG = 8  # of lists with more numbers only the range is shown


def find_bundle(store: Store, prefix: str) -> str:
    """The bundle that a hash or its first digits mean; of a record, its final one."""
    found = resolve(store, prefix)
    return read_record(store, found.hash).final_bundle if found.kind == "record" else found.hash


def show_committed(project: Project) -> Iterator[str]:
    """The results of the pipeline's last run."""
    folder = project.outputs
    if missing := [name for name in _RESULTS if not (folder / name).is_file()]:
        raise Inconclusive(
            f"the pipeline is not through, {folder / missing[0]} is missing: `dvc repro` makes or finishes it, "
            "and `reproduce log` lists what is saved so far"
        )
    run = outputs.read_json(folder / "run.json", REMEDY)
    metrics = outputs.read_json(folder / "metrics.json", REMEDY)
    name = _record_of(folder, run)
    text = (folder / "sample.txt").read_text(encoding="utf-8")
    yield text.rstrip("\n")
    yield ""
    yield f"steps            {run['steps']}"
    yield f"validation loss  {metrics['validation_loss']:.4f} nats per token"
    yield f"final bundle     {run['final_bundle']}"
    yield f"record           {name}"
    yield ""
    yield f"Check it: reproduce verify {name[:12]}"


def _record_of(folder: Path, run: Mapping[str, Any]) -> str:
    """Hash of the record in `folder`. Raises Inconclusive if it is not of this run."""
    path = folder / "record.json"
    content = path.read_bytes()
    record = loads(content, str(path))
    found = {"final_bundle": record.final_bundle, "specification": record.specification}
    for field, value in found.items():
        if value != run[field]:
            raise Inconclusive(
                f"{path} is of another run: its {field} is {value[:12]}, that of {folder / 'run.json'} "
                f"{run[field][:12]}. `dvc repro` commits the last run; `reproduce log` lists what is saved so far"
            )
    return hash_bytes(content)


def log_lines(project: Project, configuration: Configuration) -> Iterator[str]:
    """One line per run and per record, each from the oldest to the newest."""
    store = project.store(configuration.run)
    runs = [entry for run_id in run_ids(store) if (entry := _run_line(store, run_id)) is not None]
    records = [_record_line(store, name) for name in find_records(store)]
    yield from (line for _, line in (*sorted(runs), *sorted(records)))
    if not runs and not records:
        yield f"no runs in {store.path} yet: `dvc repro` makes one"


def _damaged(kind: str, name: str) -> tuple[str, str]:
    """What takes the place of a line, at the beginning: its time cannot be told."""
    return "", f"{kind} {name[:12]}  damaged: `reproduce fsck` says what is wrong with it"


def _began(lineage: Lineage | None) -> str:
    """ISO times in UTC sort as text."""
    return "" if lineage is None or not lineage.sessions else lineage.sessions[0].started


def _first_seen(attestations: Iterable[Attestation]) -> str:
    return min((attestation.finished for attestation in attestations), default="")


def _record_line(store: Store, name: str) -> tuple[str, str]:
    """When it was first seen, and the line."""
    try:
        record, attestations = read_record(store, name), read_attestations(store, name).values()
    except Corrupt:
        return _damaged("record", name)
    seen = [a for a in attestations if a.activity == "verified"]
    verdicts = sorted({str(a.verdict.get("verdict")) for a in seen})
    verified = f"verified {counted(len(seen), 'time')} ({', '.join(verdicts)})" if seen else "not verified yet"
    first = _first_seen(attestations)
    loss = record.results.get("validation_loss")
    return first, (
        f"record {name[:12]}  {counted(record.steps, 'step')}  final bundle {record.final_bundle[:12]}  "
        f"validation loss {f'{loss:.4f}' if isinstance(loss, float) else 'not known'}"
        f"{f'  since {first}' if first else ''}  {verified}"
    )


def _run_line(store: Store, run_id: str) -> tuple[str, str] | None:
    """When it began, and the line; None for one that was only about to be made."""
    try:
        info = read_run(store, run_id)
        lineage = None if info is None else Lineage.read(info.lineage, run_id)
    except (Corrupt, CorruptOutput):
        return _damaged("run", run_id)
    if info is None:
        return None
    last = max(info.bundles, default=None)
    reached = "no bundle yet" if last is None else f"bundle {info.bundles[last][:12]} of step {last}"
    steps = "?" if lineage is None else lineage.configuration["train"]["steps"]
    began = _began(lineage)
    started = f"  since {began}" if began else ""
    sessions = 0 if lineage is None else len(lineage.sessions)
    return began, (
        f"run {info.run_id[:12]}  {info.status}  {reached} of {steps}  "
        f"{counted(sessions, 'session')}{started}{_fork(lineage)}"
    )


def _fork(lineage: Lineage | None) -> str:
    if lineage is None or lineage.fork is None:
        return ""
    return f"  fork of bundle {lineage.fork.bundle[:12]} at step {lineage.fork.step}"


def show_hash(project: Project, configuration: Configuration, prefix: str) -> Iterator[str]:
    """Everything about a record or bundle."""
    store = project.store(configuration.run)
    try:
        found, bundle = find_state(project, store, prefix)
    except Ambiguous:
        raise
    except InvalidInput:
        committed = committed_record(project, prefix)
        if committed is None:
            raise
        name, content = committed
        yield from _record_lines(name, loads(content, f"record {name}"))
        yield f"bundles        none in {store.path}: `dvc repro` makes them"
        return
    if bundle is None:
        yield from _show_record(store, found)
    else:
        yield from _show_bundle(store, found, bundle)


def _show_record(store: Store, found: Resolved) -> Iterator[str]:
    yield from _record_lines(found.hash, read_record(store, found.hash))
    yield "bundles"
    for step, bundle in record_bundles(store, found.hash).items():
        yield f"  step {step:>8}  {bundle}"
    attestations = read_attestations(store, found.hash)
    for name, attestation in sorted(attestations.items(), key=lambda entry: (entry[1].finished, entry[0])):
        yield (
            f"attestation {name[:12]}  {attestation.activity}  {attestation.verdict.get('verdict')}  "
            f"{attestation.finished}  {_machine(attestation.environment)}"
        )


def _record_lines(found: str, record: Record) -> Iterator[str]:
    yield f"record         {found}"
    yield f"tier           {record.tier}"
    yield f"steps          {record.steps}"
    yield f"first bundle   {record.first_bundle}"
    yield f"final bundle   {record.final_bundle}"
    yield f"dataset        {record.dataset}"
    yield f"tokenizer      {record.tokenizer}"
    yield f"specification  {record.specification}"
    yield f"sources        {record.sources_digest}"
    if isinstance(record.lock, dict) and "fork" in record.lock:
        yield from _value_lines("fork", record.lock["fork"])
    yield from _value_lines("hardware", record.hardware)
    yield from _value_lines("tolerance", record.tolerance)
    for name, value in sorted(record.results.items()):
        yield from _value_lines(name, value)


def _value_lines(name: str, value: Any) -> Iterator[str]:
    """A value of a record or state: what is within a section indented, of long lists the length and the range."""
    if isinstance(value, Mapping):
        yield name
        for key, inner in value.items():
            for line in _value_lines(str(key), inner):
                yield f"  {line}"
    elif isinstance(value, list) and len(value) > _LONG and all(isinstance(v, int | float) for v in value):
        yield f"{name:<14} {len(value)} numbers, {min(value)} to {max(value)}"
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value, 1):
            yield from _value_lines(f"{name} {number}", inner)
    elif value is not None:
        yield f"{name:<14} {', '.join(map(str, value)) if isinstance(value, list) else value}"


def _machine(environment: Mapping[str, Any]) -> str:
    cpu = environment.get("cpu")
    return str(cpu.get("model")) if isinstance(cpu, Mapping) else "unknown machine"


def _show_bundle(store: Store, found: Resolved, bundle: Bundle) -> Iterator[str]:
    yield f"bundle         {found.hash}"
    for record in found.records:
        yield f"record         {record}"
    for info in list_runs(store):
        if found.hash in info.bundles.values():
            yield f"run            {info.run_id} ({info.status})"
    for name, value in sorted(bundle.state.items()):
        yield from _value_lines(name, value)
    # An imported bundle has no history.
    losses = bundle.tensors.get("history/loss")
    if losses is not None and len(losses):
        yield f"last loss      {float(losses[-1]):.4f}"
    yield f"tensors        {len(bundle.tensors)}, all verified"


def sample_text(
    project: Project,
    configuration: Configuration,
    prefix: str,
    options: Mapping[str, Any],
    tokenizer: Path | None = None,
) -> str:
    """Text from a bundle, with sampling options over those of its configuration. `tokenizer`: see `sample_imported`."""
    if prefix == FINAL:
        name = digits(project, prefix)
        bundle = final_from_folder(project, name)
        configuration = _configuration_of_final(project, name, configuration)
    else:
        store = project.store(configuration.run)
        name = find_bundle(store, prefix)
        bundle = load_bundle(store, name)
        if is_imported(bundle):
            sampling = _with_options(configuration.sampling, options)
            return sample_imported(bundle, name, configuration, tokenizer, sampling)
        configuration = configuration_of(store, name, configuration)
    if tokenizer is not None:
        raise ReproduceError(f"--tokenizer is for imported bundles, bundle {name} was trained with its own")
    sampling = _with_options(configuration.sampling, options)
    with open_workbench(configuration, project.dataset) as workbench:
        workbench.load(bundle, f"bundle {name}", elsewhere=True)
        return workbench.sample(sampling)


def _with_options(sampling: SamplingSpec, options: Mapping[str, Any]) -> SamplingSpec:
    given = {**sampling.model_dump(), **options}
    try:
        return SamplingSpec.model_validate(given)
    except ValidationError as error:
        faults = "; ".join(explain(fault, given) for fault in error.errors())
        raise ConfigurationError(f"these sampling options cannot be used: {faults}") from error


def configuration_of(store: Store, name: str, present: Configuration) -> Configuration:
    """The configuration that a bundle was made with, with the present run options."""
    return from_identity(_recorded(store, name), present.run, f"configuration of bundle {name}")


def _configuration_of_final(project: Project, name: str, present: Configuration) -> Configuration:
    """The same for the pipeline's final bundle, of which run/ may be all that is here. Where nothing tells, the present
    one, which the bundle's state is then compared with as it is loaded."""
    path = project.outputs / "record.json"
    if path.is_file():
        record = loads(path.read_bytes(), str(path))
        if record.final_bundle == name:
            return from_identity(record.configuration, present.run, str(path))
    try:
        return configuration_of(project.store(present.run), name, present)
    except Inconclusive:
        return present


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
        f"bundle {name} belongs to no run or record in {store.path}, so its configuration is not known: "
        "pull or import the record that it is of"
    )
