"""From the last whole bundle of a run, or from nothing, to its final bundle."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from artifacts import Run, Store, load_bundle, read_run, sources_digest
from artifacts.errors import ArtifactError
from artifacts.saver import BackgroundSaver
from engine.errors import NonFinite
from reproduce.configuration import Configuration
from reproduce.display import open_display, say
from reproduce.errors import Changed, ConfigurationError, Interrupted
from reproduce.lineage import Fork, Lineage, Session
from reproduce.normative import normative_sources
from reproduce.prepared import open_prepared
from reproduce.project import Project
from reproduce.signals import Signals
from reproduce.state import Identity
from reproduce.waiting import open_run_patiently
from reproduce.workbench import Stopped, Workbench, check_dataset, identity_of, workbench_over

GO_ON = "Go on with `dvc repro` or `reproduce resume`"


@dataclass(frozen=True)
class Finished:
    """A run with all its steps done."""

    run_id: str
    identity: Identity
    sources: Mapping[str, str]
    steps: int
    first_bundle: str
    final_bundle: str
    lineage: Lineage


def train(
    project: Project, configuration: Configuration, start: str | None = None, fork: Fork | None = None
) -> Finished:
    """Trains to the end and returns the finished run; a run that is finished already is only looked up.

    start: a bundle to go on from instead of the run's last one. fork: begin at the state of another run.
    Raises Interrupted after a signal, NonFinite, SaveFailed (no space), Busy, DamagedBundle, Changed.
    """
    if configuration.tier == "prod" and configuration.run.device != "cuda":
        raise ConfigurationError(
            f"run.device: the tier prod trains on cuda, found {configuration.run.device}: set run.device: cuda, or "
            "tier: portable (without train.precision) to train here"
        )
    dataset = open_prepared(project.dataset, configuration.data)
    check_dataset(configuration, dataset)
    identity = identity_of(configuration, dataset)
    sources = normative_sources()
    run_id = identity.run_id(sources_digest(sources), None if fork is None else fork.bundle)
    store = project.store(configuration.run)
    with Signals() as signals, open_run_patiently(store, run_id, say) as run:
        try:
            lineage = _read_lineage(store, run_id) or Lineage(
                configuration=dict(identity.configuration),
                dataset=dataset.hash,
                tokenizer=dataset.tokenizer.hash,
                sources=sources,
                fork=fork,
            )
            if start is None and _is_finished(run, configuration, lineage):
                say(f"run {run_id[:12]} is complete already")
            else:
                with workbench_over(configuration, dataset) as workbench:
                    _Training(store, run, workbench, signals, lineage).run(start)
        except Interrupted:
            run.set_state("interrupted")
            raise
        except BaseException:
            with contextlib.suppress(OSError, ArtifactError):  # the disk may be what failed
                run.set_state("failed")
            raise
        run.set_state("complete")
        bundles = run.bundles()
        steps = configuration.train.steps
        first = bundles[lineage.first_step]
        return Finished(run_id, identity, sources, steps, first, bundles[steps], lineage)


def _read_lineage(store: Store, run_id: str) -> Lineage | None:
    info = read_run(store, run_id)
    return None if info is None else Lineage.read(info.lineage, run_id)


def now() -> str:
    """The time as RFC 3339 in UTC, for people: it enters no hash."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_finished(run: Run, configuration: Configuration, lineage: Lineage) -> bool:
    last = run.last_bundle()
    steps = configuration.train.steps
    return (
        last is not None
        and last[0] == steps
        and lineage.first_step in run.bundles()
        and not _missing(configuration, lineage, steps)
    )


def validation_due(configuration: Configuration, step: int) -> bool:
    """Whether held-out text is looked at after `step` steps; at the end a stage of its own does."""
    every = configuration.evaluation.every_steps
    return every > 0 and step % every == 0 and step < configuration.train.steps


def sample_due(configuration: Configuration, step: int) -> bool:
    """Whether a sample is drawn after `step` steps."""
    every = configuration.sampling.every_steps
    return every > 0 and step > 0 and step % every == 0 and step < configuration.train.steps


def _missing(configuration: Configuration, lineage: Lineage, before: int) -> list[int]:
    """Steps below `before` whose observations are due and not there."""
    return [
        step
        for step in range(lineage.first_step, before)
        if (validation_due(configuration, step) and str(step) not in lineage.validation)
        or (sample_due(configuration, step) and str(step) not in lineage.samples)
    ]


class _Training:
    """One process at work on a run."""

    def __init__(self, store: Store, run: Run, workbench: Workbench, signals: Signals, lineage: Lineage) -> None:
        self.store = store
        self.run_ = run
        self.workbench = workbench
        self.configuration = workbench.configuration
        self.trainer = workbench.trainer
        self.signals = signals
        self.lineage = lineage
        self.saved_step: int | None = None

    def run(self, start: str | None) -> None:
        threads = self.configuration.run.thread_count()
        bundles = self.run_.bundles()
        last = bundles[max(bundles)] if bundles else None
        with BackgroundSaver(self.store, threads, last) as saver:
            self.saver = saver
            self._take_up(start)
            train, model = self.configuration.train, self.configuration.model
            session = Session(started=now(), ended=None, first_step=self.trainer.step, last_step=self.trainer.step)
            self.lineage.sessions.append(session)
            self.lineage.write(self.run_)
            self.display = open_display(
                self.configuration.run.progress,
                "training",
                self.trainer.step,
                train.steps,
                train.batch * model.context,
            )
            try:
                self._steps()
            except NonFinite as error:
                saver.drain()
                raise NonFinite(
                    f"{error}.\nThe last bundle, of step {self.saved_step}, is good: {saver.last}"
                ) from error
            finally:
                self.display.close()
                session.ended, session.last_step = now(), self.trainer.step
                with contextlib.suppress(OSError, ArtifactError):
                    self.lineage.write(self.run_)

    def _take_up(self, start: str | None) -> None:
        fork = self.lineage.fork
        if self.lineage.first_step not in self.run_.bundles():
            if fork is None:
                self.trainer.initialise()
            else:
                self.trainer.load_state(load_bundle(self.store, fork.bundle).tensors)
            self._save()
            self.saver.drain()
        if start is None:
            last = self.run_.last_bundle()
            assert last is not None
            start = last[1]
        self.workbench.load(load_bundle(self.store, start), f"bundle {start}")
        if missing := _missing(self.configuration, self.lineage, self.trainer.step):
            raise Changed(
                f"bundle {start} is of step {self.trainer.step} of another run, made with other sources or elsewhere: "
                f"this run has not seen what is observed at step {missing[0]}. Go on from a bundle of step "
                f"{missing[0]} or before, such as {self.run_.bundles()[self.lineage.first_step]}"
            )
        self.saved_step = self.trainer.step
        if self.trainer.step:
            say(f"going on from bundle {start} of step {self.trainer.step}")

    def _steps(self) -> None:
        steps = self.configuration.train.steps
        while True:
            step = self.trainer.step
            with contextlib.suppress(Stopped):
                self._observe()
            stop = self.signals.stop
            every = self.configuration.run.save_every_steps
            asked = self.signals.take_save()
            if stop is not None or asked or step % every == 0 or step == steps:
                self._save()
            if stop is not None:
                self.saver.drain()
                raise Interrupted(
                    f"interrupted after step {step}; saved as bundle {self.run_.bundles()[step]}. {GO_ON}",
                    stop,
                )
            if step == steps:
                self.saver.drain()
                return
            self.saver.check()
            result = self.trainer.train_step()
            self.display.step(result.step, float(result.loss))

    def _observe(self) -> None:
        """Evaluates and samples where due and not done yet; gives up with Stopped when asked to stop."""
        step = self.trainer.step
        key = str(step)
        before = len(self.lineage.validation), len(self.lineage.samples)
        if validation_due(self.configuration, step) and key not in self.lineage.validation:
            loss = self.workbench.evaluate(self._stopped)
            self.lineage.validation[key] = loss
            self.display.note(f"step {step}: validation loss {loss:.4f}")
        if sample_due(self.configuration, step) and key not in self.lineage.samples:
            text = self.workbench.sample(self.configuration.sampling, self._stopped)
            self.lineage.samples[key] = text
            self.display.note(f"step {step}: sample\n{_indented(text)}")
        # Before the bundle of this step, so that a run that goes on from it has them.
        if before != (len(self.lineage.validation), len(self.lineage.samples)):
            self.lineage.write(self.run_)

    def _stopped(self) -> bool:
        return self.signals.stop is not None

    def _save(self) -> None:
        step = self.trainer.step
        if self.saved_step == step:
            return
        self.saver.wait_free()
        run = self.run_
        self.saver.submit(
            self.trainer.saved_state(),
            self.workbench.identity.state(step),
            lambda bundle: run.record_bundle(step, bundle),
        )
        self.saved_step = step


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
