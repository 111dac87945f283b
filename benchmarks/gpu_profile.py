"""Kernel by kernel: where a training step on the card goes, as the card's own tracing sees the replayed graph.

    python benchmarks/gpu_profile.py [--batch B] [--dropout P] [--precision bf16] [--steps N] EXPERIMENT

Needs PyTorch for its profiler (CUPTI), nothing else of it. Prints JSON: milliseconds of a step from first to last
kernel, the part of it in which some kernel runs, and for each kernel its milliseconds and launches in a step.
"""

import argparse
import json
from collections import defaultdict

import numpy as np
import torch
from gpu_step import add_options, make_trainer
from running import run
from torch.profiler import ProfilerActivity, profile

from engine.backends.cuda.backend import CudaBackend


def busy(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, -np.inf
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment")
    parser.add_argument("--steps", type=int, default=5)
    add_options(parser)
    arguments = parser.parse_args()
    torch.cuda.init()
    trainer = make_trainer(arguments.experiment, arguments)
    trainer.initialise()
    for _ in range(3):
        trainer.train_step()
    backend = trainer.backend
    assert isinstance(backend, CudaBackend) and backend._graph is not None
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(arguments.steps):
            backend._graph.launch()
            backend.launcher.synchronise()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        sums[event.name][0] += event.time_range.elapsed_us()
        sums[event.name][1] += 1
    steps = arguments.steps
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    result = {
        "experiment": arguments.experiment,
        "precision": arguments.precision,
        "busy_ms": round(busy(spans) / 1e3 / steps, 3),
        "launches": round(len(events) / steps, 1),
        "kernels_ms": {name[:120]: [round(us / 1e3 / steps, 4), round(n / steps, 1)] for name, (us, n) in ordered},
    }
    print(json.dumps(result))
    trainer.close()


if __name__ == "__main__":
    run(main)
