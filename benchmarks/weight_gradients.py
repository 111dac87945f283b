"""Our kernel for gradients of weights beside cuBLASLt's products, joined over shards, on the card at hand.

    python benchmarks/weight_gradients.py [--precision bf16] [--rounds N] [SIZE ...]

SIZE: ROWSxCOLUMNS:TOKENSxSHARDS, or ROWSxCOLUMNS,ROWSxCOLUMNS:TOKENSxSHARDS for two gradients that a step takes
together; TOKENS of a shard. Prints one JSON line for each size: microseconds and TFLOP/s of both (median of rounds of
20 calls in one graph), blocks that ours takes of the card, and how far apart the results are, relative to the largest
number. Exits with 1 where that is above what fp32 sums of so many products may differ by.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from attention import narrow
from gpu_timing import microseconds
from running import run

from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.joining import join
from engine.backends.cuda.mixed.products import WORKSPACE, Matrix, Products
from engine.backends.cuda.mixed.weight_gradients import PAIRED, Gradient, Taken, WeightGradients, chains_of, form_of
from engine.backends.cuda.sources import Unit
from engine.spec import HALF_DTYPES

# gpt2-124m, andrea-120m, andrea-12m and char-4.8m, as many shards as a step takes at once
USUAL = [
    *("2304x768,768x768:4096x4", "768x3072,3072x768:4096x4", "50304x768:4096x4"),
    *("2304x768,768x768:1024x8", "768x3072,3072x768:1024x8"),
    *("1152x384,384x384:1024x8", "384x1536,1536x384:1024x8"),
    *("768x256,256x256:1024x8", "256x1024,1024x256:1024x8"),
]
MOST_DISTANCE = 1e-4


class Case:
    """Random matrices of one size on the card."""

    def __init__(self, card: Card, shapes: list[tuple[int, int]], taken: Taken, precision: str) -> None:
        self.card, self.taken, self.launch = card, taken, Launcher(card)
        self.dtype = HALF_DTYPES[precision]  # type: ignore[index]
        self.memory: list[Any] = []
        numbers = narrow(np.random.default_rng(1).standard_normal(1 << 20, np.float32), precision)
        self.own, self.library = ([self._gradient(numbers, *shape) for shape in shapes] for _ in range(2))
        self.shards = self._allocate(4 * taken.shards * max(rows * columns for rows, columns in shapes))
        self.compute = WeightGradients(self.launch)
        self.products = Products(card.name, {int(self.launch.stream.handle): self._allocate(WORKSPACE)})
        self.joins = Unit("optimizer_mixed", {"HALF_BF16": int(self.dtype == "bfloat16")})

    def _allocate(self, size: int) -> int:
        self.memory.append(self.card.driver.mem_alloc(size))
        return int(self.memory[-1])

    def _gradient(self, numbers: npt.NDArray[np.uint16], rows: int, columns: int) -> Gradient:
        tokens, places = self.taken.shards * self.taken.tokens, []
        for width in (rows, columns):
            places.append(self._allocate(2 * tokens * width))
            self.card.driver.memcpy_htod(places[-1], np.resize(numbers, tokens * width))
        dy, x = (Matrix(place, self.dtype, width) for place, width in zip(places, (rows, columns), strict=True))
        return Gradient(rows, columns, dy, x, self._allocate(4 * rows * columns))

    def run_own(self) -> None:
        self.compute(self.own, self.taken)

    def run_library(self) -> None:
        for gradient in self.library:
            self._library(gradient)

    def _library(self, gradient: Gradient) -> None:
        tokens, shards, size = self.taken.tokens, self.taken.shards, gradient.rows * gradient.columns
        self.products.multiply(
            int(self.launch.stream.handle),
            (gradient.rows, gradient.columns, tokens),
            *(replace(m, batch=tokens * m.stride) for m in (gradient.dy, gradient.x)),
            Matrix(self.shards, "float32", gradient.columns, size),
            a_by_k=True,
            batches=shards,
        )
        join(self.launch, self.joins, self.shards, shards, size, gradient.out, adds=False)

    def distance(self) -> float:
        self.launch.synchronise()
        return max(self._distance(a, b) for a, b in zip(self.own, self.library, strict=True))

    def _distance(self, own: Gradient, library: Gradient) -> float:
        found, wanted = (np.empty(own.rows * own.columns, np.float32) for _ in range(2))
        self.card.driver.memcpy_dtoh(found, own.out)
        self.card.driver.memcpy_dtoh(wanted, library.out)
        return float(np.abs(found - wanted).max() / np.abs(wanted).max())

    def close(self) -> None:
        for address in self.memory:
            address.free()


def measure(card: Card, size: str, precision: str, rounds: int) -> dict[str, Any]:
    names, _, taken_at_once = size.partition(":")
    shapes = [(int(rows), int(columns)) for rows, columns in (name.split("x") for name in names.split(","))]
    tokens, shards = (int(n) for n in taken_at_once.split("x"))
    case = Case(card, shapes, Taken(tokens, shards, shards, False), precision)
    times = {
        name: microseconds(case.launch, call, rounds)
        for name, call in (("own", case.run_own), ("library", case.run_library))
    }
    tiles = PAIRED * sum(form_of(shapes).pairs(*shape) for shape in shapes)
    result: dict[str, Any] = {"size": size, "precision": precision, "blocks": tiles * chains_of(shapes, shards)}
    work = 2e-6 * sum(rows * columns for rows, columns in shapes) * tokens * shards
    for name, us in times.items():
        result |= {f"{name}_us": round(us, 1), f"{name}_tflops": round(work / us)}
    result["distance"] = case.distance()
    case.close()
    return result


def main() -> int:
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
    return int(failed)


if __name__ == "__main__":
    run(main)
