"""Numbers that change from step to step, computed on the host in float64 from IEEE operations only."""

from dataclasses import dataclass

import numpy as np

from engine.numerics.elementary import cosine_decay, pow_int64
from engine.spec import TrainSpec


@dataclass(frozen=True)
class StepValues:
    """What the optimizer takes for one step, each rounded once to fp32."""

    learning_rate: np.float32
    decay: np.float32  # 1 - learning_rate * weight_decay
    correction1: np.float32  # 1 - beta1^t
    correction2: np.float32  # 1 - beta2^t


def learning_rate(train: TrainSpec, step: int) -> float:
    """Rate of 0-based `step`: linear from peak/warmup_steps to the peak, then half a cosine down to the final rate."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    span = train.steps - 1 - train.warmup_steps
    if span <= 0:
        return train.learning_rate
    factor = cosine_decay(min(step - train.warmup_steps, span), span)
    return train.final_learning_rate + factor * (train.learning_rate - train.final_learning_rate)


def step_values(train: TrainSpec, step: int) -> StepValues:
    rate = np.float32(learning_rate(train, step))
    with np.errstate(over="ignore"):  # the optimizer refuses what is not finite
        decay = np.float32(1.0 - float(rate) * train.weight_decay)
    return StepValues(
        learning_rate=rate,
        decay=decay,
        correction1=np.float32(1.0 - pow_int64(train.beta1, step + 1)),
        correction2=np.float32(1.0 - pow_int64(train.beta2, step + 1)),
    )
