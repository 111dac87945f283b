"""The residual sum, with dropout on the branch.

Forward   y = x + branch * keep * 1/(1-p);  y takes the place of branch
Backward  dbranch = dy * keep * 1/(1-p),  dx = dy in place (or += dy where x already has a gradient)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from engine.errors import SpecError
from engine.numerics.jit import kernel
from engine.numerics.types import Floats, Scalar
from engine.operations.base import Execution, Operation, TensorType
from engine.operations.dropout import dropout_tasks


@kernel
def k_residual_add_fwd(x: Floats, first: Scalar, last: Scalar, y: Floats) -> None:
    """Flat arrays; y holds the branch and becomes the sum."""
    x, y = x[first:last], y[first:last]
    for i in range(x.size):
        y[i] = x[i] + y[i]


@kernel
def k_residual_add_bwd(dy: Floats, first: Scalar, last: Scalar, dx: Floats, add: Scalar) -> None:
    """dx = dy or dx += dy on flat arrays."""
    dy, dx = dy[first:last], dx[first:last]
    if add:
        for i in range(dx.size):
            dx[i] += dy[i]
    else:
        for i in range(dx.size):
            dx[i] = dy[i]


@dataclass(frozen=True, kw_only=True)
class ResidualAdd(Operation):
    """Inputs x and branch, output y, all of one type; `probability` of dropout, `site` of its random numbers."""

    probability: float
    site: int

    kind: ClassVar[str] = "residual_add"
    forward_in_place: ClassVar[Mapping[str, str]] = {"y": "branch"}
    backward_in_place: ClassVar[Mapping[str, str]] = {"x": "y"}

    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        if types["x"] != types["branch"]:
            raise SpecError(
                f"{self.name}: {self.inputs['branch']} gives {types['branch']}, "
                f"the residual sum expects {types['x']} as {self.inputs['x']} has"
            )
        return {"y": types["x"]}

    def forward(self, run: Execution) -> None:
        x = run.tensor(self.inputs["x"]).reshape(-1)
        y = run.tensor(self.outputs["y"]).reshape(-1)
        if run.training and self.probability:
            run.team.run(dropout_tasks(run, self.probability, self.site, y))
        run.team.run([(k_residual_add_fwd, (x, a, b, y)) for a, b in run.team.ranges(x.size, 64)])

    def backward(self, run: Execution) -> None:
        dy = run.gradient(self.outputs["y"]).reshape(-1)
        dx, dbranch = (run.gradient(self.inputs[r]).reshape(-1) for r in ("x", "branch"))
        ranges = run.team.ranges(dy.size, 64)
        run.team.run([(k_residual_add_bwd, (dy, a, b, dbranch, False)) for a, b in ranges])
        if run.training and self.probability:
            run.team.run(dropout_tasks(run, self.probability, self.site, dbranch))
        if run.accumulates(self.name, "x"):
            run.team.run([(k_residual_add_bwd, (dy, a, b, dx, True)) for a, b in ranges])
