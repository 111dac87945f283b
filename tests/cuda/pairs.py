"""One program on both backends, one operation at a time, with inputs of the test's choice."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.backends.cpu import CpuBackend
from engine.backends.cuda.backend import CudaBackend
from engine.backends.cuda.card import Card
from engine.backends.cuda.neighbours import fuse, no_fusion
from engine.backends.cuda.opening import cuda_plan
from engine.numerics.types import Array
from engine.operations.base import Operation
from engine.plan import make_plan
from engine.program import build_program
from engine.spec import ModelSpec, TrainSpec

MODEL = {
    "vocab": 37, "context": 11, "d_model": 12, "heads": 3, "layers": 1, "hidden": 20, "activation": "gelu",
    "dropout": 0.1, "linear_bias": True, "norm_parameters": True, "tied": True, "init_std": 0.5, "attention": "tiled",
}  # fmt: skip
TRAIN = {
    "steps": 1000, "batch": 4, "shards": 2, "seed": 1, "learning_rate": 0.01, "final_learning_rate": 0.001,
    "warmup_steps": 1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "decayed": ["matrix"],
    "clip_norm": 1.0,
}  # fmt: skip


def model(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(MODEL | changes)


def train(**changes: object) -> TrainSpec:
    return TrainSpec.model_validate(TRAIN | changes)


# --- values ---------------------------------------------------------------------------------------------------------


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def wide(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Exponents over a large part of fp32's range."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-90, 20, shape))
    return x.astype(np.float32)


def tiny(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Subnormal numbers and the smallest normal ones."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-150, -124, shape)).astype(np.float32)


def sparse(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Mostly zeros of both signs, whole rows among them."""
    x = normal(rng, shape)
    x[rng.random(shape) < 0.7] = 0.0
    x[rng.random(shape) < 0.1] = -0.0
    x[rng.random(shape[:-1]) < 0.3] = 0.0
    return x


def ties(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Integers and halves around the largest integer of a row, so that rounding meets ties."""
    x = rng.integers(-65280, 65280, shape).astype(np.float32) / 2
    x[..., 0] = np.float32(32639.5)
    return x


def large(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(30, 60, shape)).astype(np.float32)


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    f.__name__: f for f in (normal, wide, tiny, sparse, ties, large)
}


def canonical(x: Array) -> Array:
    """A NaN's sign and payload differ between processors; sums of infinities can make one before it is flagged."""
    x = np.array(x, order="C")
    if x.dtype == np.float32:
        x[np.isnan(x)] = np.nan
    return x


# --- one operation ----------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """Where the two backends first disagree about an array."""

    what: str
    count: int
    size: int
    index: tuple[int, ...]
    cpu: str
    cuda: str


@dataclass
class Pair:
    """The same model on both backends with one shard, so that both hold the same rows."""

    model: ModelSpec
    train: TrainSpec
    card: Card
    fused: bool = False  # whether neighbouring operations share kernels on the card
    differences: list[Difference] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.train = self.train.model_copy(update={"shards": 1})
        program = build_program(self.model)
        self.cpu = CpuBackend(program, make_plan(program, self.train, "portable", 2), self.train)
        program, plan, layout = cuda_plan(program, self.train, "portable", self.fused)
        self.program = program
        self.fusion = fuse(program) if self.fused else no_fusion()
        branches = {
            o.inputs["branch"] for o in program.operations if o.kind == "residual_add" and self.shared_with_linear(o)
        }
        self.absent = self.fusion.plane_tensors().keys() | branches  # tensors that are not there on the card as such
        logits = {program.logits} if self.shared_with_linear(program.operations[-1]) else set()
        self.absent_gradients = branches | logits
        self.cuda = CudaBackend(program, plan, self.train, layout, self.card)
        rows, context = self.train.batch, self.model.context
        self.frame, self.run = self.cpu.frame(rows, context), self.cuda.run(rows, context)
        self.flags: dict[str, tuple[bool, bool]] = {}

    def shared_with_linear(self, operation: Operation) -> bool:
        """Whether the linear layer before does some of the operation's work."""
        return operation.name in self.fusion.gives_output

    def gets_gradient(self, operation: Operation) -> bool:
        """Whether a linear layer's dy comes from the operation after it in a form of its own."""
        return operation.name in self.fusion.of and self.fusion.of[operation.name].after is not None

    def close(self) -> None:
        self.cpu.close()
        self.cuda.close()

    def read(self, address: int, like: Array) -> Array:
        self.cuda.launcher.synchronise()
        out = np.empty(like.shape, like.dtype)
        self.card.driver.memcpy_dtoh(out, address)
        return out

    def write(self, address: int, array: Array) -> None:
        self.card.driver.memcpy_htod(address, np.ascontiguousarray(array))

    def set_tensor(self, name: str, values: Array) -> None:
        self.frame.tensor(name)[...] = values
        self.write(self.run.tensor(name), values)

    def set_gradient(self, name: str, values: Array) -> None:
        self.frame.gradient(name)[...] = values
        self.write(self.run.gradient(name), values)

    def set_parameters(self, values: Callable[[tuple[int, ...]], Array]) -> None:
        for parameter in self.program.parameters:
            x = values(parameter.shape)
            self.cpu.parameters[parameter.name][...] = x
            self.write(self.run.parameter(parameter.name), x)

    def start_step(self, step: int, *, training: bool) -> None:
        """Zero gradients, the step number, and what is derived from the parameters."""
        for gradients in self.cpu.gradients:
            gradients[:] = 0
        launch = self.cuda.launcher
        for number in range(self.cuda.plan.gradient_sets):
            launch.fill(self.cuda.address(f"gradients{number}"), 0, self.cuda.plan.flat_elements * 4)
        self.frame.step, self.frame.training, self.run.training = step, training, training
        values = self.cuda._host["values"]
        values["key"] = (self.train.seed & 0xFFFFFFFF, self.train.seed >> 32)
        values["step"] = step
        self.cuda._upload("values")
        for operation in self.program.operations:
            operation.prepare(self.frame)
        self.cuda.fill_zeros()
        self.run.prepare()
        launch.synchronise()

    def compare(self, what: str, cpu: Array, address: int) -> None:
        cuda = self.read(address, cpu)
        a, b = (canonical(x).reshape(-1).view(f"u{x.dtype.itemsize}") for x in (cpu, cuda))
        bad = np.flatnonzero(a != b)
        if len(bad):
            index = tuple(int(i) for i in np.unravel_index(bad[0], cpu.shape))
            first = bad[0]
            self.differences.append(Difference(what, len(bad), len(a), index, f"{a[first]:#010x}", f"{b[first]:#010x}"))

    def flagged(self) -> tuple[bool, bool]:
        """Whether the CPU and the card met a number that is not finite; forgets it."""
        return self.cpu.take_flag() is not None, self.cuda.take_flag() is not None

    def _compare_all(self, what: str, arrays: dict[str, tuple[Array, int]]) -> None:
        on_cpu, on_card = self.flagged()
        self.flags[what] = (on_cpu, on_card)
        if on_cpu != on_card:
            self.differences.append(Difference(f"{what} flag", 1, 1, (), str(on_cpu), str(on_card)))
        if not on_cpu:
            for name, (array, address) in arrays.items():
                self.compare(f"{what} {name}", array, address)

    def forward(self, operation: Operation) -> None:
        self.frame._phase = self.run._phase = "forward"
        operation.forward(self.frame)
        self.cuda.twin(operation).forward(self.run, operation)
        outputs = [name for name in operation.outputs.values() if name not in self.absent]
        self._compare_all(f"{operation.name} forward", {n: (self.frame.tensor(n), self.run.tensor(n)) for n in outputs})

    def backward(self, operation: Operation) -> None:
        self.frame._phase = self.run._phase = "backward"
        operation.backward(self.frame)
        self.cuda.twin(operation).backward(self.run, operation)
        arrays = {
            f"d({name})": (self.frame.gradient(name), self.run.gradient(name))
            for role, name in operation.inputs.items()
            if role not in operation.constant and name not in self.absent_gradients
        }
        for name in operation.parameters.values():
            if operation.kind == "embed" or name != "embed.token":  # else it is not joined yet
                arrays[f"d({name})"] = (self.frame.parameter_gradient(name), self.run.parameter_gradient(name))
        self._compare_all(f"{operation.name} backward", arrays)


def report(differences: list[Difference]) -> str:
    return "\n".join(
        f"{d.what}: {d.count} of {d.size} differ, first at {d.index}: cpu {d.cpu} cuda {d.cuda}" for d in differences
    )
