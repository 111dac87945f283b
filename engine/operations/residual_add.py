"""The residual sum, with dropout on the branch.

Forward   y = x + branch * keep * 1/(1-p)
Backward  dx = dy (or += dy),  dbranch = dy * keep * 1/(1-p)
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
def k_residual_add_fwd(x: Floats, branch: Floats, first: Scalar, last: Scalar, y: Floats) -> None:
    """Flat arrays; y may be branch."""
    for i in range(first, last):
        y[i] = x[i] + branch[i]


@kernel
def k_residual_add_bwd(dy: Floats, first: Scalar, last: Scalar, dx: Floats, add: Scalar) -> None:
    """dx = dy or dx += dy on flat arrays; dx may be dy."""
    if add:
        for i in range(first, last):
            dx[i] += dy[i]
    else:
        for i in range(first, last):
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
        x, branch = (run.tensor(self.inputs[r]).reshape(-1) for r in ("x", "branch"))
        y = run.tensor(self.outputs["y"]).reshape(-1)
        if run.training and self.probability:
            run.team.run(dropout_tasks(run, self.probability, self.site, branch, branch))
        run.team.run(
            [(k_residual_add_fwd, (x, branch, a, b, y)) for a, b in run.team.ranges(x.size, 64)]
        )

    def backward(self, run: Execution) -> None:
        dy = run.gradient(self.outputs["y"]).reshape(-1)
        dx, dbranch = (run.gradient(self.inputs[r]).reshape(-1) for r in ("x", "branch"))
        ranges = run.team.ranges(dy.size, 64)
        if run.training and self.probability:
            run.team.run(dropout_tasks(run, self.probability, self.site, dy, dbranch))
        else:
            run.team.run([(k_residual_add_bwd, (dy, a, b, dbranch, False)) for a, b in ranges])
        add = run.accumulates(self.name, "x")
        run.team.run([(k_residual_add_bwd, (dy, a, b, dx, add)) for a, b in ranges])
