"""From a model spec to a program: a list of operations over named, shaped tensors, and its backward half.

The backward half is derived: the operations in reverse, each by its twin. The first to reach a tensor's gradient
writes it, later ones add to it. Blocks may be recomputed: then only their input is kept from the forward half, and
their operations run forward again right before their backward half. That costs time and no bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from engine.errors import SpecError
from engine.operations.activation import Activation
from engine.operations.attention import Attention
from engine.operations.base import Operation, TensorType
from engine.operations.embed import Embed
from engine.operations.layernorm import LayerNorm
from engine.operations.linear import Linear
from engine.operations.loss import Loss
from engine.operations.residual_add import ResidualAdd
from engine.spec import ModelSpec, ParameterKind


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A trained tensor: its shape, what kind it is (weight decay asks), and how it starts."""

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    start: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class BackwardStep:
    """One operation's backward; `accumulates` lists the input roles whose gradient it adds to.

    `again` lists operations that run forward once more before it, into tensors of their own (again_name).
    """

    operation: Operation
    accumulates: frozenset[str]
    again: tuple[Operation, ...] = ()

    def kept_tensors(self) -> list[str]:
        """Inputs and outputs of the operation that its backward reads again."""
        operation = self.operation
        tensors = [*operation.inputs.items(), *operation.outputs.items()]
        return [name for role, name in tensors if role in operation.kept]


@dataclass(frozen=True)
class Program:
    """Operations in order, the types of all tensors, and the parameters in order."""

    operations: tuple[Operation, ...]
    backward: tuple[BackwardStep, ...]
    tensors: Mapping[str, TensorType]
    parameters: tuple[Parameter, ...]
    spec: ModelSpec

    @property
    def recomputed(self) -> frozenset[str]:
        """Tensors that are computed twice; the backward half reads them under their again_name."""
        return frozenset(
            name for step in self.backward for operation in step.again for name in operation.outputs.values()
        )

    @property
    def losses(self) -> str:
        return self.operations[-1].outputs["losses"]

    @property
    def logits(self) -> str:
        return self.operations[-1].inputs["logits"]


class _Builder:
    """Collects operations and parameters, and infers tensor types as it goes."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.operations: list[Operation] = []
        self.parameters: dict[str, Parameter] = {}
        self.tensors: dict[str, TensorType] = {
            "ids": TensorType(("B", "T"), "int32"),
            "targets": TensorType(("B", "T"), "int32"),
        }
        self.sites = 0

    def add(self, operation: Operation) -> None:
        types = {role: self.tensors[name] for role, name in operation.inputs.items()}
        inferred = operation.infer(types)
        for role, name in operation.outputs.items():
            self.tensors[name] = inferred[role]
        self.operations.append(operation)

    def parameter(self, name: str, shape: tuple[int, ...], kind: ParameterKind, start: str, std: float = 0.0) -> str:
        if start not in ("normal", "zeros", "ones"):
            raise AssertionError(start)
        self.parameters[name] = Parameter(name=name, shape=shape, kind=kind, start=start, std=std)  # type: ignore[arg-type]
        return name

    def next_site(self) -> int:
        self.sites += 1
        return self.sites - 1

    def norm(self, name: str, x: str) -> str:
        d = self.spec.d_model
        parameters = {}
        if self.spec.norm_parameters:
            parameters = {
                "gain": self.parameter(f"{name}.gain", (d,), "norm", "ones"),
                "bias": self.parameter(f"{name}.bias", (d,), "norm", "zeros"),
            }
        self.add(
            LayerNorm(
                name=name,
                index=len(self.operations),
                inputs={"x": x},
                outputs={"y": f"{name}.y", "mean": f"{name}.mean", "rstd": f"{name}.rstd"},
                parameters=parameters,
                width=d,
            )
        )
        return f"{name}.y"

    def linear(self, name: str, role: str, x: str, deep: int, wide: int, std: float) -> str:
        parameters = {"weight": self.parameter(f"{name}.weight", (wide, deep), "matrix", "normal", std)}
        if self.spec.linear_bias:
            parameters["bias"] = self.parameter(f"{name}.bias", (wide,), "bias", "zeros")
        return self._linear(name, role, x, deep, wide, parameters)

    def _linear(self, name: str, role: str, x: str, deep: int, wide: int, parameters: dict[str, str]) -> str:
        self.add(
            Linear(
                name=name,
                index=len(self.operations),
                inputs={"x": x},
                outputs={"y": f"{name}.y"},
                parameters=parameters,
                role=role,
                wide=wide,
                deep=deep,
            )
        )
        return f"{name}.y"

    def residual(self, name: str, x: str, branch: str) -> str:
        self.add(
            ResidualAdd(
                name=name,
                index=len(self.operations),
                inputs={"x": x, "branch": branch},
                outputs={"y": f"{name}.y"},
                probability=self.spec.dropout,
                site=self.next_site(),
            )
        )
        return f"{name}.y"

    def embed(self) -> str:
        spec = self.spec
        parameters = {
            "token": self.parameter("embed.token", (spec.vocab, spec.d_model), "embedding", "normal", spec.init_std),
            "position": self.parameter(
                "embed.position", (spec.context, spec.d_model), "embedding", "normal", spec.init_std
            ),
        }
        self.add(
            Embed(
                name="embed",
                index=0,
                inputs={"ids": "ids"},
                outputs={"y": "embed.y"},
                parameters=parameters,
                vocab=spec.vocab,
                width=spec.d_model,
                probability=spec.dropout,
                site=self.next_site(),
            )
        )
        return "embed.y"

    def block(self, number: int, x: str) -> str:
        spec = self.spec
        name = f"block{number}"
        d = spec.d_model
        # Radford et al. 2019: branches that end in the residual stream start smaller, by the number of branches.
        branch_std = spec.init_std / sqrt(2 * spec.layers)
        y = self.norm(f"{name}.norm1", x)
        y = self.linear(f"{name}.attn_qkv", "attn_qkv", y, d, 3 * d, spec.init_std)
        outputs = {r: f"{name}.attn.{r}" for r in ("y", "maxima", "normalisers")}
        if spec.attention == "stored":
            outputs["weights"] = f"{name}.attn.weights"
        self.add(
            Attention(
                name=f"{name}.attn",
                index=len(self.operations),
                inputs={"qkv": y},
                outputs=outputs,
                heads=spec.heads,
                width=spec.head_width,
                context=spec.context,
                probability=spec.dropout,
                site=self.next_site(),
                stored=spec.attention == "stored",
            )
        )
        y = self.linear(f"{name}.attn_out", "attn_out", f"{name}.attn.y", d, d, branch_std)
        x = self.residual(f"{name}.attn_residual", x, y)
        y = self.norm(f"{name}.norm2", x)
        y = self.linear(f"{name}.mlp_up", "mlp_up", y, d, spec.hidden, spec.init_std)
        self.add(
            Activation(
                name=f"{name}.mlp_act",
                index=len(self.operations),
                inputs={"x": y},
                outputs={"y": f"{name}.mlp_act.y"},
                function=spec.activation,
            )
        )
        y = self.linear(f"{name}.mlp_down", "mlp_down", f"{name}.mlp_act.y", spec.hidden, d, branch_std)
        return self.residual(f"{name}.mlp_residual", x, y)

    def head(self, x: str) -> str:
        spec = self.spec
        if spec.tied:
            weight = "embed.token"
        else:
            weight = self.parameter("head.weight", (spec.vocab, spec.d_model), "matrix", "normal", spec.init_std)
        return self._linear("head", "head", x, spec.d_model, spec.vocab, {"weight": weight})


def again_name(tensor: str) -> str:
    """The name of a recomputed tensor's second version."""
    return f"again({tensor})"


def build_program(spec: ModelSpec, recompute: int = 0) -> Program:
    """The training program of a pre-norm GPT; raises SpecError where shapes do not fit.

    recompute: how many blocks, from the first on, are computed again in the backward half.
    """
    if not 0 <= recompute <= spec.layers:
        raise SpecError(f"recompute may be 0 to {spec.layers}, the model's layers, found {recompute}")
    builder = _Builder(spec)
    x = builder.embed()
    for number in range(spec.layers):
        x = builder.block(number, x)
    logits = builder.head(builder.norm("norm", x))
    builder.add(
        Loss(
            name="loss",
            index=len(builder.operations),
            inputs={"logits": logits, "targets": "targets"},
            outputs={r: f"loss.{r}" for r in ("losses", "maxima", "sums")},
        )
    )
    operations = tuple(builder.operations)
    return Program(
        operations,
        derive_backward(operations, [f"block{number}." for number in range(recompute)]),
        builder.tensors,
        tuple(builder.parameters.values()),
        spec,
    )


def derive_backward(operations: tuple[Operation, ...], recomputed: Sequence[str] = ()) -> tuple[BackwardStep, ...]:
    """The operations in reverse, each with the input roles whose gradient already has a contribution.

    recomputed: name prefixes of groups of operations that run again before their backward half, but for the last of
    each, whose output the next group has kept.
    """
    groups = {prefix: [o for o in operations if o.name.startswith(prefix)] for prefix in recomputed}
    again = {group[-1].name: tuple(group[:-1]) for group in groups.values()}
    reached: set[str] = set()
    steps = []
    for operation in reversed(operations):
        roles = [role for role in operation.inputs if role not in operation.constant]
        accumulates = frozenset(r for r in roles if operation.inputs[r] in reached)
        steps.append(BackwardStep(operation, accumulates, again.get(operation.name, ())))
        reached.update(operation.inputs[role] for role in roles)
    return tuple(steps)
