"""The CUDA backend: runs a program in one arena on the card, with the CPU backend's bits."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.base import Meanwhile, StepOutcome, first_flagged, nothing
from engine.backends.cuda.card import Card
from engine.backends.cuda.elementwise import LOSS
from engine.backends.cuda.errors import DeviceLost
from engine.backends.cuda.graphs import Graph
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.layout import OUTCOME, PIECE, VALUES, CudaLayout
from engine.backends.cuda.quantising import quantise_weights, weight_table
from engine.backends.cuda.run import OPTIMIZER, THREADS, Run, ceiling
from engine.backends.cuda.twin import Twin
from engine.digest import Sums
from engine.errors import PlanRefused
from engine.numerics.random import split_seed
from engine.numerics.types import Array, Floats, Words
from engine.operations.base import Operation, Sizes
from engine.optimizer import AdamWConstants
from engine.plan import Plan
from engine.program import Program
from engine.schedule import StepValues
from engine.spec import TrainSpec

STATE = ("weights", "m", "v")
CONSTANTS = "fffff"  # struct Constants of the optimizer's kernels


class CudaBackend:
    """Executes a plan on one card. Everything lives in one allocation, made here and nowhere else."""

    def __init__(self, program: Program, plan: Plan, train: TrainSpec, layout: CudaLayout, card: Card) -> None:
        self.program = program
        self.plan = plan
        self.train = train
        self.layout = layout
        self.card = card
        self.launcher = Launcher(card)
        self.loss_scale = np.float32(1.0 / (train.batch * program.spec.context))
        for operation in program.operations:
            self.twin(operation).check(operation, card)
        self._runs: dict[tuple[int, int, int], Run] = {}
        with self._guarded():
            try:
                self._arena = card.driver.mem_alloc(plan.arena_bytes)
            except card.driver.MemoryError as error:
                raise PlanRefused(
                    f"the plan needs {plan.arena_bytes / 2**20:,.0f} MiB in one piece, {card.name} did not give it "
                    f"({card.free_memory() / 2**20:,.0f} MiB free)"
                ) from error
            self._base = int(self._arena)
            self._zero_state()
            self._host = self._host_buffers()
            self._upload_pieces()
            self._upload_weight_table()
        self.sums: Sums = np.zeros((len(program.parameters), 3, 2), np.uint64)
        self._constants = AdamWConstants.of(train)
        self._derived_are_stale = True
        self._graph: Graph | None = None
        self._result_set = 0

    # --- places ---------------------------------------------------------------------------------------------------

    def address(self, name: str) -> int:
        """Of a buffer of the plan, or of a part of one that is copied in one go."""
        for whole, (places, _) in self.layout.copied_places.items():
            if name in places:
                return self.address(whole) + places[name]
        return self._base + self.plan.buffers[name].offset

    def flag_address(self, operation: int, phase: str) -> int:
        """Flags stand by half, then by operation."""
        return self.address("flags") + 4 * (operation + (phase == "backward") * len(self.program.operations))

    def twin(self, operation: Operation) -> Twin[Operation]:
        return self.layout.twins[operation.name]

    def _zero_state(self) -> None:
        # Of gradients, what lies between parameters stays zero from here on.
        gradients = [f"gradients{i}" for i in range(self.plan.gradient_sets)]
        for name in (*STATE, *gradients, "results"):
            self.launcher.fill(self.address(name), 0, self.plan.buffers[name].type.bytes)

    def _host_buffers(self) -> dict[str, Array]:
        """Page-locked host memory, so that copies run beside kernels; made once."""
        copied = self.layout.copied_places
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            name: ((size,), np.uint8) for name, (_, size) in copied.items()
        }
        for name in STATE:
            shapes[name] = shapes[f"saved/{name}"] = ((self.plan.flat_elements,), np.float32)
        buffers: dict[str, Array] = {}
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            raw = self.card.driver.pagelocked_empty((size,), np.uint8)
            raw[:] = 0
            buffers[name] = raw.view(dtype).reshape(shape)
        records = {"values": VALUES, "outcome": OUTCOME}
        for whole, types in self.layout.copied.items():
            for name, type in types.items():
                place = copied[whole][0][name]
                part = buffers[whole][place : place + type.bytes]
                buffers[name] = (
                    part.view(records[name]) if name in records else part.view(type.dtype).reshape(type.shape)
                )
        buffers["values"]["key"] = split_seed(self.train.seed)
        return buffers

    def _upload_pieces(self) -> None:
        self._piece_count = len(self.layout.pieces())
        self.card.driver.memcpy_htod(self.address("pieces"), self._piece_rows(range(self._piece_count)))

    def _piece_rows(self, numbers: Iterable[int]) -> npt.NDArray[np.uint8]:
        """Some of the optimizer's pieces, as its kernels read them."""
        decayed = [p.kind in self.train.decayed for p in self.program.parameters]
        starts = [self.plan.places[p.name] for p in self.program.parameters]
        pieces = self.layout.pieces()
        rows = [(starts[n], n, int(decayed[n]), a, b) for n, a, b in (pieces[i] for i in numbers)]
        return np.array(rows, PIECE).view(np.uint8)

    def _upload_weight_table(self) -> None:
        """Once, in a run of any size: the weights are the same in all."""
        if self.layout.weights:
            self._weight_table = weight_table(self.run(1, 1), self.layout.weights)
            self.card.driver.memcpy_htod(self.address("weight_table"), self._weight_table.rows.view(np.uint8))

    def quantise_weights(self, run: Run) -> None:
        if self.layout.weights:
            quantise_weights(run, self._weight_table, self.address("weight_table"))

    def fill_zeros(self) -> None:
        """Queue the zeros that operations count on."""
        self.launcher.fill(self.address("zeros"), 0, self.layout.zero_bytes)

    def run(self, batch: int, context: int, shards: int | None = None) -> Run:
        """The program bound to `batch` rows of `context` tokens in `shards` shards, at most the planned ones."""
        shards = shards or self.layout.shards_at_once(self.train.shards)
        key = (batch, context, shards)
        if key not in self._runs:
            self._runs[key] = Run(self, Sizes(batch=batch, context=context, threads=1), shards)
        return self._runs[key]

    def _upload(self, name: str) -> None:
        self.card.driver.memcpy_htod_async(self.address(name), self._host[name].view(np.uint8), self.launcher.stream)

    def _download(self, name: str, to: str | None = None) -> None:
        target = self._host[to or name].view(np.uint8)
        self.card.driver.memcpy_dtoh_async(target, self.address(name), self.launcher.stream)

    # --- one training step ----------------------------------------------------------------------------------------

    def train_step(
        self, step: int, ids: Words, targets: Words, values: StepValues, meanwhile: Meanwhile = nothing
    ) -> StepOutcome:
        """One optimizer step over a whole batch: recorded as one graph the first time, replayed after that."""
        batch, host = self._host["batch"], self._host["values"]
        batch[0], batch[1] = ids, targets
        host["step"] = step
        host["rate"], host["decay"] = values.learning_rate, values.decay
        host["correction"] = (values.correction1, values.correction2)
        with self._guarded():
            if self._graph is None:
                self._queue_step()  # compiles and loads every kernel, and is the first step itself
                self.launcher.synchronise()
                self._graph = Graph(self.launcher.stream, self._queue_step)
            else:
                self._graph.launch()
                try:
                    meanwhile()
                finally:
                    self.launcher.synchronise()  # the card reads what the next step is told with
        return self._outcome()

    def _outcome(self) -> StepOutcome:
        outcome = self._host["outcome"][0]
        flagged = self._first_flag()
        if flagged is not None:
            flagged = self._named_as_on_the_cpu(flagged)
        self.sums[:] = self._host["sums"]
        norm = float(outcome["norm"])
        bad_gradients: list[str] = []
        bad_updates: list[str] = []
        if flagged is None and not isfinite(norm):
            bad_gradients = self._bad_gradients()
        elif flagged is None and np.count_nonzero(self._host["bad"]):
            bad_updates = [self.program.parameters[i].name for i in np.flatnonzero(self._host["bad"])]
        self._derived_are_stale = True
        return StepOutcome(int(outcome["loss_total"]), norm, flagged, bad_gradients, bad_updates)

    def _first_flag(self) -> int | None:
        flags = self._host["flags"]
        return first_flagged(*flags) if np.count_nonzero(flags) else None

    def _named_as_on_the_cpu(self, flagged: int) -> int:
        """The operation that met the last step's number that is not finite first, if shards go one after another.

        Weights are as before that step, and its tokens and numbers are still on the card.
        """
        if self.layout.shards_at_once(self.train.shards) == 1:
            return flagged
        rows = self.train.batch // self.train.shards
        run = self.run(rows, self.program.spec.context, 1)
        with self._guarded(), self._training(run):
            self.take_flag()
            self.fill_zeros()
            run.prepare()
            for shard in range(self.train.shards):
                self._place_rows(run, shard * rows)
                self.fill_zeros()
                self._forward_half(run)
                first = self.take_flag()
                if first is None:
                    run.backward()
                    first = self.take_flag()
                if first is not None:
                    return first
        raise AssertionError("a step was flagged, but none of its shards is")

    def _bad_gradients(self) -> list[str]:
        flat = np.empty(self.plan.flat_elements, np.float32)
        with self._guarded():
            self.card.driver.memcpy_dtoh(flat, self.address(f"gradients{self._result_set}"))
        return [name for name, g in self.views(flat).items() if not np.isfinite(g).all()]

    def _queue_step(self) -> None:
        """Everything from token numbers to new weights; the host waits for nothing in between."""
        launch = self.launcher
        run = self.run(self.plan.sizes.batch, self.program.spec.context)
        self._upload("inputs")
        launch.fill(self.address("results"), 0, self.plan.buffers["results"].type.bytes)
        self.fill_zeros()
        run.prepare()
        self._result_set = self._queue_gradients(run)
        self._queue_update(self.address(f"gradients{self._result_set}"))
        self._download("results")

    def _queue_gradients(self, run: Run) -> int:
        """Gradients of the whole batch, group after group of shards; returns the set that holds them."""
        rows = run.sizes.batch
        free = list(range(self.plan.gradient_sets))
        tree: list[tuple[int, int]] = []  # (level, set), as a binary counter over groups
        with self._training(run):
            for group in range(self.train.shards // run.shards):
                self._place_rows(run, group * rows)
                if group > 0:
                    self.fill_zeros()
                # The group's own tree goes straight to the set that it joins or founds.
                run.adds = bool(tree) and tree[-1][0] == 0
                run.gradient_set = current = tree.pop()[1] if run.adds else free.pop()
                level = int(run.adds)
                self._forward_half(run)
                run.backward()
                while tree and tree[-1][0] == level:
                    left = tree.pop()[1]
                    self._add_gradients(current, left)
                    free.append(current)
                    current, level = left, level + 1
                tree.append((level, current))
        while len(tree) > 1:
            _, right = tree.pop()
            level, left = tree.pop()
            self._add_gradients(right, left)
            tree.append((level, left))
        return tree[0][1]

    @contextmanager
    def _training(self, run: Run) -> Iterator[None]:
        run.training = True
        try:
            yield
        finally:
            run.training = run.adds = False
            run.first_row = run.gradient_set = 0
            run.place("ids", None)
            run.place("targets", None)

    def _place_rows(self, run: Run, first_row: int) -> None:
        """Let a run take its rows of the batch from `first_row` on."""
        run.first_row = first_row
        offset = 4 * first_row * self.program.spec.context
        run.place("ids", self.address("batch") + offset)
        run.place("targets", self.address("batch") + self._host["batch"].nbytes // 2 + offset)

    def _forward_half(self, run: Run) -> None:
        run.forward()
        self._queue_loss_total(run)

    def _add_gradients(self, right: int, left: int) -> None:
        """Add one set of gradients to another."""
        size = self.plan.flat_elements  # a multiple of 16
        self.launcher(
            OPTIMIZER,
            "k_join_gradients",
            "PiqPi",
            (ceiling(size // 4, THREADS),),
            (THREADS,),
            *(self.address(f"gradients{right}"), 1, size, self.address(f"gradients{left}"), 1),
        )

    def _queue_loss_total(self, run: Run) -> None:
        losses, flag = run.tensor(self.program.losses), self.flag_address(len(self.program.operations) - 1, "forward")
        total = self.address("outcome") + OUTCOME.fields["loss_total"][1]  # type: ignore[index]
        grid = (min(ceiling(run.tokens, THREADS), 4 * self.card.processors),)
        self.launcher(LOSS, "k_loss_total", "PiPP", grid, (THREADS,), losses, run.tokens, total, flag)

    def _queue_update(self, gradient: int) -> None:
        launch, chunks = self.launcher, self.plan.buffers["partial"].type.shape[0]
        partial, outcome = self.address("partial"), self.address("outcome")
        launch(
            OPTIMIZER,
            "k_grad_norm_partial",
            "PqiP",
            (ceiling(chunks, THREADS // 32),),
            (THREADS,),
            *(gradient, self.plan.flat_elements, chunks, partial),
        )
        operations = 2 * len(self.program.operations)
        arguments = (partial, chunks, float(self.train.clip_norm), self.address("flags"), operations, outcome)
        launch(OPTIMIZER, "k_grad_norm_final", "PidPiP", (1,), (32,), *arguments)
        k = self._constants
        numbers = (float(x) for x in (k.beta1, k.rest1, k.beta2, k.rest2, k.epsilon))
        weights, m, v = (self.address(name) for name in STATE)
        common = (self.address("pieces"), weights, gradient, m, v, *numbers, self.address("values"), outcome)
        form, grid = f"PPPPP{CONSTANTS}PPP", (self._piece_count,)
        launch(OPTIMIZER, "k_adamw_check", form, grid, (THREADS,), *common, self.address("bad"))
        launch(OPTIMIZER, "k_adamw", form, grid, (THREADS,), *common, self.address("sums"))

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _forward(self, ids: Words, targets: Words | None) -> Run:
        run = self.run(*ids.shape)
        launch, size = self.launcher, 4 * ids.size
        self.fill_zeros()
        if self._derived_are_stale:
            run.prepare()
            self._derived_are_stale = False
        launch.synchronise()
        self.card.driver.memcpy_htod(run.tensor("ids"), np.ascontiguousarray(ids))
        if targets is None:
            launch.fill(run.tensor("targets"), 0, size)
        else:
            self.card.driver.memcpy_htod(run.tensor("targets"), np.ascontiguousarray(targets))
        run.forward()
        return run

    def losses(self, ids: Words, targets: Words) -> int:
        """Total loss of some rows without dropout, in units of 2**-30 nats; at most the planned rows."""
        with self._guarded():
            self.launcher.fill(self.address("outcome"), 0, OUTCOME.itemsize)
            self._queue_loss_total(self._forward(ids, targets))
            self._download("outcome")
            self.launcher.synchronise()
        return int(self._host["outcome"][0]["loss_total"])

    def logits(self, ids: Words) -> npt.NDArray[np.float32]:
        """Logits [B, T, V] of some rows without dropout."""
        logits = np.empty((*ids.shape, self.program.spec.vocab), np.float32)
        with self._guarded():
            run = self._forward(ids, None)
            self.launcher.synchronise()
            self.card.driver.memcpy_dtoh(logits, run.tensor(self.program.logits))
        return logits

    def take_flag(self) -> int | None:
        """The first operation that met a number that is not finite since the last call or step."""
        with self._guarded():
            self._download("flags")
            self.launcher.fill(self.address("flags"), 0, self._host["flags"].nbytes)
            self.launcher.synchronise()
        return self._first_flag()

    # --- state ------------------------------------------------------------------------------------------------------

    def current_state(self) -> dict[str, Floats]:
        """A copy of the flat arrays in host memory; the next call overwrites it."""
        return self._copy_out("")

    def copy_for_saving(self) -> dict[str, Floats]:
        """The same in buffers that the saver may read while training goes on."""
        return self._copy_out("saved/")

    def _copy_out(self, prefix: str) -> dict[str, Floats]:
        with self._guarded():
            for name in STATE:
                self._download(name, prefix + name)
            self.launcher.synchronise()
        return {name: self._host[prefix + name] for name in STATE}

    def state_to_write(self) -> dict[str, Floats]:
        """Flat arrays in host memory to put a whole state into; then call state_written."""
        return {name: self._host[name] for name in STATE}

    def extra_state(self) -> dict[str, Array]:
        """What goes on besides weights and moments: nothing."""
        return {}

    def load_extra_state(self, state: Mapping[str, Array], *, elsewhere: bool) -> None:
        """Nothing goes on besides weights and moments."""

    def pin(self, state: Mapping[str, Array]) -> None:
        """There is nothing to choose."""

    def state_written(self) -> None:
        with self._guarded():
            for name in STATE:
                self._upload(name)
            self.launcher.synchronise()
        self._derived_are_stale = True

    def views(self, flat: Floats) -> dict[str, Floats]:
        """Each parameter's part of a flat array, in its shape."""
        return self.plan.views(self.program.parameters, flat)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A driver error during a run becomes one clear line."""
        try:
            yield
        except self.card.driver.Error as error:
            raise DeviceLost(
                f"{self.card.name} failed: {error}. What was saved before is whole; resume from the last bundle"
            ) from error

    def close(self) -> None:
        """Give everything back, from the thread that the card's context belongs to: garbage may be collected in any.
        A card that was lost has nothing to give, and what failed is said already."""
        with suppress(DeviceLost), self._guarded():
            if self._graph is not None:
                self._graph.close()
                self._graph = None
            self._arena.free()
            self._host.clear()
            self.launcher.close()
