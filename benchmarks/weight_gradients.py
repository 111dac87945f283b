"""Our kernel for gradients of weights beside cuBLASLt's products, joined over shards, on the card at hand.

    python benchmarks/weight_gradients.py [--precision bf16] [--rounds N] [ROWSxCOLUMNSxTOKENSxSHARDS ...]

TOKENS: of a shard. Prints one JSON line for each size: microseconds and TFLOP/s of both (median of rounds of 20 calls
in one graph), blocks that ours takes of the card, and how far apart the results are, relative to the largest number.
Exits with 1 where that is above what fp32 sums of so many products may differ by.
"""

import argparse
import json
import sys
from typing import Any

import numpy as np
from attention import narrow
from gpu_timing import microseconds

from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.products import WORKSPACE, Matrix, Products
from engine.backends.cuda.mixed.weight_gradients import Taken, WeightGradients, form_of
from engine.backends.cuda.run import THREADS, ceiling
from engine.backends.cuda.sources import Unit
from engine.spec import HALF_DTYPES

# gpt2-124m, andrea-120m, andrea-12m and char-4.8m, as many shards as a step takes at once
USUAL = [
    *("2304x768x4096x4", "3072x768x4096x4", "768x3072x4096x4", "768x768x4096x4", "50304x768x4096x4"),
    *("2304x768x1024x8", "3072x768x1024x8", "768x3072x1024x8", "768x768x1024x8"),
    *("1152x384x1024x8", "1536x384x1024x8", "384x1536x1024x8", "384x384x1024x8"),
    *("768x256x1024x8", "1024x256x1024x8", "256x1024x1024x8", "256x256x1024x8"),
]
MOST_DISTANCE = 1e-4


class Case:
    """Random matrices of one size on the card."""

    def __init__(self, card: Card, taken: Taken, dtype: str, precision: str) -> None:
        self.card, self.taken, self.launch = card, taken, Launcher(card)
        tokens, gradient = taken.shards * taken.tokens, 4 * taken.rows * taken.columns
        sizes = {"dy": 2 * tokens * taken.rows, "x": 2 * tokens * taken.columns, "workspace": WORKSPACE}
        sizes |= {"own": gradient, "library": gradient, "shards": taken.shards * gradient}
        self.memory = {name: card.driver.mem_alloc(size) for name, size in sizes.items()}
        numbers = narrow(np.random.default_rng(1).standard_normal(1 << 20, np.float32), precision)
        for name in ("dy", "x"):
            card.driver.memcpy_htod(self.memory[name], np.resize(numbers, sizes[name] // 2))
        at = {name: int(address) for name, address in self.memory.items()}
        self.at, self.dtype = at, dtype
        self.own = WeightGradients(self.launch)
        self.products = Products(card.name, {int(self.launch.stream.handle): at["workspace"]})
        self.joins = Unit("optimizer_mixed", {"HALF_BF16": int(dtype == "bfloat16")})

    def run_own(self) -> None:
        t = self.taken
        dy, x = Matrix(self.at["dy"], self.dtype, t.rows), Matrix(self.at["x"], self.dtype, t.columns)
        self.own(dy, x, t, self.at["own"])

    def run_library(self) -> None:
        t = self.taken
        size = t.rows * t.columns
        self.products.multiply(
            int(self.launch.stream.handle),
            (t.rows, t.columns, t.tokens),
            Matrix(self.at["dy"], self.dtype, t.rows, t.tokens * t.rows),
            Matrix(self.at["x"], self.dtype, t.columns, t.tokens * t.columns),
            Matrix(self.at["shards"], "float32", t.columns, size),
            a_by_k=True,
            batches=t.shards,
        )
        values = (self.at["shards"], t.shards, size, size, self.at["library"], 0)
        self.launch(self.joins, "k_join_gradients", "PiqqPi", (ceiling(size, 4 * THREADS),), (THREADS,), *values)

    def distance(self) -> float:
        own, library = (np.empty(self.taken.rows * self.taken.columns, np.float32) for _ in range(2))
        self.launch.synchronise()
        self.card.driver.memcpy_dtoh(own, self.memory["own"])
        self.card.driver.memcpy_dtoh(library, self.memory["library"])
        return float(np.abs(own - library).max() / np.abs(library).max())

    def close(self) -> None:
        for address in self.memory.values():
            address.free()


def measure(card: Card, size: str, precision: str, rounds: int) -> dict[str, Any]:
    rows, columns, tokens, shards = (int(n) for n in size.split("x"))
    taken = Taken(rows, columns, tokens, shards, shards, False)
    case = Case(card, taken, HALF_DTYPES[precision], precision)  # type: ignore[index]
    times = {
        name: microseconds(case.launch, call, rounds)
        for name, call in (("own", case.run_own), ("library", case.run_library))
    }
    down, across = form_of(rows, columns).tiles(rows, columns)
    result: dict[str, Any] = {"size": size, "precision": precision, "blocks": down * across * shards // taken.chain}
    for name, us in times.items():
        result |= {f"{name}_us": round(us, 1), f"{name}_tflops": round(2e-6 * rows * columns * tokens * shards / us)}
    result["distance"] = case.distance()
    case.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=USUAL)
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    card, failed = Card(), False
    for size in arguments.sizes:
        result = measure(card, size, arguments.precision, arguments.rounds)
        print(json.dumps(result), flush=True)
        failed |= not result["distance"] < MOST_DISTANCE
    sys.exit(failed)


if __name__ == "__main__":
    main()
