"""The MLP's products with GELU in them by our own kernels beside the library's, on the card at hand, for the sizes of
the experiments: on the way back cuBLASLt's product and a kernel for the derivative, forward its product with GELU.

    python benchmarks/activation_products.py [--precision bf16] [--rounds N] [TOKENSxWIDTHxHIDDEN[/nobias] ...]

Prints one JSON line for each size: microseconds of a call (median of rounds of 20 calls in one graph; calls take turns
on so many tensors that none finds its own in the card's cache), the largest distances from float64 relative to the
largest number, of the gradient and of the sums for the bias, and whether repeats gave the same bits. Exits with 1 where
a repeat differs or a distance is above a few roundings. (tests/cuda/test_hopper_activation.py checks the way forward.)
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
from attention import narrow, wide
from comparing import relative, repeated
from gpu_timing import microseconds
from running import run

from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.hopper_activation import SUM_ROWS, HopperActivation
from engine.backends.cuda.mixed.products import WORKSPACE, Matrix, Products
from engine.backends.cuda.run import THREADS
from engine.backends.cuda.sources import Unit

Array = npt.NDArray[Any]
# gpt2-124m, andrea-120m, andrea-12m and char-4.8m, as many tokens as a step takes at once
USUAL = ["16384x768x3072", "8192x768x3072/nobias", "8192x384x1536", "8192x256x1024"]
CACHE = 256 << 20  # bytes after which the card's cache has forgotten
CHECKED_ROWS = 2 * SUM_ROWS  # at the beginning, in the middle and at the end
NAMES = ("own", "library", "product", "own forward", "library forward")  # the last two leave other inputs behind


class Case:
    """Inputs of one size on the card, and what both give."""

    def __init__(self, card: Card, sizes: tuple[int, int, int], bias: bool, precision: str) -> None:
        self.card, self.sizes, self.precision = card, sizes, precision
        self.launch = Launcher(card)
        self.dtype = "bfloat16" if precision == "bf16" else "float16"
        tokens, width, hidden = sizes
        rng = np.random.default_rng(1)
        self.dy, self.weight, self.before = (
            narrow(rng.standard_normal(shape, np.float32), precision)
            for shape in ((tokens, width), (width, hidden), (tokens, hidden))
        )
        self.blocks = tokens // SUM_ROWS if bias else 0
        self.sets = -(-CACHE // self.before.nbytes)
        allocate = card.driver.mem_alloc
        self.inputs = [allocate(self.dy.nbytes), allocate(self.weight.nbytes)]
        self.befores = [allocate(self.before.nbytes) for _ in range(self.sets)]
        self.out, self.parts = allocate(self.before.nbytes), allocate(max(4 * self.blocks * hidden, 16))
        self.workspace = allocate(WORKSPACE)
        for address, array in zip(self.inputs, (self.dy, self.weight), strict=True):
            card.driver.memcpy_htod(address, array)
        for address in self.befores:
            card.driver.memcpy_htod(address, self.before)
        self.own = HopperActivation(self.launch, self.dtype)
        self.products = Products(card.name, {int(self.launch.stream.handle): int(self.workspace)})

    def call(self, name: str) -> Callable[[], None]:
        befores = cycle([int(address) for address in self.befores])
        return lambda: self._call(name, next(befores))

    def _call(self, name: str, before: int) -> None:
        tokens, width, hidden = self.sizes
        dy, weight, out = (int(address) for address in (*self.inputs, self.out))
        parts = int(self.parts) if self.blocks else 0
        if name == "own":
            self.own.backward(self.sizes, dy, weight, before, out, False, parts)
            return
        if "forward" in name:
            self._forward(name, dy, weight, weight if self.blocks else 0, before, out)
            return
        self.products.multiply(
            int(self.launch.stream.handle),
            (tokens, hidden, width),
            *(Matrix(*m) for m in ((dy, self.dtype, width), (weight, self.dtype, hidden), (out, self.dtype, hidden))),
        )
        if name == "library":
            unit = Unit("activation_mixed", {"HALF_BF16": int(self.precision == "bf16"), "RELU": 0})
            grid = (-(-hidden // 256), -(-tokens // SUM_ROWS), 1)
            self.launch(unit, "k_activation_bwd", "PiiPP", grid, (THREADS,), before, tokens, hidden, out, parts)

    def _forward(self, name: str, x: int, weight: int, bias: int, before: int, after: int) -> None:
        tokens, width, hidden = self.sizes
        if name == "own forward":
            self.own.forward(self.sizes, x, weight, bias, before, after, False)
            return
        self.products.multiply(
            int(self.launch.stream.handle),
            (tokens, hidden, width),
            *(Matrix(*m) for m in ((x, self.dtype, width), (weight, self.dtype, width), (after, self.dtype, hidden))),
            b_by_n=True,
            epilogue="gelu_aux_bias" if bias else "gelu_aux",
            bias=bias,
            aux=before,
        )

    def results(self, name: str) -> list[Array]:
        """The gradient and the sums for the bias, on memory that held NaN before."""
        found = [np.empty_like(self.before), np.empty((self.blocks, self.sizes[2]), np.float32)]
        for address, array in zip((self.out, self.parts), found, strict=True):
            self.launch.fill(int(address), 0xFF, max(array.nbytes, 16))
        self._call(name, int(self.befores[0]))
        self.launch.synchronise()
        for address, array in zip((self.out, self.parts), found, strict=True):
            if array.size:
                self.card.driver.memcpy_dtoh(array, address)
        return found

    def distances(self, found: list[Array]) -> list[float]:
        """Of the gradient and of the sums from float64, relative to the largest number, for some rows."""
        tokens, worst = self.sizes[0], [0.0, 0.0]
        weight = wide(self.weight, self.precision)
        for middle in (0, tokens // 2 // SUM_ROWS * SUM_ROWS, tokens):
            first = min(max(middle - CHECKED_ROWS // 2, 0), tokens - CHECKED_ROWS)
            rows = slice(first, first + CHECKED_ROWS)
            x = wide(self.before[rows], self.precision)
            t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
            slope = (1 + t) / 2 + x / 2 * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)
            wanted = wide(self.dy[rows], self.precision) @ weight * slope
            worst[0] = max(worst[0], relative(wide(found[0][rows], self.precision), wanted))
            if self.blocks:
                sums = wanted.reshape(-1, SUM_ROWS, wanted.shape[1]).sum(1)
                block = first // SUM_ROWS
                worst[1] = max(worst[1], relative(found[1][block : block + len(sums)], sums))
        return worst

    def free(self) -> None:
        for allocation in (*self.inputs, *self.befores, self.out, self.parts, self.workspace):
            allocation.free()


def parsed(size: str) -> tuple[tuple[int, int, int], bool]:
    whole, _, nobias = size.partition("/")
    tokens, width, hidden = (int(n) for n in whole.split("x"))
    return (tokens, width, hidden), not nobias


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=USUAL)
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    card, failed = Card(), False
    unit = 2.0**-8 if arguments.precision == "bf16" else 2.0**-11
    for size in arguments.sizes:
        case = Case(card, *parsed(size), arguments.precision)
        line: dict[str, Any] = {"size": size, "precision": arguments.precision}
        for name in NAMES:
            line[name] = {"us": round(microseconds(case.launch, case.call(name), arguments.rounds), 1)}
            if name not in ("own", "library"):
                continue
            found, repeats = repeated(partial(case.results, name))
            line[name] |= {"repeats": repeats, "distances": [round(x, 6) for x in case.distances(found)]}
            failed |= name == "own" and not (repeats and max(line[name]["distances"]) < 2 * unit)
        print(json.dumps(line), flush=True)
        case.free()
    return int(failed)


if __name__ == "__main__":
    run(main)
