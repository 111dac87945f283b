"""Runs one operation on arrays made as the trainer makes them, scratch and outputs poisoned before."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.operations.base import BufferType, Operation, Sizes, TensorType
from engine.threads import ThreadTeam

Array = npt.NDArray[Any]


def poisoned(type: BufferType) -> Array:
    """All bits set: NaN as a float, -1 as an integer; what is read before it is written shows."""
    raw = np.full(type.bytes, 0xFF, np.uint8)
    return raw.view(type.dtype).reshape(type.shape)


class Bench:
    """What an operation sees while it runs (engine.operations.base.Execution); names are roles.

    `tensors` and `parameters` by role. After forward() outputs are in `tensors`; backward() takes
    the outputs' gradients and returns the inputs'. Parameter gradients add up in
    `parameter_gradients`, which start at zero.
    """

    def __init__(
        self,
        operation: Operation,
        tensors: Mapping[str, Array],
        parameters: Mapping[str, Array] | None = None,
        *,
        sizes: Sizes,
        training: bool = False,
        seed: int = 3,
        step: int = 4,
        first_row: int = 0,
        tier: str = "portable",
    ) -> None:
        self.operation = operation
        self.sizes = sizes
        self.tier = tier
        self.training = training
        self.seed = seed
        self.step = step
        self.first_row = first_row
        self.loss_scale = np.float32(1.0 / (sizes.batch * sizes.context))
        self.team = ThreadTeam(sizes.threads)
        self.flags = np.zeros(operation.index + 1, np.int64)
        self.tensors = {role: np.ascontiguousarray(x).copy() for role, x in tensors.items()}
        self.parameters = {r: np.ascontiguousarray(x).copy() for r, x in (parameters or {}).items()}
        self.parameter_gradients = {r: np.zeros_like(x) for r, x in self.parameters.items()}
        self.gradients: dict[str, Array] = {}
        self.adds = frozenset[str]()
        self._derived = {r: poisoned(t) for r, t in operation.derived(tier).items()}
        self._work: dict[str, Array] = {}

    def tensor(self, name: str) -> Array:
        return self.tensors[name]

    def gradient(self, name: str) -> Array:
        return self.gradients[name]

    def parameter(self, name: str) -> Array:
        return self.parameters[name]

    def parameter_gradient(self, name: str) -> Array:
        return self.parameter_gradients[name]

    def derived(self, operation: str, role: str) -> Array:
        return self._derived[role]

    def work(self, operation: str, role: str) -> Array:
        return self._work[role]

    def accumulates(self, operation: str, role: str) -> bool:
        return role in self.adds

    def forward(self) -> dict[str, Array]:
        """Outputs by role."""
        operation = self.operation
        types = {role: _type_of(x) for role, x in self.tensors.items()}
        for role, type in operation.infer(types).items():
            taken = operation.forward_in_place.get(role)
            if taken is not None:
                self.tensors[role] = self.tensors[taken].copy()
            else:
                self.tensors[role] = poisoned(BufferType(type.at(self.sizes), type.dtype))
        work = operation.forward_work(self.sizes, self.tier)
        self._work = {role: poisoned(type) for role, type in work.items()}
        operation.prepare(self)
        operation.forward(self)
        return {role: self.tensors[role] for role in operation.outputs}

    def backward(self, gradients: Mapping[str, Array], before: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Gradients of the inputs by role; `before` holds those that are to be added to."""
        operation = self.operation
        self.gradients = {role: np.ascontiguousarray(x).copy() for role, x in gradients.items()}
        self.adds = frozenset(before or {})
        wanted = [role for role in operation.inputs if role not in operation.constant]
        for role in wanted:
            taken = operation.backward_in_place.get(role)
            if before is not None and role in before:
                self.gradients[role] = before[role].copy()
            elif taken is not None:
                self.gradients[role] = self.gradients[taken]
            elif role == operation.gradient_over_input:
                self.gradients[role] = self.tensors[role]
            else:
                x = self.tensors[role]
                self.gradients[role] = poisoned(BufferType(x.shape, x.dtype.name))
        work = operation.backward_work(self.sizes, self.tier)
        self._work = {role: poisoned(type) for role, type in work.items()}
        operation.backward(self)
        return {role: self.gradients[role] for role in wanted}


def _type_of(x: Array) -> TensorType:
    return TensorType(tuple(x.shape), x.dtype.name)


def normals(seed: int, *shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    return (scale * np.random.default_rng([seed, *shape]).normal(size=shape)).astype(np.float32)


def same_bits(found: Array, expected: Array) -> None:
    """Equal in every bit; says where the first difference is."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    words = f"u{found.dtype.itemsize}"
    different = np.argwhere(found.view(words) != np.ascontiguousarray(expected).view(words))
    if len(different):
        at = tuple(different[0])
        raise AssertionError(
            f"{len(different)} of {found.size} differ, first at {at}: {found[at]!r}, expected {expected[at]!r}"
        )


def within(found: Array, expected: Array, bound: Array, *, used: float = 0.0) -> None:
    """|found - expected| <= bound everywhere, and somewhere at least `used` of it."""
    error = np.abs(found.astype(np.float64) - expected)
    assert np.all(np.isfinite(bound))
    outside = ~(error <= bound)  # a NaN is outside
    if np.any(outside):
        at = tuple(np.argwhere(outside)[0])
        raise AssertionError(f"at {at}: {found[at]!r}, expected {expected[at]!r} +- {bound[at]:.3g}")
    share = float(np.max(error / np.maximum(bound, 1e-300)))
    assert share >= used, f"the bound is loose: only {share:.2g} of it is used"
