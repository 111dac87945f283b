"""A whole training step from the second implementations of tests/engine/exact.py, operation by operation."""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.program import Program, build_program
from engine.schedule import step_values
from engine.spec import ModelSpec, TrainSpec
from tests.engine import exact
from tests.engine.exact import Floats

Array = npt.NDArray[Any]
Named = dict[str, Any]


class ShardRun:
    """Forward and backward of one shard; `tensors` and `gradients` by name."""

    def __init__(self, program: Program, parameters: Named, train: TrainSpec, step: int, first_row: int) -> None:
        self.program = program
        self.parameters = parameters
        self.train = train
        self.step = step
        self.first_row = first_row
        self.tensors: Named = {}
        self.gradients: Named = {}
        self.parameter_gradients: Named = {}

    def mask(self, operation: Any, shape: tuple[int, ...]) -> Any:
        first = self.first_row * int(np.prod(shape[1:]))
        seed, site = self.train.seed, operation.site
        return exact.mask32(seed, self.step, site, shape, operation.probability, first=first)

    def own(self, operation: Any) -> dict[str, Floats]:
        return {role: self.parameters[name] for role, name in operation.parameters.items()}

    def forward(self, ids: Array, targets: Array) -> None:
        self.tensors = {"ids": ids, "targets": targets}
        for operation in self.program.operations:
            x = [self.tensors[name] for name in operation.inputs.values()]
            results = getattr(self, f"{operation.kind}_forward")(operation, self.own(operation), *x)
            for name, result in zip(operation.outputs.values(), results, strict=False):
                self.tensors[name] = result

    def backward(self) -> None:
        for entry in self.program.backward:
            operation = entry.operation
            results, of_parameters = getattr(self, f"{operation.kind}_backward")(operation, self.own(operation))
            for role, gradient in results.items():
                name = operation.inputs[role]
                if role in entry.accumulates:
                    gradient = self.gradients[name] + gradient
                self.gradients[name] = gradient
            for role, gradient in of_parameters.items():
                name = operation.parameters[role]
                zero = np.zeros_like(gradient)
                self.parameter_gradients[name] = self.parameter_gradients.get(name, zero) + gradient

    def dy(self, operation: Any) -> Floats:
        gradient: Floats = self.gradients[operation.outputs["y"]]
        return gradient

    def x(self, operation: Any) -> Floats:
        tensor: Floats = self.tensors[operation.inputs["x"]]
        return tensor

    def embed_forward(self, op: Any, own: Named, ids: Array) -> Any:
        y = own["token"][ids] + own["position"][: ids.shape[1]]
        return (exact.dropped(y, self.mask(op, y.shape)),)

    def embed_backward(self, op: Any, own: Named) -> Any:
        dy = self.dy(op)
        dy = exact.dropped(dy, self.mask(op, dy.shape))
        parts = exact.embed_backward(self.tensors["ids"], dy, len(own["token"]), len(own["position"]))
        return {}, {"token": parts[0], "position": parts[1]}

    def linear_forward(self, op: Any, own: Named, x: Floats) -> Any:
        return (exact.linear_forward(x, own["weight"], own.get("bias")),)

    def linear_backward(self, op: Any, own: Named) -> Any:
        dx, dw, db = exact.linear_backward(self.x(op), own["weight"], self.dy(op))
        return {"x": dx}, {"weight": dw} | ({"bias": db} if "bias" in own else {})

    def layernorm_forward(self, op: Any, own: Named, x: Floats) -> Any:
        return exact.layernorm_forward(x, own.get("gain"), own.get("bias"))

    def layernorm_backward(self, op: Any, own: Named) -> Any:
        mean, rstd = (self.tensors[op.outputs[r]] for r in ("mean", "rstd"))
        dx, dgain, dbias = exact.layernorm_backward(self.x(op), own.get("gain"), mean, rstd, self.dy(op))
        return {"x": dx}, ({"gain": dgain, "bias": dbias} if own else {})

    def activation_forward(self, op: Any, own: Named, x: Floats) -> Any:
        return (exact.activation_forward(x, op.function),)

    def activation_backward(self, op: Any, own: Named) -> Any:
        return {"x": exact.activation_backward(self.x(op), op.function, self.dy(op))}, {}

    def residual_add_forward(self, op: Any, own: Named, x: Floats, branch: Floats) -> Any:
        return (x + exact.dropped(branch, self.mask(op, x.shape)),)

    def residual_add_backward(self, op: Any, own: Named) -> Any:
        dy = self.dy(op)
        return {"x": dy, "branch": exact.dropped(dy, self.mask(op, dy.shape))}, {}

    def attention_forward(self, op: Any, own: Named, qkv: Floats) -> Any:
        b, t, _ = qkv.shape
        kept = exact.attention_forward(qkv, op.heads, self.mask(op, (b, op.heads, t, t)))
        self.tensors[f"{op.name} kept"] = kept
        return kept[:3]

    def attention_backward(self, op: Any, own: Named) -> Any:
        qkv = self.tensors[op.inputs["qkv"]]
        b, t, _ = qkv.shape
        keep, kept = self.mask(op, (b, op.heads, t, t)), self.tensors[f"{op.name} kept"]
        return {"qkv": exact.attention_backward(qkv, op.heads, keep, kept, self.dy(op))}, {}

    def loss_forward(self, op: Any, own: Named, logits: Floats, targets: Array) -> Any:
        return exact.loss_forward(logits, targets)

    def loss_backward(self, op: Any, own: Named) -> Any:
        logits, targets = (self.tensors[op.inputs[r]] for r in ("logits", "targets"))
        m, total = (self.tensors[op.outputs[r]] for r in ("maxima", "sums"))
        scale = np.float32(1.0 / (self.train.batch * targets.shape[1]))
        return {"logits": exact.loss_backward(logits, targets, m, total, scale)}, {}

    def loss_total(self) -> int:
        """Sum of rint(loss * 2**30)."""
        losses = self.tensors[self.program.losses].astype(np.float64)
        return sum(map(int, np.rint(losses * 2.0**30).reshape(-1)))


def tree_sum(parts: list[Named]) -> Named:
    """Over shards: the greatest power of two of them to the left, the rest to the right."""
    if len(parts) == 1:
        return parts[0]
    half = 1
    while 2 * half < len(parts):
        half *= 2
    left, right = tree_sum(parts[:half]), tree_sum(parts[half:])
    return {name: left[name] + right[name] for name in left}


class ExactTraining:
    """Starts from given weights and zero moments."""

    def __init__(self, model: ModelSpec, train: TrainSpec, weights: dict[str, Floats]) -> None:
        self.program = build_program(model)
        self.train = train
        self.weights: Named = {name: w.copy() for name, w in weights.items()}
        self.m: Named = {name: np.zeros_like(w) for name, w in weights.items()}
        self.v: Named = {name: np.zeros_like(w) for name, w in weights.items()}
        self.step = 0

    def gradients(self, ids: Array, targets: Array) -> tuple[Named, int]:
        rows = self.train.batch // self.train.shards
        parts, total = [], 0
        for first in range(0, self.train.batch, rows):
            run = ShardRun(self.program, self.weights, self.train, self.step, first)
            run.forward(ids[first : first + rows], targets[first : first + rows])
            run.backward()
            parts.append(run.parameter_gradients)
            total += run.loss_total()
        return tree_sum(parts), total

    def train_step(self, ids: Array, targets: Array) -> tuple[np.float32, bytes]:
        """Loss and step digest."""
        gradients, total = self.gradients(ids, targets)
        flat = [np.pad(g.reshape(-1), (0, -g.size % 16)) for g in (gradients[n] for n in self.weights)]
        norm = exact.gradient_norm(np.concatenate(flat))
        limit = self.train.clip_norm
        clip = np.float32(1 if limit == 0 or norm <= limit else limit / norm)
        values = step_values(self.train, self.step)
        for parameter in self.program.parameters:
            name = parameter.name
            decayed = parameter.kind in self.train.decayed
            self.weights[name], self.m[name], self.v[name] = exact.adamw(
                self.weights[name],
                gradients[name],
                self.m[name],
                self.v[name],
                clip,
                self.train.beta1,
                self.train.beta2,
                values.correction1,
                values.correction2,
                self.train.epsilon,
                values.learning_rate,
                values.decay if decayed else np.float32(1),
            )
        self.step += 1
        loss = np.float32(total * 2.0**-30 / ids.size)
        state = [(self.weights[n], self.m[n], self.v[n]) for n in self.weights]
        return loss, exact.digest(self.step, loss, state)
