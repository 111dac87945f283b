"""What an operation's CUDA half sees while it runs: addresses by name, and a way to launch kernels."""

from typing import TYPE_CHECKING

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.sources import Unit
from engine.numerics.random import dropout_threshold
from engine.operations.base import Operation, Sizes
from engine.operations.dropout import keep_factor
from engine.plan import gradient_name
from engine.program import again_name

if TYPE_CHECKING:
    from engine.backends.cuda.backend import CudaBackend

MaskArguments = tuple[int, int, float]
MASK = "IIf"  # struct Mask: site, threshold, factor
NO_MASK: MaskArguments = (0, 0, 1.0)
OPTIMIZER = Unit("optimizer")
THREADS = 256


def ceiling(a: int, b: int) -> int:
    return -(-a // b)


def padded(size: int, multiple: int) -> int:
    return ceiling(size, multiple) * multiple


class Run:
    """A program bound to sizes on the card."""

    def __init__(self, backend: "CudaBackend", sizes: Sizes, shards: int) -> None:
        self.launch: Launcher = backend.launcher
        self.sizes = sizes
        self.tier = backend.plan.tier
        self.shards = shards
        self.tokens = sizes.batch * sizes.context
        self.shard_tokens = self.tokens // self.shards  # only in training
        self.training = False
        self.first_row = 0
        self.loss_scale = backend.loss_scale
        self.gradient_set = 0  # where gradients of parameters go
        self.adds = False  # whether they are added to what stands there
        self.values = backend.address("values")
        self._backend = backend
        self._phase = "forward"
        self._moved: dict[str, int] = {}
        self._recomputed = backend.program.recomputed
        self._accumulates = {
            (step.operation.name, role) for step in backend.program.backward for role in step.accumulates
        }

        lingers = [backend.layout.lingers(step) for step in backend.program.backward]
        # For each step, up to which earlier one storage of work beside may be used again.
        self._waits = [backend.layout.waits(step) for step in backend.program.backward]
        self._over = [max((s + 1 for s in range(n) if s + lingers[s] < n), default=0) for n in range(len(lingers))]

    def place(self, tensor: str, address: int | None) -> None:
        """Let a tensor stand elsewhere than planned; None puts it back."""
        if address is None:
            self._moved.pop(tensor, None)
        else:
            self._moved[tensor] = address

    def tensor(self, name: str) -> int:
        if self._phase != "forward" and name in self._recomputed:
            return self._backend.address(again_name(name))
        return self._moved[name] if name in self._moved else self._backend.address(name)

    @property
    def phase(self) -> str:
        """`forward`, `again` or `backward`."""
        return self._phase

    def has_gradient(self, name: str) -> bool:
        """Whether anything after a tensor gives it a gradient."""
        return gradient_name(name) in self._backend.plan.buffers

    def gradient(self, name: str) -> int:
        return self._backend.address(gradient_name(name))

    def parameter(self, name: str) -> int:
        return self._backend.address("weights") + 4 * self._backend.plan.places[name]

    def parameter_gradient(self, name: str) -> int:
        return self._backend.address(f"gradients{self.gradient_set}") + 4 * self._backend.plan.places[name]

    @property
    def token_gradients(self) -> int:
        """Gradients of a tied token embedding by shard: [shards, vocab, width], joined when the embedding's are in."""
        return self._backend.address("token_gradients")

    def derived(self, operation: Operation, role: str) -> int:
        return self._backend.address(f"{operation.name}/derived/{role}")

    def work(self, operation: Operation, role: str) -> int:
        return self._backend.address(f"{operation.name}/{self._phase}/{role}")

    def zeroed(self, operation: Operation, role: str) -> int:
        """A buffer that was filled with zeros before this group of shards."""
        return self._backend.address("zeros") + self._backend.layout.zero_places[f"{operation.name}/{role}"]

    def accumulates(self, operation: Operation, role: str) -> bool:
        return (operation.name, role) in self._accumulates

    def flag(self, operation: Operation) -> int:
        return self._backend.flag_address(operation.index, self._phase)

    def mask(self, probability: float, site: int) -> MaskArguments:
        probability = probability if self.training else 0.0
        return (site, int(dropout_threshold(probability)), float(keep_factor(probability)))

    def prepare(self) -> None:
        self._phase = "forward"
        self._backend.quantise_weights(self)
        for operation in self._backend.program.operations:
            self._backend.twin(operation).prepare(self, operation)

    def forward(self) -> None:
        self._phase = "forward"
        for operation in self._backend.program.operations:
            self._backend.twin(operation).forward(self, operation)

    def backward(self) -> None:
        for number, step in enumerate(self._backend.program.backward):
            twin = self._backend.twin(step.operation)
            self.launch.step = number
            # Storage that work beside uses is kept for so many steps.
            self.launch.join(None if self._waits[number] else self._over[number])
            if twin.joins_reads:
                self.launch.join_reads()
            self._phase = "again"
            for operation in step.again:
                self._backend.twin(operation).forward(self, operation)
            self._phase = "backward"
            twin.backward(self, step.operation)
        self.launch.join()


def join_shards(run: Run, partials: int, size: int, parameter: str) -> None:
    """A parameter's gradient is (or has added) the tree over its gradients by shard, fp32 [shards, size]."""
    run.launch(
        OPTIMIZER,
        "k_join_gradients",
        "PiqPi",
        (ceiling(size // 4 if size % 4 == 0 else size, THREADS),),
        (THREADS,),
        *(partials, run.shards, size, run.parameter_gradient(parameter), int(run.adds)),
    )
