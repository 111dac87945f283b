"""AdamW (Loshchilov & Hutter 2019): decay multiplied in, epsilon outside the root."""

from dataclasses import dataclass

import numpy as np

from engine.numerics.types import Doubles


@dataclass
class AdamW:
    """One tensor's weights and moments; `update` makes one step in place."""

    w: Doubles
    m: Doubles
    v: Doubles
    beta1: float
    beta2: float
    epsilon: float
    steps: int = 0

    def update(self, g: Doubles, rate: float, decay: float) -> None:
        """`rate`: learning rate of this step; `decay`: weight decay per unit of it (0: none)."""
        self.steps += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m_hat = self.m / (1 - self.beta1**self.steps)
        v_hat = self.v / (1 - self.beta2**self.steps)
        self.w = self.w * (1 - rate * decay) - rate * m_hat / (np.sqrt(v_hat) + self.epsilon)


def clipped(gradients: dict[str, Doubles], clip_norm: float) -> dict[str, Doubles]:
    """Gradients scaled so that their global norm is at most `clip_norm` (0: no limit)."""
    norm = np.sqrt(sum(float(np.sum(g**2)) for g in gradients.values()))
    if clip_norm == 0.0 or norm <= clip_norm:
        return gradients
    return {name: g * (clip_norm / norm) for name, g in gradients.items()}
