"""The MLP's activation: GELU in its tanh form (Hendrycks & Gimpel 2016) or ReLU, element by element.

Forward   y = gelu(x)            or max(x, 0)
Backward  dx = dy * gelu'(x)     or dy where x > 0, else 0;  dx takes the place of dy
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engine.numerics.elementary import gelu32, gelu_grad32
from engine.numerics.jit import kernel
from engine.numerics.types import Floats, Scalar
from engine.operations.base import Execution, Operation, TensorType


@kernel
def k_gelu_fwd(x: Floats, first: Scalar, last: Scalar, y: Floats) -> None:
    """Flat arrays of one length."""
    x, y = x[first:last], y[first:last]
    for i in range(x.size):
        y[i] = gelu32(x[i])


@kernel
def k_gelu_bwd(x: Floats, first: Scalar, last: Scalar, gradient: Floats) -> None:
    """Flat arrays of one length; gradient holds dy and becomes dx."""
    x, gradient = x[first:last], gradient[first:last]
    for i in range(x.size):
        gradient[i] *= gelu_grad32(x[i])


@kernel
def k_relu_fwd(x: Floats, first: Scalar, last: Scalar, y: Floats) -> None:
    """Flat arrays of one length; a NaN passes through."""
    zero = np.float32(0.0)
    x, y = x[first:last], y[first:last]
    for i in range(x.size):
        y[i] = zero if x[i] <= zero else x[i]


@kernel
def k_relu_bwd(x: Floats, first: Scalar, last: Scalar, gradient: Floats) -> None:
    """Flat arrays of one length; gradient holds dy and becomes dx."""
    zero = np.float32(0.0)
    x, gradient = x[first:last], gradient[first:last]
    for i in range(x.size):
        gradient[i] = zero if x[i] <= zero else gradient[i]


@dataclass(frozen=True, kw_only=True)
class Activation(Operation):
    """Input x, output y of the same type; `function` is gelu or relu."""

    function: str

    kind: ClassVar[str] = "activation"
    kept: ClassVar[frozenset[str]] = frozenset({"x"})
    backward_in_place: ClassVar[Mapping[str, str]] = {"x": "y"}

    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        return {"y": types["x"]}

    def forward(self, run: Execution) -> None:
        function = k_gelu_fwd if self.function == "gelu" else k_relu_fwd
        x = run.tensor(self.inputs["x"]).reshape(-1)
        y = run.tensor(self.outputs["y"]).reshape(-1)
        run.team.run([(function, (x, a, b, y)) for a, b in run.team.ranges(x.size, 64)])

    def backward(self, run: Execution) -> None:
        function = k_gelu_bwd if self.function == "gelu" else k_relu_bwd
        x = run.tensor(self.inputs["x"]).reshape(-1)
        gradient = run.gradient(self.inputs["x"]).reshape(-1)
        run.team.run([(function, (x, a, b, gradient)) for a, b in run.team.ranges(x.size, 64)])
