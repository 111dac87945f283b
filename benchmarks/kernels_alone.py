"""Kernel by kernel: what each launch of a training step takes by itself, 20 of them in one graph with nothing beside.

    python benchmarks/kernels_alone.py [--batch B] [--dropout P] [--precision bf16] EXPERIMENT...

Prints a JSON line for each kernel of each experiment, the largest sum first: launches in a step, the fastest and the
slowest of them in microseconds, and the sum over all. Launches of the side stream are in it too, so the sums may add up
to more than a step takes. Where the gradient, added to again and again, is not finite any more, the optimizer's update
does next to nothing here.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gpu_step import add_options, queue_step, started
from gpu_timing import microseconds
from running import run

from engine.backends.cuda.backend import CudaBackend

ROUNDS = 3
Call = Callable[[], None]


def recorded(backend: CudaBackend) -> list[tuple[str, Call]]:
    """Name and repetition of every launch of a step, which is done once meanwhile."""
    calls: list[tuple[str, Call]] = []

    def noted(name: str, call: Call) -> None:
        calls.append((name, call))
        call()

    queue_step(backend, noted)
    return calls


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    trainer, backend, _ = started(name, arguments)
    times: dict[str, list[float]] = defaultdict(list)
    for kernel, call in recorded(backend):
        times[kernel].append(microseconds(backend.launcher, call, ROUNDS))
    trainer.close()
    lines = [
        {
            "experiment": name,
            "kernel": kernel,
            "launches": len(found),
            "us": [round(x, 1) for x in (min(found), max(found))],
            "sum_us": round(sum(found), 1),
        }
        for kernel, found in times.items()
    ]
    return sorted(lines, key=lambda line: float(line["sum_us"]), reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+")
    add_options(parser)
    arguments = parser.parse_args()
    for name in arguments.experiments:
        for line in measure(name, arguments):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run(main)
