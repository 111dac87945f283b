"""Where a training step's energy goes: every kernel's launches again and again, until the card's clocks have settled.

    python benchmarks/energy_by_kernel.py [--seconds S] [--batch B] [--dropout P] [--precision bf16] EXPERIMENT...

Prints a JSON line for each kernel of each experiment, the largest first: launches in a step, the microseconds of all of
them, watts, and millijoules by the card's own counter; last the same of whole steps. Where a step is bound by the
card's power limit, energy and not time tells what would make it faster. The card brings its counter up to date
a few times a second, so that single lines may be off by a tenth.
"""

import argparse
import ctypes
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gpu_step import add_options, started
from kernels_alone import Call, recorded
from running import run

from engine.backends.cuda.backend import CudaBackend
from engine.backends.cuda.errors import DeviceUnavailable
from engine.backends.cuda.graphs import Graph

SETTLE = 0.4  # part of the time that comes before what is measured
ROUND = 0.02  # seconds of work between two looks at the clock


class Meter:
    """The energy counter of card 0, through NVIDIA's management library (nvmlDeviceGetTotalEnergyConsumption)."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise DeviceUnavailable(f"the card's energy counter needs NVIDIA's management library: {error}") from error
        self._device = ctypes.c_void_p()
        self._check(self._library.nvmlInit_v2())
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)))

    def joules(self) -> float:
        energy = ctypes.c_ulonglong()
        self._check(self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(energy)))
        return energy.value / 1e3

    def _check(self, code: int) -> None:
        if code:
            raise DeviceUnavailable(f"the card's energy counter cannot be read: NVML failed with error {code}")


def measure(meter: Meter, work: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Seconds of one call of `work`, which waits for its end, and its joules."""
    end = time.perf_counter() + SETTLE * seconds
    while time.perf_counter() < end:
        work()
    first, start, calls = meter.joules(), time.perf_counter(), 0
    while time.perf_counter() - start < (1 - SETTLE) * seconds:
        work()
        calls += 1
    taken = time.perf_counter() - start
    return taken / calls, (meter.joules() - first) / calls


def measure_kernel(backend: CudaBackend, meter: Meter, calls: list[Call], seconds: float) -> tuple[float, float]:
    """The same of a kernel's launches in a step, as one graph."""
    stream = backend.launcher.stream

    def queue() -> None:
        for call in calls:
            call()

    graph = Graph(stream, queue)
    start = time.perf_counter()
    graph.launch()
    stream.synchronize()
    times = max(1, int(ROUND / (time.perf_counter() - start)))

    def work() -> None:
        for _ in range(times):
            graph.launch()
        stream.synchronize()

    each, joules = measure(meter, work, seconds)
    graph.close()
    return each / times, joules / times


def lines_of(name: str, arguments: argparse.Namespace, meter: Meter) -> list[dict[str, Any]]:
    trainer, backend, step = started(name, arguments)
    kernels: dict[str, list[Call]] = defaultdict(list)
    for kernel, call in recorded(backend):
        kernels[kernel].append(call)
    found = {
        # The update first, while the gradient is what a step has left.
        kernel: (len(kernels[kernel]), *measure_kernel(backend, meter, kernels[kernel], arguments.seconds))
        for kernel in sorted(kernels, key=lambda kernel: kernel != "k_adamw")
    }
    ordered = sorted(found.items(), key=lambda item: -item[1][2])
    ordered.append(("whole steps", (1, *measure(meter, step, 2 * arguments.seconds))))
    trainer.close()
    return [
        {
            "experiment": name,
            "kernel": kernel,
            "launches": launches,
            "us": round(1e6 * each, 1),
            "watts": round(joules / each),
            "mj": round(1e3 * joules, 1),
        }
        for kernel, (launches, each, joules) in ordered
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--seconds", type=float, default=1.2, help="for each kernel; 1.2 if not given")
    add_options(parser)
    arguments = parser.parse_args()
    meter = Meter()
    for name in arguments.experiments:
        for line in lines_of(name, arguments, meter):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run(main)
