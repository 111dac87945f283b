"""A trainer with its data, ready to compute: what training, evaluation, sampling and verification share."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from artifacts import Bundle
from data_pipeline import Dataset, TextError, Tokenizer, TrainingOrder, ValidationWindows, open_dataset
from engine.backends.base import extra_names
from engine.numerics.kernel_cache import FOLDER, nothing_compiled
from engine.numerics.types import Words
from engine.sampling import sample
from engine.spec import TrainSpec
from engine.trainer import BatchSource, Trainer
from reproduce.configuration import Configuration, RunOptions, SamplingSpec
from reproduce.display import say_aside
from reproduce.errors import ConfigurationError
from reproduce.prepared import require_made
from reproduce.state import Identity
from reproduce.vocabulary import check_vocabulary


class Stopped(Exception):
    """An evaluation or a sample was given up because the process is to stop."""


def never() -> bool:
    return False


class _Stoppable:
    """Validation windows that raise Stopped once `stopped()`: an evaluation can take minutes."""

    def __init__(self, windows: ValidationWindows, stopped: Callable[[], bool]) -> None:
        self._windows = windows
        self._stopped = stopped
        self.count = windows.count

    def fill(self, first: int, inputs: Words, targets: Words) -> None:
        if self._stopped():
            raise Stopped
        self._windows.fill(first, inputs, targets)


@dataclass(frozen=True)
class Workbench:
    """A trainer bound to a dataset; `identity` is what its bundles belong to."""

    configuration: Configuration
    dataset: Dataset
    identity: Identity
    trainer: Trainer

    def load(self, bundle: Bundle, what: str, *, elsewhere: bool = False) -> None:
        """Take up the state of a bundle, which must belong here. `elsewhere`: its bits are not expected to be met."""
        step = self.identity.check(bundle.state, what)
        tensors = bundle.tensors
        if self.trainer.train.precision is None:  # a run of the tier prod may be replayed in portable arithmetic
            extra = extra_names(self.configuration.train.precision)
            tensors = {name: array for name, array in tensors.items() if name not in extra}
        self.trainer.load_state(tensors, elsewhere=elsewhere)
        if self.trainer.step != step:
            raise ConfigurationError(
                f"{what}: its state says step {step}, its history has {self.trainer.step} steps: take another bundle "
                "(`reproduce show RECORD` lists a run's)"
            )

    def evaluate(self, stopped: Callable[[], bool] = never) -> float:
        """Mean loss over the validation split in nats per token. Raises Stopped as soon as `stopped()`."""
        windows = ValidationWindows(self.dataset.validation, self.configuration.model.context)
        return self.trainer.evaluate(_Stoppable(windows, stopped))

    def sample(self, sampling: SamplingSpec, stopped: Callable[[], bool] = never) -> str:
        """The prompt and what the model makes of it. Raises Stopped as soon as `stopped()`."""
        tokenizer = self.dataset.tokenizer
        prompt = encode_prompt(tokenizer, sampling.prompt)
        drawn = sample(
            self.trainer.next_logits,
            self.configuration.model.context,
            prompt,
            tokens=sampling.tokens,
            vocabulary=tokenizer.size,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            seed=sampling.seed,
        )
        tokens = list(prompt)
        for token in drawn:
            if stopped():
                raise Stopped
            tokens.append(token)
        # Tokens may end within a character, so all of them are decoded together.
        return tokenizer.decode(tokens)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt. Raises ConfigurationError if the tokenizer does not know its characters."""
    try:
        ids = [int(token) for token in tokenizer.encode(prompt)]
    except TextError as error:
        raise ConfigurationError(f"sampling.prompt: {error}. Choose a prompt of known characters") from error
    return ids


def identity_of(configuration: Configuration, dataset: Dataset) -> Identity:
    """What bundles of this configuration and dataset belong to."""
    return Identity(configuration.identity(), dataset.hash, dataset.tokenizer.hash)


def check_dataset(configuration: Configuration, dataset: Dataset) -> None:
    """Raises ConfigurationError or TooShortError where model and data do not fit each other."""
    model, train = configuration.model, configuration.train
    check_vocabulary(model, dataset.tokenizer.size)
    TrainingOrder(dataset.train, model.context, train.batch, train.seed)
    ValidationWindows(dataset.validation, model.context)
    encode_prompt(dataset.tokenizer, configuration.sampling.prompt)


@contextmanager
def open_workbench(configuration: Configuration, directory: Path, *, exactly: bool = True) -> Iterator[Workbench]:
    """Opens the dataset in `directory` and makes a trainer without a state. Raises PlanRefused, CorruptDataError,
    Inconclusive if there is no dataset.

    exactly: in the arithmetic of the configuration's tier; otherwise a run of the tier prod is replayed in that of
    portable, to see how far apart they lie.
    """
    require_made(directory)
    dataset = open_dataset(directory)
    with workbench_over(configuration, dataset, exactly=exactly) as workbench:
        yield workbench


@contextmanager
def workbench_over(configuration: Configuration, dataset: Dataset, *, exactly: bool = True) -> Iterator[Workbench]:
    """The same over a dataset that is open."""
    check_dataset(configuration, dataset)
    model, train = configuration.model, configuration.train
    order = TrainingOrder(dataset.train, model.context, train.batch, train.seed)
    trainer = new_trainer(configuration, train, order, exactly=exactly)
    try:
        yield Workbench(configuration, dataset, identity_of(configuration, dataset), trainer)
    finally:
        trainer.close()


def new_trainer(
    configuration: Configuration, train: TrainSpec, batches: BatchSource, *, exactly: bool = True
) -> Trainer:
    """A trainer of this configuration but for `train`. The first one on a machine compiles, and it is said that it
    does. Raises PlanRefused."""
    if multiprocessing.parent_process() is None:  # else whoever started this process has said it
        announce_compilation(configuration.run)
    tier = configuration.tier
    if tier == "prod" and not exactly:
        tier, train = "portable", train.model_copy(update={"precision": None})
    return Trainer(
        configuration.model,
        train,
        tier,
        batches,
        threads=configuration.run.thread_count(),
        device=configuration.run.device,
        recompute=configuration.recomputed_blocks,
    )


def announce_compilation(run: RunOptions) -> None:
    """Says what the long silence is for that comes next, if one does."""
    if run.device == "cpu" and nothing_compiled():
        often = "once" if FOLDER else "every time, as its cache cannot be written: let SAMEBITS_CACHE name a folder"
        say_aside(f"compiling the CPU kernels for this machine: about a minute, {often}")
