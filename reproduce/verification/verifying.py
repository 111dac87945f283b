"""The order of a verification, and its verdict."""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from artifacts import Attestation, Record, Store, read_record, write_attestation
from artifacts.bundle import load_manifest
from artifacts.errors import ArtifactError, Corrupt, ReadOnly
from data_pipeline import DataError
from engine.errors import EngineError
from engine.plan import make_plan
from engine.program import build_program
from reproduce.configuration import RunOptions
from reproduce.display import counted, duration, open_display
from reproduce.display import say as print_line
from reproduce.environment import fingerprint
from reproduce.errors import CorruptOutput, Inconclusive, PlanRefused, ReproduceError
from reproduce.importing import find_or_import
from reproduce.normative import normative_sources
from reproduce.planning.devices import find_device
from reproduce.planning.sizes import size
from reproduce.project import Project
from reproduce.training import now
from reproduce.verification.checkout import find_commit, verify_in_checkout
from reproduce.verification.datasets import Found, find_dataset, look_for_dataset
from reproduce.verification.distances import Tolerance
from reproduce.verification.expectation import Expectation, expectation
from reproduce.verification.integrity import Claims, check_bundles, read_claims
from reproduce.verification.jobs import SegmentFailed, Task, in_turn, side_by_side, thread_shares
from reproduce.verification.lines import difference_lines, distance_lines
from reproduce.verification.lock import check_lock_of_dataset
from reproduce.verification.segments import Segment, choose, parse_steps, pieces, whole
from reproduce.verification.verdict import ADVICE, EXIT_CODES, Findings, Report

Say = Callable[[str], None]
_SEEDS = 2**32


@dataclass(frozen=True)
class Request:
    """What somebody asked to have verified. steps: `A:B`. segments: how many to choose with `seed`, 0 for none."""

    steps: str | None = None
    segments: int = 0
    seed: int | None = None
    jobs: int = 1
    checkout: bool = False
    as_json: bool = False

    def check(self) -> None:
        if self.steps is not None and self.segments:
            raise ReproduceError("--steps and --segments exclude each other: give one of them")
        if self.seed is not None and not self.segments:
            raise ReproduceError("--seed chooses segments: give --segments N with it")

    def words(self) -> list[str]:
        """The same request on the command line."""
        given = ["--steps", self.steps] if self.steps is not None else []
        if self.segments:
            given += ["--segments", str(self.segments), "--seed", str(self.seed)]
        return given + (["--jobs", str(self.jobs)] if self.jobs > 1 else [])


def verify(project: Project, options: RunOptions, prefix: str, request: Request) -> int:
    """Verifies, says so, attests to it, and returns the exit code."""
    request.check()
    started, clock = now(), time.monotonic()
    say: Say = (lambda text: None) if request.as_json else print_line
    report = Report(prefix)
    try:
        store, name = find_or_import(project, options, prefix)
        record = read_record(store, name)
    except Corrupt as error:
        report.conclude("corrupt", str(error))
        return _finish(report, request, say)
    report.record = name
    if request.as_json:
        options = options.model_copy(update={"progress": "none"})
    verification = _Verification(project, options, store, record, request, report, say)
    try:
        elsewhere = verification.run()
    except PlanRefused:
        raise
    except (ArtifactError, CorruptOutput, DataError, EngineError, Inconclusive, SegmentFailed) as error:
        corrupt = getattr(error, "exit_code", None) == Corrupt.exit_code
        report.conclude("corrupt" if corrupt else "inconclusive", str(error))
    else:
        if elsewhere is not None:
            return elsewhere
    report.seconds = time.monotonic() - clock
    environment = fingerprint(project.root, options.thread_count())
    attestation = Attestation(name, "verified", report.as_json(), environment, started, now())
    try:
        write_attestation(store, attestation)
    except ReadOnly as error:
        say(f"the verdict is not kept as an attestation: {error}")
    return _finish(report, request, say, environment)


def _finish(report: Report, request: Request, say: Say, environment: Mapping[str, Any] | None = None) -> int:
    if request.as_json:
        whole_report = {
            **report.as_json(),
            "environment": environment,
            "seconds": round(report.seconds, 3),
            "segments": report.segments,
        }
        print_line(json.dumps(whole_report, indent=2, sort_keys=True))
    for line in (*difference_lines(report.differences), *distance_lines(report.distances)):
        say(line)
    took = f" ({duration(report.seconds)})" if report.seconds else ""
    say(f"verdict: {report.verdict}: {report.reason}{took}")
    if report.verdict in ADVICE:
        say(f"what to do: {ADVICE[report.verdict]}")
    return EXIT_CODES[report.verdict]


class _Verification:
    """One verification; raises what makes it inconclusive or corrupt, and concludes otherwise."""

    def __init__(
        self,
        project: Project,
        options: RunOptions,
        store: Store,
        record: Record,
        request: Request,
        report: Report,
        say: Say,
    ) -> None:
        self.project = project
        self.options = options
        self.store = store
        self.record = record
        self.request = request
        self.report = report
        self.say = say

    def run(self) -> int | None:
        """None, or the exit code of a verification in a checkout, which has said and attested everything itself."""
        record, report = self.record, self.report
        self.say(
            f"record {report.record}: tier {record.tier}, {record.steps} steps, final bundle {record.final_bundle}"
        )
        claims = read_claims(self.store, report.record, record, self.options)
        self._fork(claims)
        report.steps = parse_steps(self.request.steps, min(claims.bundles), record.steps)
        check_bundles(self.store, claims)
        self.say(f"integrity: record, step digests and {counted(len(claims.bundles), 'bundle')} are whole")
        if (commit := self._sources()) is not None:
            return self._elsewhere(commit)
        expected = expectation(record, self.options.device)
        report.expected = expected.name
        self.say(f"environment: {expected.name} expected: {expected.why}")
        found = find_dataset(self.project, claims.configuration.data, record.dataset, self.say)
        report.dataset_from = found.where
        self.say(f"data: dataset {found.dataset.hash} from {found.where}")
        check_lock_of_dataset(record, found.folder)
        if found.dataset.tokenizer.hash != record.tokenizer:
            raise Inconclusive(
                f"the dataset has tokenizer {found.dataset.tokenizer.hash}, the record names {record.tokenizer}"
            )
        segments = self._segments(claims, expected)
        self._require_covered(segments, expected.tolerance)
        self._replay(claims, found, expected, segments)
        _conclude(report, record, expected, segments)
        return None

    def _fork(self, claims: Claims) -> None:
        """Says where a forked run begins; that it did begin there can be seen where the other run is at hand."""
        begins = min(claims.bundles)
        if not begins:
            return
        lock: Any = self.record.lock
        parent = lock.get("fork", {}).get("bundle")
        self.say(
            f"fork: this run begins at step {begins}, at the state of bundle {parent}; how that came about is not "
            "looked at here: verify the record that it is of"
        )
        if not isinstance(parent, str) or not self.store.has(parent):
            return
        here, there = (load_manifest(self.store, name) for name in (self.record.first_bundle, parent))
        if here.tensors != there.tensors:
            raise CorruptOutput(f"the first bundle of the record has not the tensors of bundle {parent}")

    def _sources(self) -> str | None:
        """Says which sources are not the record's; the commit to check out, if that was asked for."""
        here, there = normative_sources(), self.record.sources
        changed = sorted(path for path in {*here, *there} if here.get(path) != there.get(path))
        self.report.sources_changed = changed
        if not changed:
            self.say("sources: those that decide bits are the record's")
            return None
        listed = "".join(f"\n  {path}" for path in changed)
        self.say(f"sources: {len(changed)} of those that decide bits are not the record's:{listed}")
        commit = find_commit(self.project.root, there)
        if self.request.checkout:
            if commit is None:
                raise Inconclusive(
                    "--checkout: no commit that Git knows here has the sources that the record names. Get the "
                    "repository's whole history (`git fetch --all`), or verify with the sources here, without "
                    "--checkout"
                )
            return commit
        self.say("sources: replaying with those here; if the bits are the same, the change had no effect on them")
        if commit is not None:
            self.say(f"sources: Git commit {commit} has the record's: --checkout replays with them")
        return None

    def _elsewhere(self, commit: str) -> int:
        self.say(f"sources: replaying with those of Git commit {commit}, in a checkout of its own")
        request, report = self.request, self.report
        if request.segments and request.seed is None:
            request = Request(**{**vars(request), "seed": secrets.randbelow(_SEEDS)})
        code, found = verify_in_checkout(
            self.project,
            self.store.path,
            commit,
            report.record,
            request.words(),
            self.options.thread_count(),
            look_for_dataset(self.project, self.record.dataset),
            live=not request.as_json,
        )
        if found is not None:
            print_line(json.dumps({**found, "checkout": commit}, indent=2, sort_keys=True))
        return code

    def _segments(self, claims: Claims, expected: Expectation) -> list[Segment]:
        request, steps, bundles = self.request, self.report.steps, sorted(claims.bundles)
        if request.segments:
            seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
            self.report.seed = seed
            chosen = choose(bundles, request.segments, seed, claims.name)
            names = ", ".join(f"{segment.first}:{segment.last}" for segment in chosen)
            self.say(
                f"segments: {len(chosen)} of the {len(bundles) - 1} between bundles, chosen with --seed {seed}: {names}"
            )
            self.report.steps = chosen[0].first, chosen[-1].last
            return chosen
        # A tolerance holds for a replay from a bundle of the record, not for a longer one.
        if expected.tolerance is not None or request.jobs > 1:
            return pieces(bundles, *steps)
        return whole(bundles, *steps)

    def _require_covered(self, segments: list[Segment], tolerance: Tolerance | None) -> None:
        """Raises Inconclusive where the record's tolerance says nothing of so many steps from a bundle."""
        for segment in segments:
            if tolerance is not None and segment.last - segment.start > tolerance.steps:
                end = segment.start + tolerance.steps
                raise Inconclusive(
                    f"the record's tolerance says how far {tolerance.steps} steps from a bundle may lead apart, and "
                    f"nothing of the {segment.last - segment.start} from step {segment.start} to {segment.last}: "
                    f"verify less, such as --steps {segment.start + 1}:{end}"
                )

    def _replay(self, claims: Claims, found: Found, expected: Expectation, segments: list[Segment]) -> None:
        configuration = claims.configuration
        tokens = configuration.train.batch * configuration.model.context
        total = sum(segment.last - segment.start for segment in segments)
        display = open_display(self.options.progress, "verifying", 0, total, tokens)
        done = 0

        def on_step(step: int, loss: float) -> None:
            nonlocal done
            done += 1
            display.step(done, loss)

        def on_end(segment: Segment, findings: Findings) -> None:
            self.report.add(segment.start, segment.last, findings)
            if len(segments) > 1:
                display.note(
                    f"segment {segment.first}:{segment.last}: {self.report.segments[-1]['verdict']} "
                    f"({duration(findings.seconds)})"
                )

        try:
            jobs = min(self.request.jobs, len(segments))
            if jobs > 1:
                side_by_side(self._tasks(claims, found, expected, segments, jobs), jobs, display, on_end)
            else:
                in_turn(self.store, claims, found.dataset, segments, expected.tolerance, on_step, on_end)
        finally:
            display.close()

    def _tasks(
        self, claims: Claims, found: Found, expected: Expectation, segments: list[Segment], jobs: int
    ) -> list[Task]:
        """One for each segment; the cores are divided among the jobs."""
        options = claims.configuration.run
        shares = thread_shares(len(segments), jobs, options.thread_count())
        configuration = claims.configuration
        program = build_program(configuration.model, configuration.recomputed_blocks)
        needed = jobs * make_plan(program, configuration.train, configuration.tier, max(shares)).arena_bytes
        available = find_device("cpu").memory
        if needed > available:
            raise PlanRefused(
                f"{jobs} jobs need {size(needed)} of memory together, {size(available)} are available: "
                f"give --jobs {max(1, jobs * available // needed)}"
            )
        return [
            Task(
                number,
                self.store.path,
                claims.with_threads(threads),
                found.folder,
                segment,
                expected.tolerance,
            )
            for number, (segment, threads) in enumerate(zip(segments, shares, strict=True))
        ]


def _conclude(report: Report, record: Record, expected: Expectation, segments: list[Segment]) -> None:
    counts = report.compared
    if report.differences:
        earliest = report.differences[0]
        text = f"first at step {earliest['step']}, in the {earliest['what']}"
        tensors = [d["tensor"] for found in report.differences for d in found.get("tensors", ())]
        if tensors:
            text += f"; tensors that differ: {', '.join(tensors[:4])}" + (" ..." if len(tensors) > 4 else "")
        if record.tier != "portable" and expected.tolerance is None:
            text += "; this machine is of the record's class, so that every bit should be the same"
        report.conclude("differs", text)
        return
    first, last = report.steps
    parts = f"up to step {last} of {record.steps}"
    if report.seed is not None:
        parts = f"in {counted(len(segments), 'segment')} between steps {first} and {last} of {record.steps}"
    compared = (
        f"{counted(counts['digests'], 'step digest')}, {counted(counts['bundles'], 'bundle')} and "
        f"{counted(counts['evaluations'], 'evaluation')}"
    )
    if all(segment["verdict"] == "bit-exact" for segment in report.segments):
        report.conclude("bit-exact", f"{compared} {parts} are the same")
    else:
        report.conclude("within tolerance", f"{compared} {parts} are as close as the record's tolerance says")
