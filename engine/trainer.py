"""The training loop's one step, evaluation and sampling, over a backend and two sources of windows."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.backends.base import extra_names
from engine.backends.opening import Device, open_backend
from engine.digest import Hashes, content_digest, content_hashes, step_digest
from engine.errors import NonFinite, SpecError, StateMismatch, TokenError
from engine.initial import fill_initial
from engine.numerics.types import Array, Words
from engine.program import build_program
from engine.schedule import StepValues, step_values
from engine.spec import ModelSpec, Tier, TrainSpec, check_precision

DIGEST_BYTES = 32
LOSS_UNIT = 2.0**-30  # nats; losses are added up as integers of this unit
STATE_ARRAYS = ("weights", "m", "v")
UNCHANGED = "Weights and moments are as they were before the step"


class BatchSource(Protocol):
    """Training batches, a function of the step."""

    def fill(self, step: int, inputs: Words, targets: Words) -> None: ...


class WindowSource(Protocol):
    """A list of held-out windows."""

    count: int

    def fill(self, first: int, inputs: Words, targets: Words) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What one step did. `step` counts steps done, so the first result has 1; loss in nats per token."""

    step: int
    loss: np.float32
    gradient_norm: float
    learning_rate: np.float32
    digest: bytes


class Trainer:
    """Trains one model. The state after n steps is a function of the specs, the tier and the batches alone."""

    def __init__(
        self,
        model: ModelSpec,
        train: TrainSpec,
        tier: Tier,
        batches: BatchSource,
        *,
        threads: int,
        device: Device = "cpu",
        recompute: int = 0,
    ) -> None:
        """Plan and allocate; PlanRefused if memory does not suffice. Call initialise() or load_state() next.

        recompute: how many blocks are computed again in the backward half: less memory, more time, the same bits.
        """
        self.model = model
        self.train = train
        check_precision(tier, train)
        program = build_program(model, recompute)
        self.plan, self.backend = open_backend(program, train, tier, device, threads)
        self.program = self.backend.program
        self.batches = batches
        self.step = 0
        self.losses = np.zeros(train.steps, np.float32)
        self.digests = np.zeros((train.steps, DIGEST_BYTES), np.uint8)
        tensors = len(STATE_ARRAYS) * len(self.program.parameters)
        self.contents: Hashes | None = None  # [steps, tensors in the order of their names, 32]
        if tier == "debug":
            self.contents = np.zeros((train.steps, tensors, DIGEST_BYTES), np.uint8)
        self._threads = threads
        shape = (2, train.batch, model.context)  # inputs and targets
        self._batch, self._next_batch = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self._next_values: StepValues
        self._ready: tuple[int, BatchSource] | None = None  # whose the next batch and values are

    def initialise(self) -> None:
        """Start from initial weights and zero moments, at step 0."""
        self.step = 0
        self.backend.load_extra_state({}, elsewhere=False)
        flat = self.backend.state_to_write()
        for array in flat.values():
            array[:] = 0
        weights = self.backend.views(flat["weights"])
        for number, parameter in enumerate(self.program.parameters):
            fill_initial(parameter, number, self.train.seed, weights[parameter.name])
        self.backend.state_written()

    def state(self) -> dict[str, Array]:
        """The whole state by name, as views that the next step overwrites."""
        return self._with_extra(self._named(self.backend.current_state(), self.step))

    def saved_state(self) -> dict[str, Array]:
        """A copy of the whole state in the plan's saving buffers; stays as it is until the next call."""
        return self._with_extra(self._named(self.backend.copy_for_saving(), self.step))

    def _named(self, flat: Mapping[str, Array], done: int) -> dict[str, Array]:
        named = self._tensors(flat)
        named["history/loss"] = self.losses[:done]
        named["history/digest"] = self.digests[:done]
        if self.contents is not None:
            named["history/tensors"] = self.contents[:done]
        return named

    def _with_extra(self, named: dict[str, Array]) -> dict[str, Array]:
        return named | self.backend.extra_state()

    def _tensors(self, flat: Mapping[str, Array]) -> dict[str, Array]:
        return {
            f"{kind}/{name}": view for kind in STATE_ARRAYS for name, view in self.backend.views(flat[kind]).items()
        }

    def load_state(self, state: Mapping[str, Array], *, elsewhere: bool = False) -> None:
        """Take up a saved state; raises StateMismatch, changing nothing, if anything is missing, left over or of
        another type. `elsewhere`: its bits are not expected to be met here, so a state of the tier prod may come from
        another card or go to a CPU."""
        names = extra_names(self.train.precision)
        extra = {name: state[name] for name in names if name in state}
        if missing_names := sorted(names - extra.keys()):
            raise StateMismatch(f"the state is not of the tier prod in {self.train.precision}: missing {missing_names}")
        state = {name: array for name, array in state.items() if name not in names}
        done = len(state["history/loss"]) if "history/loss" in state else 0
        if done > self.train.steps:
            raise StateMismatch(
                f"the state is at step {done}, the configuration ends at train.steps={self.train.steps}"
            )
        expected = self._named(self.backend.state_to_write(), done)
        missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
        if missing or unknown:
            raise StateMismatch(
                f"the state does not belong to this model: missing {missing[:3] or 'nothing'}, "
                f"not expected {unknown[:3] or 'nothing'}. Use the configuration the state was made with"
            )
        for name, target in expected.items():
            found = state[name]
            if found.shape != target.shape or found.dtype != target.dtype:
                raise StateMismatch(
                    f"{name}: the configuration expects {target.dtype} {list(target.shape)}, "
                    f"the state has {found.dtype} {list(found.shape)}"
                )
        self.backend.load_extra_state(extra, elsewhere=elsewhere)
        for name, target in expected.items():
            target[...] = state[name]
        self.step = done
        self.backend.state_written()

    def train_step(self) -> StepResult:
        """One optimizer step over a whole batch; raises NonFinite, leaving weights and moments as they were."""
        if self.step >= self.train.steps:
            raise AssertionError(f"all {self.train.steps} steps are done")
        (inputs, targets), values = self._take()
        outcome = self.backend.train_step(self.step, inputs, targets, values, self._prepare_next)
        self._check_finite(outcome.flagged)
        if not np.isfinite(outcome.norm):
            what = outcome.bad_gradients[0] if outcome.bad_gradients else "all parameters together"
            raise NonFinite(f"step {self.step + 1}: the gradient of {what} is not finite. {UNCHANGED}")
        if outcome.bad_updates:
            # The tier prod looks while it writes: reading all twice would cost more than a bundle is old.
            after = "They can no longer be used: go on from the last bundle" if self.train.precision else UNCHANGED
            raise NonFinite(
                f"step {self.step + 1}: the optimizer would make {outcome.bad_updates[0]} or its moments infinite or "
                f"NaN. {after}. A lower train.learning_rate or a train.clip_norm may help"
            )
        loss = np.float32(outcome.loss_total * LOSS_UNIT / inputs.size)
        self.step += 1
        digest = self._digest(loss)
        self.losses[self.step - 1] = loss
        self.digests[self.step - 1] = np.frombuffer(digest, np.uint8)
        return StepResult(self.step, loss, outcome.norm, values.learning_rate, digest)

    def _take(self) -> tuple[Words, StepValues]:
        """Inputs and targets of this step, and what the optimizer takes for it."""
        if not self._is_ready(self.step):
            self._prepare(self.step)
        self._ready = None
        self._batch, self._next_batch = self._next_batch, self._batch
        return self._batch, self._next_values

    def _is_ready(self, step: int) -> bool:
        # The source itself: an equal one may hold other batches.
        return self._ready is not None and self._ready[0] == step and self._ready[1] is self.batches

    def _prepare(self, step: int) -> None:
        self._ready = None
        self.batches.fill(step, *self._next_batch)
        self._check_tokens(*self._next_batch)
        self._next_values = step_values(self.train, step)
        self._ready = step, self.batches

    def _prepare_next(self) -> None:
        """Prepare the next step while a card computes this one. What is wrong with its batch the next step will say."""
        step = self.step + 1
        if step < self.train.steps and not self._is_ready(step):
            with suppress(Exception):
                self._prepare(step)

    def _digest(self, loss: np.float32) -> bytes:
        """The digest after the step just done; in the tier debug also keeps what every tensor is."""
        if self.contents is None:
            return step_digest(self.step, loss, self.backend.sums)
        hashes = content_hashes(self._tensors(self.backend.current_state()), self._threads)
        self.contents[self.step - 1] = hashes
        return content_digest(self.step, loss, hashes)

    def evaluate(self, windows: WindowSource) -> float:
        """Mean loss over all windows in nats per token, without dropout."""
        if windows.count < 1:
            raise SpecError(
                f"evaluation needs held-out text for at least one window of model.context={self.model.context} "
                "tokens, found none: hold out more text or use a shorter context"
            )
        rows = self.plan.sizes.batch
        total = 0
        for first in range(0, windows.count, rows):
            count = min(rows, windows.count - first)
            inputs, targets = self._batch[:, :count]
            windows.fill(first, inputs, targets)
            self._check_tokens(inputs, targets)
            total += self.backend.losses(inputs, targets)
            self._check_finite(self.backend.take_flag())
        return total * LOSS_UNIT / (windows.count * self.model.context)

    def next_logits(self, tokens: Words) -> npt.NDArray[np.float32]:
        """Logits [V] of the token after `tokens` (1 to `context` of them); a view, overwritten by the next call."""
        if not 1 <= len(tokens) <= self.model.context:
            raise AssertionError(f"next_logits takes 1 to {self.model.context} tokens, found {len(tokens)}")
        self._check_tokens(tokens)
        # Later positions do not move earlier logits, so the row is padded to few different lengths.
        padded = min(self.model.context, -(-len(tokens) // 32) * 32)
        ids = np.zeros((1, padded), np.int32)
        ids[0, : len(tokens)] = tokens
        logits: npt.NDArray[np.float32] = self.backend.logits(ids)[0, len(tokens) - 1]
        self._check_finite(self.backend.take_flag())
        return logits

    def _check_tokens(self, *arrays: Words) -> None:
        """Kernels use token numbers as row numbers without looking."""
        for tokens in arrays:
            least, most = int(tokens.min()), int(tokens.max())
            if least < 0 or most >= self.model.vocab:
                raise TokenError(
                    f"model.vocab={self.model.vocab} allows token numbers 0 to {self.model.vocab - 1}, found "
                    f"{least if least < 0 else most}: set model.vocab to at least the tokenizer's size"
                )

    def _check_finite(self, flagged: int | None) -> None:
        if flagged is not None:
            name = self.program.operations[flagged].name
            raise NonFinite(
                f"step {self.step + 1}: a number that is not finite (NaN or infinity) entered {name}. "
                f"{UNCHANGED}. A lower train.learning_rate or a train.clip_norm may help"
            )

    def close(self) -> None:
        self.backend.close()
