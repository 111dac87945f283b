"""The backend of the tier `prod`: 16-bit activations, fp32 weights; in fp16 the loss is scaled."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.base import CHOICES, SCALE, STREAK, Meanwhile, StepOutcome, nothing
from engine.backends.cuda.backend import CONSTANTS, STATE, CudaBackend
from engine.backends.cuda.card import Card
from engine.backends.cuda.mixed.flash import Flash
from engine.backends.cuda.mixed.hopper_activation import HopperActivation
from engine.backends.cuda.mixed.hopper_attention import HopperAttention, serves
from engine.backends.cuda.mixed.hopper_norm import HopperNorm
from engine.backends.cuda.mixed.joining import join
from engine.backends.cuda.mixed.layout import MixedLayout
from engine.backends.cuda.mixed.products import WORKSPACE, Products
from engine.backends.cuda.mixed.run import MixedRun, mixed
from engine.backends.cuda.mixed.squares import add_squares
from engine.backends.cuda.mixed.weight_gradients import WeightGradients
from engine.backends.cuda.run import THREADS, Run, ceiling
from engine.backends.cuda.sources import Unit
from engine.errors import StateMismatch
from engine.numerics.types import Array, Words
from engine.operations.base import Sizes
from engine.plan import Plan
from engine.program import Program
from engine.schedule import StepValues
from engine.spec import HALF_DTYPES, Precision, TrainSpec

FIRST_SCALE, LARGEST_SCALE, SMALLEST_SCALE = 2.0**16, 2.0**24, 1.0
STEPS_UNTIL_LARGER = 2000  # good steps in a row after which the scale doubles (as in PyTorch's GradScaler)


class MixedBackend(CudaBackend):
    """Executes a plan of a mixed program. Same bits on the same model of card with the same libraries."""

    def __init__(
        self, program: Program, plan: Plan, train: TrainSpec, layout: MixedLayout, card: Card, precision: Precision
    ) -> None:
        self.precision = precision
        self.scale = np.float32(FIRST_SCALE if precision == "fp16" else 1.0)
        self.streak = 0
        self.sum_places, self.squares = layout.sum_places, layout.squares
        super().__init__(program, plan, train, layout, card)
        self._upload_sum_table()
        with self._guarded():
            card.driver.memcpy_htod(self.address("norm_pieces"), self._piece_rows(layout.norm_pieces))
        main, _ = self.launcher.streams
        first, (count, _) = self.address("products"), plan.buffers["products"].type.shape
        workspaces = {stream: first + n * WORKSPACE for n, stream in enumerate(self.launcher.streams[:count])}
        self.products = Products(card.name, workspaces)
        self.weight_gradients = WeightGradients(self.launcher) if layout.own_gradients else None
        self.attention: Flash | HopperAttention
        self.activation: HopperActivation | None = None
        self.norm: HopperNorm | None = None
        if serves(card.capability):
            self.attention = HopperAttention(self.launcher, HALF_DTYPES[precision])
            self.activation = HopperActivation(self.launcher, HALF_DTYPES[precision])
            self.norm = HopperNorm(self.launcher, HALF_DTYPES[precision])
        else:
            self.attention = Flash(main, precision)
        self._choices: dict[str, str] = {}  # of the products of a training step
        self._unit = Unit("optimizer_mixed", {"HALF_BF16": int(HALF_DTYPES[precision] == "bfloat16")})

    def run(self, batch: int, context: int, shards: int | None = None) -> Run:
        shards = shards or self.layout.shards_at_once(self.train.shards)
        key = (batch, context, shards)
        if key not in self._runs:
            self._runs[key] = MixedRun(self, Sizes(batch=batch, context=context, threads=1), shards)
        return self._runs[key]

    def _zero_state(self) -> None:
        super()._zero_state()
        for name in ("seeds", "weights16"):
            self.launcher.fill(self.address(name), 0, self.plan.buffers[name].type.bytes)

    def _upload_sum_table(self) -> None:
        if self.sum_places.rows:
            table = self.sum_places.table(self.plan.places).view(np.uint8)
            with self._guarded():
                self.card.driver.memcpy_htod(self.address("sum_table"), table)

    def fill_zeros(self) -> None:
        """No operation counts on zeros."""

    # --- one training step ----------------------------------------------------------------------------------------

    def train_step(
        self, step: int, ids: Words, targets: Words, values: StepValues, meanwhile: Meanwhile = nothing
    ) -> StepOutcome:
        """One optimizer step. In fp16 an overflow leaves weights and moments as they are and is tried again, the same
        step on the same batch, with half the scale."""
        while True:
            self._host["values"]["loss_scale"] = self.scale
            self.products.recorded = self._choices if self._graph is None else None
            outcome = super().train_step(step, ids, targets, values, meanwhile)
            self.products.recorded = None
            if outcome.flagged is not None or np.isfinite(outcome.norm) or self.precision != "fp16":
                break
            if self.scale <= SMALLEST_SCALE:
                break
            self.scale, self.streak = np.float32(self.scale / 2), 0
        self.streak += 1
        if self.precision == "fp16" and self.streak == STEPS_UNTIL_LARGER:
            self.scale, self.streak = np.float32(min(float(self.scale) * 2, LARGEST_SCALE)), 0
        return outcome

    def _named_as_on_the_cpu(self, flagged: int) -> int:
        return flagged

    def _add_gradients(self, right: int, left: int) -> None:
        self._add(self.address(f"gradients{right}"), self.address(f"gradients{left}"), self.plan.flat_elements)
        if self._head_apart:
            self._add(self.head_gradient(right), self.head_gradient(left), self._head_elements)

    def _queue_gradients(self, run: Run) -> int:
        gradients = super()._queue_gradients(run)
        if self._head_apart:
            token = self.address(f"gradients{gradients}") + 4 * self.plan.places["embed.token"]
            self._add(self.head_gradient(gradients), token, self._head_elements)
        if mixed(run).joins_later:
            self._queue_squares(gradients)
        return gradients

    def _queue_squares(self, gradients: int) -> None:
        """Of weights whose gradients were not whole when they were computed."""
        for name, shape in self.squares.shapes.items():
            gradient = self.address(f"gradients{gradients}") + 4 * self.plan.places[name]
            squares = self.address("partial") + 8 * self.squares.places[name]
            add_squares(self.launcher, self._unit, gradient, shape, squares)

    @property
    def _head_apart(self) -> bool:
        """Whether a tied head's gradient has a set of its own until the end, so that each of both is joined by the
        tree, however many shards are taken at once."""
        return self.program.spec.tied and self.weight_gradients is not None

    @property
    def _head_elements(self) -> int:
        return self.program.spec.vocab * self.program.spec.d_model

    def head_gradient(self, gradients: int) -> int:
        """Of a set, where it stands apart: fp32 [vocab, d]."""
        return self.address("tied") + 4 * gradients * self._head_elements

    def _add(self, right: int, left: int, size: int) -> None:
        """Add fp32 [size] at one address to those at another."""
        join(self.launcher, self._unit, right, 1, size, left, adds=True)

    def _queue_update(self, gradient: int) -> None:
        launch = self.launcher
        partial, outcome, values = (self.address(name) for name in ("partial", "outcome", "values"))
        pieces = self.address("norm_pieces")
        launch(self._unit, "k_grad_norm_partial", "PPP", (self.squares.pieces,), (THREADS,), pieces, gradient, partial)
        operations = 2 * len(self.program.operations)
        arguments = (
            partial,
            self.squares.elements,
            float(self.train.clip_norm),
            self.address("flags"),
            operations,
            values,
            outcome,
        )
        launch(self._unit, "k_grad_norm_final", "PidPiPP", (1,), (1024,), *arguments)
        k = self._constants
        numbers = (float(x) for x in (k.beta1, k.rest1, k.beta2, k.rest2, k.epsilon))
        weights, m, v = (self.address(name) for name in STATE)
        arrays = (self.address("pieces"), weights, gradient, m, v, self.address("weights16"))
        rest = (values, outcome, self.address("bad"), self.address("sums"))
        form, grid = f"PPPPPP{CONSTANTS}PPPP", (self._piece_count,)
        launch(self._unit, "k_adamw", form, grid, (THREADS,), *arrays, *numbers, *rest)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def logits(self, ids: Words) -> npt.NDArray[np.float32]:
        vocab, padded = self.program.spec.vocab, self.program.tensors[self.program.logits].shape[-1]
        narrow = np.empty((*ids.shape, padded), np.uint16)
        with self._guarded():
            run = self._forward(ids, None)
            self.launcher.synchronise()
            self.card.driver.memcpy_dtoh(narrow, run.tensor(self.program.logits))
        return widened(narrow[..., :vocab], self.precision)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_written(self) -> None:
        super().state_written()
        size = self.plan.flat_elements
        arguments = (self.address("weights"), size, self.address("weights16"))
        with self._guarded():
            self.launcher(self._unit, "k_narrow", "PqP", (ceiling(size, 8 * THREADS),), (THREADS,), *arguments)
            self.launcher.synchronise()

    def extra_state(self) -> dict[str, Array]:
        """What goes on besides weights and moments: the algorithms in use, and in fp16 the loss scale."""
        text = json.dumps({**self._place(), "products": self._choices}, sort_keys=True, separators=(",", ":"))
        extra: dict[str, Array] = {CHOICES: np.frombuffer(text.encode(), np.uint8)}
        if self.precision == "fp16":
            extra[SCALE] = np.array([self.scale], np.float32)
            extra[STREAK] = np.array([self.streak], np.int32)
        return extra

    def pin(self, state: Mapping[str, Array], *, elsewhere: bool = False) -> None:
        """Multiply with the algorithms that a bundle says, from now on. Raises StateMismatch as load_extra_state."""
        found = read_choices(state[CHOICES])
        products = found.pop("products")
        if found == self._place():
            if products != self.products.pinned:
                self.products.pin(products)
                self._record_anew()
        elif not elsewhere:
            raise StateMismatch(
                f"the bundle was made with {describe(found)}, this machine has {describe(self._place())}: the tier "
                "prod goes on only on the same. Resume there, or start anew here"
            )

    def _record_anew(self) -> None:
        """The recorded step has the algorithms of its time in it."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _place(self) -> dict[str, Any]:
        """What the bits of this tier depend on."""
        return {"card": self.card.name, "cublasLt": self.products.version, "attention": self.attention.name}

    def load_extra_state(self, state: Mapping[str, Array], *, elsewhere: bool) -> None:
        """Go on with what a bundle says; without anything, start anew. Raises StateMismatch where it was made with
        another card or other libraries, unless `elsewhere` says that its bits are not expected to be met."""
        if not state:
            self.scale, self.streak = np.float32(FIRST_SCALE if self.precision == "fp16" else 1.0), 0
            self._choices = {}
            self._record_anew()  # the first step notes the algorithms
            return
        self.pin(state, elsewhere=elsewhere)
        self._choices = dict(self.products.pinned)
        if self.precision == "fp16":
            self.scale = np.float32(state[SCALE][0])
            self.streak = int(state[STREAK][0])


def read_choices(array: Array) -> dict[str, Any]:
    """The content of CHOICES; raises StateMismatch if it is not what extra_state writes."""
    try:
        found = json.loads(array.tobytes().decode())
        if set(found) == {"card", "cublasLt", "attention", "products"} and isinstance(found["products"], dict):
            return dict(found)
    except ValueError:
        pass
    raise StateMismatch(f"{CHOICES} of the bundle is not a list of algorithms: the bundle is not of the tier prod")


def describe(place: Mapping[str, Any]) -> str:
    return f"{place['card']}, cuBLASLt {place['cublasLt']}, attention by {place['attention']}"


def widened(narrow: npt.NDArray[np.uint16], precision: Precision) -> npt.NDArray[np.float32]:
    """16-bit floats as fp32."""
    if precision == "fp16":
        return narrow.view(np.float16).astype(np.float32)
    return (narrow.astype(np.uint32) << 16).view(np.float32)
