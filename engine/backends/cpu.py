"""The CPU backend: runs a program in one NumPy arena. It is the normative form of the portable tier."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from engine.backends.base import Meanwhile, StepOutcome, nothing
from engine.digest import Sums
from engine.errors import StateMismatch
from engine.numerics.fixed_point import INFINITY_BITS, magnitude_bits
from engine.numerics.jit import kernel
from engine.numerics.sums import sum_integer
from engine.numerics.types import Array, Floats, Longs, Scalar, Words
from engine.operations.base import BufferType, Sizes
from engine.optimizer import (
    NORM_CHUNK,
    AdamWConstants,
    clip_factor,
    k_adamw,
    k_adamw_check,
    k_add_gradients,
    k_grad_norm_final,
    k_grad_norm_partial,
)
from engine.plan import Plan, gradient_name
from engine.program import Program, again_name
from engine.schedule import StepValues
from engine.spec import TrainSpec
from engine.threads import Task, ThreadTeam

LARGEST_LOSS = np.float32(2.0**20)  # nats per token; its integer form must fit beside 2**30
ADAMW_PIECE = 1 << 16  # elements of one task


@kernel
def k_loss_total(losses: Floats, flag: Longs, slot: int) -> Scalar:
    """Sum over tokens of rint(loss * 2**30), an integer; sets flag[slot] where a loss is not finite or above 2**20."""
    total = np.int64(0)
    for t in range(losses.size):
        if magnitude_bits(losses[t]) >= INFINITY_BITS or losses[t] > LARGEST_LOSS:
            flag[slot] = 1
        else:
            total += sum_integer(losses[t], np.float64(1073741824.0))
    return total


class Frame:
    """A program bound to sizes: what operations see while they run (operations.base.Execution)."""

    def __init__(self, backend: "CpuBackend", sizes: Sizes) -> None:
        self.team = backend.team
        self.tier = backend.plan.tier
        self.seed = backend.train.seed
        self.flags = backend.flags
        self.sizes = sizes
        self.training = False
        self.step = 0
        self.first_row = 0
        self.loss_scale = np.float32(1.0 / (backend.train.batch * backend.plan.sizes.context))
        self.set = 0
        self._backend = backend
        self._phase = "forward"
        tensors = backend.program.tensors
        again = {operation.name for step in backend.program.backward for operation in step.again}
        self._tensors = {
            name: backend.array(name, BufferType(type.at(sizes), type.dtype)) for name, type in tensors.items()
        }
        self._gradients = {
            name: backend.array(gradient_name(name), BufferType(type.at(sizes), type.dtype))
            for name, type in tensors.items()
            if gradient_name(name) in backend.plan.buffers
        }
        # What the backward half reads: recomputed tensors in their second version.
        self._seen_again = self._tensors | {
            name: backend.array(again_name(name), BufferType(tensors[name].at(sizes), tensors[name].dtype))
            for name in backend.program.recomputed
        }
        self._work = {
            f"{operation.name}/{phase}/{role}": backend.array(f"{operation.name}/{phase}/{role}", type)
            for operation in backend.program.operations
            for phase, work in (
                ("forward", operation.forward_work(sizes, self.tier)),
                ("again", operation.forward_work(sizes, self.tier) if operation.name in again else {}),
                ("backward", operation.backward_work(sizes, self.tier)),
            )
            for role, type in work.items()
        }
        self._accumulates = {
            (step.operation.name, role) for step in backend.program.backward for role in step.accumulates
        }

    def tensor(self, name: str) -> Array:
        return (self._tensors if self._phase == "forward" else self._seen_again)[name]

    def gradient(self, name: str) -> Array:
        return self._gradients[name]

    def parameter(self, name: str) -> Floats:
        return self._backend.parameters[name]

    def parameter_gradient(self, name: str) -> Floats:
        return self._backend.parameter_gradients[self.set][name]

    def derived(self, operation: str, role: str) -> Array:
        return self._backend.derived[f"{operation}/derived/{role}"]

    def work(self, operation: str, role: str) -> Array:
        return self._work[f"{operation}/{self._phase}/{role}"]

    def accumulates(self, operation: str, role: str) -> bool:
        return (operation, role) in self._accumulates

    def forward(self, after: Callable[[str], None] | None = None) -> None:
        """Run the forward half; `after` is called with each operation's name."""
        self._phase = "forward"
        for operation in self._backend.program.operations:
            operation.forward(self)
            if after is not None:
                after(operation.name)

    def backward(self, after: Callable[[str], None] | None = None) -> None:
        """Run the backward half; `after` is called with each operation's name."""
        for step in self._backend.program.backward:
            self._phase = "again"
            for operation in step.again:
                operation.forward(self)
            self._phase = "backward"
            step.operation.backward(self)
            if after is not None:
                after(step.operation.name)


class CpuBackend:
    """Executes a plan on the CPU. All arrays are views of one arena, allocated here and nowhere else."""

    def __init__(self, program: Program, plan: Plan, train: TrainSpec) -> None:
        self.program = program
        self.plan = plan
        self.train = train
        self.team = ThreadTeam(plan.sizes.threads)
        raw = np.empty(plan.arena_bytes + 64, np.uint8)
        self._arena = raw[-raw.ctypes.data % 64 :][: plan.arena_bytes]
        self.flags: Longs = np.zeros(len(program.operations), np.int64)
        self.flat = {name: self.array(name) for name in ("weights", "m", "v")}
        self.saved = {name: self.array(f"saved/{name}") for name in ("weights", "m", "v")}
        self.gradients = [self.array(f"gradients{i}") for i in range(plan.gradient_sets)]
        for array in (*self.flat.values(), *self.gradients):
            array[:] = 0
        self.parameters = self.views(self.flat["weights"])
        self.parameter_gradients = [self.views(g) for g in self.gradients]
        self.derived = {name: self.array(name) for name, b in plan.buffers.items() if b.category == "derived"}
        self._frames: dict[tuple[int, int], Frame] = {}
        self._constants = AdamWConstants.of(train)
        self._partial = np.zeros(-(-plan.flat_elements // NORM_CHUNK), np.float64)
        self._lanes = np.zeros((self.team.size, 32), np.float64)
        self._pieces = self._adamw_pieces()
        self._piece_sums: Sums = np.zeros((len(self._pieces), 3, 2), np.uint64)
        self._piece_flags: Longs = np.zeros(len(self._pieces), np.int64)
        self.sums: Sums = np.zeros((len(program.parameters), 3, 2), np.uint64)
        self._derived_are_stale = True

    def array(self, name: str, type: BufferType | None = None) -> Array:
        """The buffer `name` as an array of `type`, by default its planned one; at most that large."""
        buffer = self.plan.buffers[name]
        type = type or buffer.type
        if type.bytes > buffer.type.bytes:
            raise AssertionError(f"{name}: {type} does not fit the planned {buffer.type}")
        place = self._arena[buffer.offset : buffer.offset + type.bytes]
        return place.view(type.dtype).reshape(type.shape)

    def views(self, flat: Floats) -> dict[str, Floats]:
        """Each parameter's part of a flat array, in its shape."""
        return self.plan.views(self.program.parameters, flat)

    def frame(self, batch: int, context: int) -> Frame:
        """The program bound to `batch` rows (at most a shard's) of `context` tokens (at most the model's)."""
        key = (batch, context)
        if key not in self._frames:
            sizes = Sizes(batch=batch, context=context, threads=self.plan.sizes.threads)
            self._frames[key] = Frame(self, sizes)
        return self._frames[key]

    def weights_changed(self) -> None:
        """To be called when weights were written from outside."""
        self._derived_are_stale = True

    def prepare(self, frame: Frame) -> None:
        """Compute what operations derive from the weights, once after every change."""
        if self._derived_are_stale:
            for operation in self.program.operations:
                operation.prepare(frame)
            # What came from a NaN is garbage: whoever goes on regardless must meet the flag again.
            self._derived_are_stale = bool(self.flags.any())

    def run_shards(self, step: int, ids: Words, targets: Words) -> tuple[int, int]:
        """Gradients of a whole batch: (set that holds them, loss total in units of 2**-30 nats).

        Stops at a number that is not finite and leaves only the flag of the operation that met it first.
        """
        rows = self.plan.sizes.batch
        frame = self.frame(rows, ids.shape[1])
        self.prepare(frame)
        frame.training = True
        frame.step = step
        free = list(range(self.plan.gradient_sets))
        tree: list[tuple[int, int]] = []  # (level, set), as a binary counter
        total = 0
        for shard in range(self.train.shards):
            frame.first_row = shard * rows
            frame.set = free.pop()
            frame.tensor("ids")[:] = ids[shard * rows : (shard + 1) * rows]
            frame.tensor("targets")[:] = targets[shard * rows : (shard + 1) * rows]
            self.gradients[frame.set][:] = 0
            frame.forward()
            total += self._loss_total(frame)
            if self._stop_at_first(np.flatnonzero(self.flags)):
                break
            frame.backward()
            if self._stop_at_first(np.flatnonzero(self.flags)[::-1]):
                break
            level, current = 0, frame.set
            while tree and tree[-1][0] == level:
                current = self._join(tree.pop()[1], current, free)
                level += 1
            tree.append((level, current))
        frame.training = False
        if self.flags.any():
            return frame.set, total
        while len(tree) > 1:
            _, right = tree.pop()
            level, left = tree.pop()
            tree.append((level, self._join(left, right, free)))
        return tree[0][1], total

    def _stop_at_first(self, flagged: Longs) -> bool:
        """Whether any operation set its flag; of those, in order of time, only the first one's is left."""
        self.flags[flagged[1:]] = 0
        return len(flagged) > 0

    def _join(self, left: int, right: int, free: list[int]) -> int:
        a, b = self.gradients[left], self.gradients[right]
        self.team.run([(k_add_gradients, (a, b, i, j)) for i, j in self.team.ranges(a.size, 1024)])
        free.append(right)
        return left

    def _loss_total(self, frame: Frame) -> int:
        losses = frame.tensor(self.program.losses).reshape(-1)
        return int(k_loss_total(losses, self.flags, len(self.program.operations) - 1))

    def gradient_norm(self, set: int) -> float:
        g = self.gradients[set]
        self.team.run(
            [
                (k_grad_norm_partial, (g, a, b, self._partial, self._lanes[i]))
                for i, (a, b) in enumerate(self.team.ranges(self._partial.size))
            ]
        )
        return float(k_grad_norm_final(self._partial, self._lanes[0]))

    def train_step(
        self, step: int, ids: Words, targets: Words, values: StepValues, meanwhile: Meanwhile = nothing
    ) -> StepOutcome:
        """One optimizer step over a whole batch. There is no card to wait for, so `meanwhile` is not called."""
        gradients, total = self.run_shards(step, ids, targets)
        flagged = self.take_flag()
        norm = float("nan") if flagged is not None else self.gradient_norm(gradients)
        bad_gradients: list[str] = []
        bad_updates: list[str] = []
        if flagged is None and not np.isfinite(norm):
            views = self.parameter_gradients[gradients]
            bad_gradients = [name for name, g in views.items() if not np.isfinite(g).all()]
        elif flagged is None:
            bad_updates = self.update(gradients, norm, values)
        return StepOutcome(total, norm, flagged, bad_gradients, bad_updates)

    def take_flag(self) -> int | None:
        """The first operation that met a number that is not finite since the last call."""
        bad = np.flatnonzero(self.flags)
        self.flags[:] = 0
        return int(bad[0]) if len(bad) else None

    def update(self, set: int, norm: float, values: StepValues) -> list[str]:
        """One AdamW step; leaves each parameter's part of the step digest in `sums`.

        Returns the names of the parameters for which it would not be finite; then it has changed nothing.
        """
        clip = clip_factor(norm, self.train.clip_norm)
        rules = {decayed: self._constants.rule(clip, values, decayed) for decayed in (False, True)}
        checks: list[Task] = []
        tasks: list[Task] = []
        self._piece_flags[:] = 0
        for i, (number, start, size, first, last) in enumerate(self._pieces):
            decayed = self.program.parameters[number].kind in self.train.decayed
            arrays = [a[start : start + size] for a in (self.flat["weights"], self.gradients[set])]
            arrays += [self.flat[name][start : start + size] for name in ("m", "v")]
            common = (*arrays, first, last, rules[decayed])
            checks.append((k_adamw_check, (*common, self._piece_flags, i)))
            tasks.append((k_adamw, (*common, self._piece_sums[i])))
        self.team.run(checks)
        if self._piece_flags.any():
            bad = {self._pieces[i][0] for i in np.flatnonzero(self._piece_flags)}
            return [self.program.parameters[number].name for number in sorted(bad)]
        self.team.run(tasks)
        self.sums[:] = 0
        for i, (number, *_) in enumerate(self._pieces):
            self.sums[number] += self._piece_sums[i]
        self._derived_are_stale = True
        return []

    def _adamw_pieces(self) -> list[tuple[int, int, int, int, int]]:
        """(parameter number, its place, its size, first, last element) of every task."""
        return [
            (number, self.plan.places[p.name], size, first, min(first + ADAMW_PIECE, size))
            for number, p in enumerate(self.program.parameters)
            for size in [int(np.prod(p.shape))]
            for first in range(0, size, ADAMW_PIECE)
        ]

    def losses(self, ids: Words, targets: Words) -> int:
        """Total loss of some rows without dropout, in units of 2**-30 nats; at most a shard's rows."""
        frame = self.frame(*ids.shape)
        self.prepare(frame)
        frame.tensor("ids")[:] = ids
        frame.tensor("targets")[:] = targets
        frame.forward()
        return self._loss_total(frame)

    def logits(self, ids: Words) -> npt.NDArray[np.float32]:
        """Logits [B, T, V] of some rows without dropout: a view, overwritten by the next run."""
        frame = self.frame(*ids.shape)
        self.prepare(frame)
        frame.tensor("ids")[:] = ids
        frame.tensor("targets")[:] = 0
        frame.forward()
        return frame.tensor(self.program.logits)

    def current_state(self) -> dict[str, Floats]:
        """The flat arrays themselves; the next step overwrites them."""
        return self.flat

    def state_to_write(self) -> dict[str, Floats]:
        """Flat arrays to put a state into; then call state_written."""
        return self.flat

    def state_written(self) -> None:
        self.weights_changed()

    def extra_state(self) -> dict[str, Array]:
        """What goes on besides weights and moments: nothing."""
        return {}

    def load_extra_state(self, state: Mapping[str, Array], *, elsewhere: bool) -> None:
        """A run of the tier prod is only checked here, in other arithmetic: its algorithms and loss scale do not
        matter. Raises StateMismatch where its bits are expected."""
        if state and not elsewhere:
            raise StateMismatch("a run of the tier prod goes on on device cuda alone: set run.device to cuda")

    def pin(self, state: Mapping[str, Array]) -> None:
        """There is nothing to choose."""

    def copy_for_saving(self) -> dict[str, Floats]:
        """One copy of the state in buffers that the saver may read while training goes on."""
        for name, array in self.flat.items():
            np.copyto(self.saved[name], array)
        return self.saved

    def close(self) -> None:
        self.team.close()
