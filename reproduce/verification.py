"""Does this machine come to the same bits as a record says? Integrity first, then data, then replay, then a verdict."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from artifacts import (
    Attestation,
    Record,
    Store,
    load_bundle,
    read_digests,
    read_record,
    record_bundles,
    verify_bundle,
    write_attestation,
)
from artifacts.errors import ArtifactError, Corrupt, ReadOnly
from data_pipeline import DataError, Dataset, fetch, open_dataset, prepare
from engine.errors import EngineError, NonFinite
from reproduce.comparing import bundle_hash, differing_tensors
from reproduce.configuration import RunOptions, from_identity
from reproduce.display import Display, duration, open_display
from reproduce.display import say as print_line
from reproduce.environment import fingerprint, hardware_class
from reproduce.errors import Changed, ConfigurationError, CorruptOutput, Inconclusive, ReproduceError
from reproduce.importing import find_or_import
from reproduce.normative import normative_sources
from reproduce.outputs import shortest
from reproduce.project import Project
from reproduce.state import Identity
from reproduce.training import now
from reproduce.workbench import Workbench, identity_of, workbench_over

Verdict = Literal["bit-exact", "within tolerance", "differs", "inconclusive", "corrupt"]
EXIT_CODES: Mapping[Verdict, int] = {
    "bit-exact": 0,
    "within tolerance": 0,
    "differs": 1,
    "inconclusive": 3,
    "corrupt": 4,
}
_KNOWN_RESULTS = {"first_loss", "last_loss", "steps", "tokens", "validation", "validation_loss"}
Say = Callable[[str], None]


@dataclass
class Report:
    """What was found out; all of it goes into the attestation and the JSON."""

    record: str
    steps: tuple[int, int]
    verdict: Verdict = "inconclusive"
    reason: str = ""
    compared: dict[str, int] = field(
        default_factory=lambda: {"digests": 0, "bundles": 0, "evaluations": 0}
    )
    differences: list[dict[str, Any]] = field(default_factory=list)
    sources_changed: list[str] = field(default_factory=list)
    dataset_from: str = ""
    seconds: float = 0.0

    def conclude(self, verdict: Verdict, reason: str) -> None:
        self.verdict, self.reason = verdict, reason

    def as_json(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "dataset_from": self.dataset_from,
            "differences": self.differences,
            "reason": self.reason,
            "record": self.record,
            "sources_changed": self.sources_changed,
            "steps": list(self.steps),
            "verdict": self.verdict,
        }


def verify(
    project: Project, options: RunOptions, prefix: str, steps: str | None, as_json: bool
) -> int:
    """Verifies, says so, attests to it, and returns the exit code."""
    store, name = find_or_import(project, options, prefix)
    started, clock = now(), time.monotonic()
    say: Say = (lambda text: None) if as_json else print_line
    try:
        record = read_record(store, name)
    except Corrupt as error:
        report = Report(name, (0, 0))
        report.conclude("corrupt", str(error))
        return _finish(report, as_json, say)
    report = Report(name, parse_steps(steps, record.steps))
    if as_json:
        options = options.model_copy(update={"progress": "none"})
    try:
        _Verification(project, options, store, record, report, say).run()
    except (ArtifactError, CorruptOutput, DataError, EngineError, Inconclusive) as error:
        corrupt = getattr(error, "exit_code", None) == Corrupt.exit_code
        report.conclude("corrupt" if corrupt else "inconclusive", str(error))
    report.seconds = time.monotonic() - clock
    environment = fingerprint(project.root, options.thread_count())
    with suppress(ReadOnly):
        write_attestation(
            store,
            Attestation(name, "verified", report.as_json(), environment, started, now()),
        )
    return _finish(report, as_json, say, environment)


def parse_steps(text: str | None, last: int) -> tuple[int, int]:
    """First and last step to compare, from `A:B`; either may be left out."""
    if text is None:
        return 1, last
    first, colon, second = text.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, second)):
        raise ReproduceError(f"--steps: expected A:B with step numbers, found {text!r}")
    a, b = int(first or 1), int(second or last)
    if not 1 <= a <= b <= last:
        raise ReproduceError(f"--steps: expected 1 <= A <= B <= {last}, found {text}")
    return a, b


def _finish(
    report: Report, as_json: bool, say: Say, environment: Mapping[str, Any] | None = None
) -> int:
    if as_json:
        whole = {**report.as_json(), "environment": environment, "seconds": round(report.seconds, 3)}
        print_line(json.dumps(whole, indent=2, sort_keys=True))
    for difference in report.differences:
        say(f"difference: {json.dumps(difference, sort_keys=True)}")
    took = f" ({duration(report.seconds)})" if report.seconds else ""
    say(f"verdict: {report.verdict}: {report.reason}{took}")
    return EXIT_CODES[report.verdict]


class _Verification:
    """One verification; raises what makes it inconclusive or corrupt, and concludes otherwise."""

    def __init__(
        self,
        project: Project,
        options: RunOptions,
        store: Store,
        record: Record,
        report: Report,
        say: Say,
    ) -> None:
        self.project = project
        self.options = options
        self.store = store
        self.record = record
        self.report = report
        self.say = say

    def run(self) -> None:
        record, report = self.record, self.report
        self.say(
            f"record {report.record}: tier {record.tier}, {record.steps} steps, final bundle {record.final_bundle}"
        )
        try:
            self.configuration = from_identity(record.configuration, self.options, "its configuration")
        except ConfigurationError as error:
            raise CorruptOutput(f"record {report.record}: {error}") from error
        self.identity = Identity(record.configuration, record.dataset, record.tokenizer)
        self._integrity()
        self._environment()
        dataset = self._dataset()
        first, last = report.steps
        with workbench_over(self.configuration, dataset) as workbench:
            if identity_of(self.configuration, dataset).tokenizer != record.tokenizer:
                raise Inconclusive(
                    f"the dataset has tokenizer {dataset.tokenizer.hash}, the record names {record.tokenizer}"
                )
            start = max(step for step in self.bundles if step < first)
            self._start(workbench, start)
            tokens = self.configuration.train.batch * self.configuration.model.context
            display = open_display(self.options.progress, "verifying", start, last, tokens)
            try:
                self._replay(workbench, last, display)
            finally:
                display.close()

    def _integrity(self) -> None:
        record = self.record
        self.digests = read_digests(self.store, record)
        self.bundles = record_bundles(self.store, self.report.record)
        if self.identity.specification != record.specification:
            raise CorruptOutput(
                f"the record's specification is {record.specification}, that of its configuration "
                f"{self.identity.specification}"
            )
        if self.configuration.train.steps != record.steps or self.configuration.tier != record.tier:
            raise CorruptOutput("steps or tier of the record are not those of its configuration")
        for step, bundle in self.bundles.items():
            manifest = verify_bundle(self.store, bundle)
            try:
                found = self.identity.check(manifest.state, f"bundle {bundle}")
            except Changed as error:
                raise CorruptOutput(f"the record lists a bundle that is not its own: {error}") from error
            if found != step:
                raise CorruptOutput(f"bundle {bundle} is listed for step {step}, but is of step {found}")
        final = load_bundle(self.store, record.final_bundle).tensors
        if [bytes(row) for row in final["history/digest"]] != self.digests:
            raise CorruptOutput("the step digests of the record are not those of its final bundle")
        self.losses = final["history/loss"]
        for name, at in (("first_loss", 0), ("last_loss", -1)):
            if record.results.get(name) != float(shortest(self.losses[at])):
                raise CorruptOutput(f"{name} of the record is not that of its final bundle")
        unknown = sorted(set(record.results) - _KNOWN_RESULTS)
        if unknown:
            raise CorruptOutput(f"the record has results that nobody here can check: {unknown}")
        self.say(f"integrity: record, step digests and {len(self.bundles)} bundles are whole")

    def _environment(self) -> None:
        here, there = normative_sources(), self.record.sources
        changed = sorted(path for path in {*here, *there} if here.get(path) != there.get(path))
        self.report.sources_changed = changed
        if changed:
            shown = ", ".join(changed[:5]) + (" ..." if len(changed) > 5 else "")
            self.say(
                f"sources: {len(changed)} of those that decide bits are not the record's: {shown}; "
                "replaying with those here"
            )
        else:
            self.say("sources: those that decide bits are the record's")
        if self.record.tier != "portable" and hardware_class() != self.record.hardware:
            raise Inconclusive(
                f"a record of the tier {self.record.tier} promises its bits only on {self.record.hardware}; "
                f"this is {hardware_class()}, and the record declares no tolerance"
            )

    def _dataset(self) -> Dataset:
        """The dataset of the record: the project's if it is that, otherwise built once more."""
        with suppress(DataError):
            dataset = open_dataset(self.project.dataset)
            if dataset.hash == self.record.dataset:
                return self._from(dataset, "data/dataset")
        folder = self.project.private() / "datasets" / self.record.dataset
        with suppress(DataError):
            dataset = open_dataset(folder / "dataset")
            if dataset.hash == self.record.dataset:
                return self._from(dataset, "an earlier verification")
        self.say("data: data/dataset is not the record's; building it anew from its sources")
        spec = self.configuration.data
        fetch(spec, folder / "raw", self.project.root)
        prepare(spec, folder / "raw", folder / "dataset")
        dataset = open_dataset(folder / "dataset")
        if dataset.hash != self.record.dataset:
            raise Inconclusive(
                f"the record was made with dataset {self.record.dataset}, its sources now give {dataset.hash}: "
                "provide the files the record was made with"
            )
        return self._from(dataset, "its sources")

    def _from(self, dataset: Dataset, where: str) -> Dataset:
        self.report.dataset_from = where
        self.say(f"data: dataset {dataset.hash} from {where}")
        return dataset

    def _start(self, workbench: Workbench, start: int) -> None:
        if start == 0:
            workbench.trainer.initialise()
            self.say("replaying from initial weights")
            return
        bundle = self.bundles[start]
        workbench.load(load_bundle(self.store, bundle), f"bundle {bundle}")
        self.say(f"replaying from bundle {bundle} of step {start}")

    def _replay(self, workbench: Workbench, last: int, display: Display) -> None:
        """Steps until `last`; after a difference on to the next bundle, which tells the tensors."""
        trainer, report = workbench.trainer, self.report
        try:
            while True:
                step = trainer.step
                if not report.differences:
                    self._check_evaluation(workbench)
                if step in self.bundles and (step > report.steps[0] - 1 or step == 0):
                    self._check_bundle(workbench, step)
                differs = bool(report.differences)
                if differs and (step in self.bundles or step >= self.record.steps):
                    break
                if not differs and step >= last:
                    break
                result = trainer.train_step()
                display.step(result.step, float(result.loss))
                self._check_digest(result.step, result.digest, float(result.loss))
        except NonFinite as error:
            report.differences.append({"step": trainer.step + 1, "what": str(error)})
        self._conclude(last)

    def _check_digest(self, step: int, digest: bytes, loss: float) -> None:
        self.report.compared["digests"] += 1
        expected = self.digests[step - 1]
        if digest != expected and not self.report.differences:
            self.report.differences.append(
                {
                    "what": "step digest",
                    "step": step,
                    "expected": expected.hex(),
                    "found": digest.hex(),
                    "expected_loss": str(self.losses[step - 1]),
                    "found_loss": shortest(loss),
                }
            )

    def _check_bundle(self, workbench: Workbench, step: int) -> None:
        self.report.compared["bundles"] += 1
        expected = self.bundles[step]
        found = bundle_hash(workbench.trainer.state(), self.identity.state(step))
        if found == expected:
            return
        saved = load_bundle(self.store, expected).tensors
        self.report.differences.append(
            {
                "what": "bundle",
                "step": step,
                "expected": expected,
                "found": found,
                "tensors": differing_tensors(saved, workbench.trainer.state()),
            }
        )

    def _check_evaluation(self, workbench: Workbench) -> None:
        step = workbench.trainer.step
        claims = self.record.results.get("validation")
        expected = claims.get(str(step)) if isinstance(claims, dict) else None
        if step == self.record.steps:
            expected = self.record.results.get("validation_loss")
        if expected is None:
            return
        self.report.compared["evaluations"] += 1
        found = workbench.evaluate()
        if found != expected:
            self.report.differences.append(
                {"what": "validation loss", "step": step, "expected": str(expected), "found": str(found)}
            )

    def _conclude(self, last: int) -> None:
        report = self.report
        counts = report.compared
        if report.differences:
            first = report.differences[0]
            text = f"first at step {first['step']}, in the {first['what']}"
            tensors = [d["tensor"] for found in report.differences for d in found.get("tensors", ())]
            if tensors:
                text += f"; tensors that differ: {', '.join(tensors[:4])}" + (" ..." if len(tensors) > 4 else "")
            report.conclude("differs", text)
            return
        report.conclude(
            "bit-exact",
            f"{counts['digests']} step digests, {counts['bundles']} bundles and {counts['evaluations']} "
            f"evaluations up to step {last} of {self.record.steps} are the same",
        )
