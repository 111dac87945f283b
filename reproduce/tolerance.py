"""Measuring the tolerance that a record declares, where its bits depend on machine and library.

A run is replayed between some of its own bundles in other arithmetic, and compared with what it recorded: one of the
tier `debug` with its products rounded otherwise, one of the tier `prod` with the products of the tier `portable`.
docs/tolerance.md says what such a claim means.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

from artifacts import Store, load_bundle
from engine.numerics.blas import WAYS, rounding
from reproduce.configuration import Configuration
from reproduce.project import Project
from reproduce.verification.distances import METHOD, away, loss_away, relative_distance
from reproduce.workbench import Workbench, open_workbench

FACTOR = 8.0
"""What the largest distances are multiplied by: other machines round in other ways than the few that are tried."""

PROD_WAYS = ("products, attention and sums in the arithmetic of the tier portable",)

MOST_STEPS = 1000
"""Longer ways from one bundle to the next are measured, and hold, only so far."""

SMALLEST = 2.0**-23
"""Less than this, relative to what is measured, is not claimed: an fp32 number itself is no closer."""


class _Envelope:
    """The largest distances met: of the loss by steps from a bundle, of the evaluation, of each tensor."""

    def __init__(self) -> None:
        self.loss: dict[int, float] = defaultdict(float)
        self.validation = 0.0
        self.tensors: dict[str, float] = defaultdict(float)

    def declared(self, steps: int, size: float) -> dict[str, Any]:
        """Bounds from them. The loss's never falls again: what is far after n steps may be so after n + 1. `size`: of
        the losses."""
        bounds, highest = [], 0.0
        for step in range(1, steps + 1):
            highest = max(highest, self.loss[step])
            bounds.append(FACTOR * max(highest, SMALLEST * size))
        return {
            "loss": bounds,
            "validation_loss": FACTOR * max(self.validation, highest, SMALLEST * size),
            "tensors": {name: FACTOR * max(found, SMALLEST) for name, found in sorted(self.tensors.items())},
        }


def measure_tolerance(
    project: Project,
    configuration: Configuration,
    store: Store,
    bundles: Mapping[int, str],
    results: Mapping[str, Any],
) -> dict[str, Any]:
    """The tolerance of a finished run, as its record declares it. Costs the steps of three segments for each way.

    A run of the tier `debug` on a GPU declares none: there is only one way to round its products.
    """
    prod = configuration.tier == "prod"
    if configuration.run.device != "cpu" and not prod:
        return {"method": "none"}
    ways = PROD_WAYS if prod else tuple(WAYS)
    windows = _windows(sorted(bundles), configuration.train.steps)
    envelope = _Envelope()
    final = load_bundle(store, bundles[configuration.train.steps]).tensors
    with open_workbench(configuration, project.dataset, exactly=not prod) as workbench:
        for way in ways:
            for start, steps in windows:
                with nullcontext() if prod else rounding(way):
                    _replay(workbench, store, bundles, start, steps, final["history/loss"], results, envelope)
    steps = max(steps for _, steps in windows)
    return {
        "method": METHOD,
        "changes": list(ways),
        "factor": FACTOR,
        "windows": [list(window) for window in windows],
        "steps": steps,
        **envelope.declared(steps, float(abs(final["history/loss"]).max())),
    }


def _windows(bundles: list[int], last: int) -> list[tuple[int, int]]:
    """The first segment, the longest and the last: [bundle, steps] each, without repetition."""
    segments = list(pairwise(bundles))
    longest = max(segments, key=lambda segment: segment[1] - segment[0])
    chosen = sorted({segments[0], longest, segments[-1]})
    return [(start, min(end - start, MOST_STEPS)) for start, end in chosen if end <= last]


def _replay(
    workbench: Workbench,
    store: Store,
    bundles: Mapping[int, str],
    start: int,
    steps: int,
    losses: Any,
    results: Mapping[str, Any],
    envelope: _Envelope,
) -> None:
    trainer = workbench.trainer
    workbench.load(load_bundle(store, bundles[start]), f"bundle {bundles[start]}", elsewhere=True)
    for step in range(1, steps + 1):
        result = trainer.train_step()
        distance = loss_away(result.loss, losses[result.step - 1])
        envelope.loss[step] = max(envelope.loss[step], distance)
    if trainer.step in bundles:
        state = trainer.state()
        for name, saved in load_bundle(store, bundles[trainer.step]).tensors.items():
            if name in state and not name.startswith("history/"):
                envelope.tensors[name] = max(envelope.tensors[name], relative_distance(saved, state[name]))
    expected = results["validation"].get(str(trainer.step))
    if trainer.step == workbench.configuration.train.steps:
        expected = results["validation_loss"]
    if expected is not None:
        envelope.validation = max(envelope.validation, away(workbench.evaluate(), expected))
