"""Cross-entropy of the next token: logits [..., V], targets [...], one loss per token in nats."""

import numpy as np

from engine.numerics.types import Doubles, Words


def _log_probabilities(logits: Doubles) -> Doubles:
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    result: Doubles = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    return result


def reference_forward(logits: Doubles, targets: Words) -> Doubles:
    chosen = np.take_along_axis(_log_probabilities(logits), targets[..., None], axis=-1)
    return -chosen[..., 0]


def reference_backward(logits: Doubles, targets: Words, scale: float) -> Doubles:
    """Gradient of `scale` times the sum of the losses."""
    dlogits = np.exp(_log_probabilities(logits))
    at_target = np.take_along_axis(dlogits, targets[..., None], axis=-1)
    np.put_along_axis(dlogits, targets[..., None], at_target - 1, axis=-1)
    return dlogits * scale
