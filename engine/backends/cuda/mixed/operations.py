"""Operations that only the tier `prod` has: neighbours of the common program joined, so that fewer bytes move.

They say what is read, written and kept; their kernels are in twins.py beside this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from engine.operations.base import Execution, Operation, TensorType


@dataclass(frozen=True, kw_only=True)
class Joined(Operation):
    """An operation of the card alone. Its types are given when the program is built."""

    def infer(self, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
        raise AssertionError(f"{self.name}: types are given, not inferred")

    def forward(self, run: Execution) -> None:
        raise AssertionError(f"{self.name} runs on device cuda alone")

    def backward(self, run: Execution) -> None:
        raise AssertionError(f"{self.name} runs on device cuda alone")


@dataclass(frozen=True, kw_only=True)
class ResidualNorm(Joined):
    """sum = x + dropout(branch), in the place of branch; y = LayerNorm(sum), with mean and rstd [B, T] fp32.

    branch_bias: the bias parameter that was added to the branch last; its gradient is summed here on the way. Where
    there is an input `operand`, the product of it at the end of the branch is computed here too, and is added to x
    before it is rounded.

    The backward pass wants normalised rows: without parameters they are y, which is kept for what follows anyway.
    """

    width: int
    probability: float
    site: int
    branch_bias: str | None

    kind: ClassVar[str] = "residual_norm"
    constant: ClassVar[frozenset[str]] = frozenset({"operand"})  # its gradient is that of the operation before
    forward_in_place: ClassVar[Mapping[str, str]] = {"sum": "branch"}

    @property
    def is_bare(self) -> bool:
        """Whether y is the normalised rows."""
        return not self.parameters

    @property
    def kept(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"y", "rstd"} if self.is_bare else {"sum", "mean", "rstd"})

    @property
    def same_gradient(self) -> Mapping[str, str]:
        return {} if self.probability else {"branch": "x"}


@dataclass(frozen=True, kw_only=True)
class Mlp(Joined):
    """y = down(f(up(x))); keeps x, `before` = up(x) and `after` = f(before), both [B, T, hidden].

    Parameters: up, up_bias, down, down_bias (biases may be missing). The gradient of down_bias is ResidualNorm's.
    """

    width: int
    hidden: int
    function: str

    kind: ClassVar[str] = "mlp"
    kept: ClassVar[frozenset[str]] = frozenset({"x", "before", "after"})


@dataclass(frozen=True, kw_only=True)
class FlashAttention(Joined):
    """Causal attention over packed qkv [B, T, 3 d]; `stats` [B, heads, T] fp32 are the logarithms of row sums."""

    heads: int
    width: int
    probability: float
    site: int

    kind: ClassVar[str] = "flash_attention"
    kept: ClassVar[frozenset[str]] = frozenset({"qkv", "y", "stats"})


@dataclass(frozen=True, kw_only=True)
class Classifier(Joined):
    """Cross-entropy; while training the logits become their gradient in the same pass."""

    vocab: int
    padded: int

    kind: ClassVar[str] = "classifier"
    kept: ClassVar[frozenset[str]] = frozenset({"logits"})
    constant: ClassVar[frozenset[str]] = frozenset({"targets"})
    gradient_over_input: ClassVar[str | None] = "logits"
