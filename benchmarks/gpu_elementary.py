"""Are the elementary functions equal, bit for bit, on CPU and CUDA card, for every fp32 input? Exits 1 if not.

    python benchmarks/gpu_elementary.py [THREADS]

Square root and reciprocal stand for the operations that the processors must round correctly by themselves.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from running import run

from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.sources import Unit
from engine.numerics.bits import float32_of_bits
from engine.numerics.elementary import exp32, gelu32, gelu_grad32, log32, tanh32
from engine.numerics.jit import kernel

CHUNK = 1 << 26
THREADS_OF_BLOCK = 256


def sweep(function: Any) -> Callable[..., None]:
    @kernel
    def fill(first: int, out: Any) -> None:
        for i in range(out.size):
            y = function(float32_of_bits(np.int32(np.uint32(first + i))))
            out[i] = y if y == y else np.float32(np.nan)

    return fill


@kernel
def fill_sqrt(first: int, out: Any) -> None:
    for i in range(out.size):
        y = np.sqrt(float32_of_bits(np.int32(np.uint32(first + i))))
        out[i] = y if y == y else np.float32(np.nan)


@kernel
def fill_reciprocal(first: int, out: Any) -> None:
    for i in range(out.size):
        y = np.float32(1.0) / float32_of_bits(np.int32(np.uint32(first + i)))
        out[i] = y if y == y else np.float32(np.nan)


FUNCTIONS: dict[str, Callable[..., None]] = {
    "exp": sweep(exp32),
    "log": sweep(log32),
    "tanh": sweep(tanh32),
    "gelu": sweep(gelu32),
    "gelu_grad": sweep(gelu_grad32),
    "sqrt": fill_sqrt,
    "reciprocal": fill_reciprocal,
}


def main() -> int:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count() or 1
    card = Card()
    launch, driver = Launcher(card), card.driver
    device = driver.mem_alloc(4 * CHUNK)
    cuda, cpu = driver.pagelocked_empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    part = CHUNK // threads
    different = 0
    with ThreadPoolExecutor(threads) as pool:
        for number, (name, fill) in enumerate(FUNCTIONS.items()):
            start, wrong = time.perf_counter(), 0
            for first in range(0, 2**32, CHUNK):
                launch(
                    Unit("elementary"),
                    "k_elementary",
                    "iIIP",
                    (CHUNK // THREADS_OF_BLOCK,),
                    (THREADS_OF_BLOCK,),
                    *(number, first, CHUNK, int(device)),
                )
                driver.memcpy_dtoh_async(cuda, device, launch.stream)
                pieces = range(0, CHUNK, part)
                list(pool.map(lambda at, f=first, g=fill: g(f + at, cpu[at : at + part]), pieces))
                launch.synchronise()
                a, b = cpu.view(np.uint32), cuda.view(np.uint32)
                counts = pool.map(lambda at: int(np.count_nonzero(a[at : at + part] != b[at : at + part])), pieces)  # noqa: B023
                found = sum(counts)
                if found and not wrong:
                    i = int(np.flatnonzero(a != b)[0])
                    print(f"{name}: input {first + i:#010x}: cpu {a[i]:#010x}, cuda {b[i]:#010x}")
                wrong += found
            print(f"{name}: {wrong} of 2^32 inputs differ ({time.perf_counter() - start:.1f} s)", flush=True)
            different += wrong
    return 1 if different else 0


if __name__ == "__main__":
    run(main)
