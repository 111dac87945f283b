"""The end of a branch with LayerNorm by our own kernel beside cuBLASLt's product and a kernel for the rest, on the card
at hand, for the sizes of the experiments.

    python benchmarks/branch_ends.py [--precision bf16] [--rounds N] [TOKENSxWIDTHxDEPTH ...]

Prints one JSON line for each size: microseconds of a call (median of rounds of 20 calls in one graph), the largest
distances of LayerNorm's results of both from float64 in some rows, relative to the largest number, and whether repeats
gave the same bits. Exits with 1 where a repeat differs or our distance is above a few roundings.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from attention import narrow, wide
from comparing import relative, repeated
from gpu_timing import microseconds
from running import run

from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.mixed.hopper_norm import HopperNorm, Norm, Product
from engine.backends.cuda.mixed.products import WORKSPACE, Matrix, Products
from engine.backends.cuda.run import MASK, NO_MASK, THREADS
from engine.backends.cuda.sources import Unit

Array = npt.NDArray[Any]
# andrea-12m and char-4.8m: attention's output, and the MLP's
USUAL = ["8192x384x384", "8192x384x1536", "8192x256x256", "8192x256x1024"]
CHECKED_ROWS = 64  # at the beginning and at the end
ROW_WARPS = THREADS // 32


class Case:
    """Inputs of one size on the card, and what both give."""

    def __init__(self, card: Card, sizes: tuple[int, int, int], precision: str) -> None:
        self.card, self.sizes, self.precision = card, sizes, precision
        self.launch = Launcher(card)
        self.dtype = "bfloat16" if precision == "bf16" else "float16"
        tokens, width, depth = sizes
        rng = np.random.default_rng(1)
        self.left = narrow(rng.standard_normal((tokens, depth), np.float32), precision)
        self.weight = narrow(rng.standard_normal((width, depth), np.float32) / np.float32(np.sqrt(depth)), precision)
        self.x = narrow(rng.standard_normal((tokens, width), np.float32), precision)
        self.parameters = rng.standard_normal((3, width), np.float32)  # bias of the branch, gain, bias
        self.bias16 = narrow(self.parameters[0], precision)
        given = {"left": self.left, "weight": self.weight, "x": self.x, "bias16": self.bias16, "p": self.parameters}
        sizes_of = {name: array.nbytes for name, array in given.items()}
        sizes_of |= dict.fromkeys(("sum", "y"), self.x.nbytes) | dict.fromkeys(("mean", "rstd"), 4 * tokens)
        sizes_of["work"] = WORKSPACE
        self.memory = {name: card.driver.mem_alloc(size) for name, size in sizes_of.items()}
        for name, array in given.items():
            card.driver.memcpy_htod(self.memory[name], array)
        self.own = HopperNorm(self.launch, self.dtype)
        self.products = Products(card.name, {int(self.launch.stream.handle): int(self.memory["work"])})

    def call(self, name: str) -> Callable[[], None]:
        return self._own if name == "own" else self._library

    def _places(self) -> tuple[dict[str, int], list[int]]:
        at = {name: int(address) for name, address in self.memory.items()}
        return at, [at["p"] + 4 * self.sizes[1] * n for n in range(3)]

    def _own(self) -> None:
        (tokens, width, depth), (at, (branch_bias, gain, bias)) = self.sizes, self._places()
        outs = {name: at[name] for name in ("x", "sum", "y", "mean", "rstd")}
        norm = Norm(branch_bias=branch_bias, gain=gain, bias=bias, **outs, dropout=(0, *NO_MASK, 0))
        self.own((tokens, width), Product(at["left"], at["weight"], depth), norm)

    def _library(self) -> None:
        (tokens, width, depth), (at, (_, gain, bias)) = self.sizes, self._places()
        self.products.multiply(
            int(self.launch.stream.handle),
            (tokens, width, depth),
            Matrix(at["left"], self.dtype, depth),
            Matrix(at["weight"], self.dtype, depth),
            Matrix(at["sum"], self.dtype, width),
            b_by_n=True,
            epilogue="bias",
            bias=at["bias16"],
        )
        unit = Unit(
            "layernorm_mixed", {"HALF_BF16": int(self.precision == "bf16"), "WIDTH": width, "SUMS": 0, "NORMALISED": 0}
        )
        outs = (at[name] for name in ("sum", "y", "mean", "rstd"))
        places = (at["x"], at["sum"], gain, bias, tokens, *outs)
        grid = (-(-tokens // ROW_WARPS),)
        self.launch(unit, "k_norm_fwd", f"PPPPiPPPPq{MASK}P", grid, (THREADS,), *places, 0, *NO_MASK, 0)

    def results(self, name: str) -> list[Array]:
        """The sum and LayerNorm of it, on memory that held NaN before."""
        found = [np.empty_like(self.x) for _ in range(2)]
        for buffer in ("sum", "y"):
            self.launch.fill(int(self.memory[buffer]), 0xFF, self.x.nbytes)
        self.call(name)()
        self.launch.synchronise()
        for buffer, array in zip(("sum", "y"), found, strict=True):
            self.card.driver.memcpy_dtoh(array, self.memory[buffer])
        return found

    def distance(self, found: list[Array]) -> float:
        """Of LayerNorm from float64."""
        worst = 0.0
        for rows in (slice(0, CHECKED_ROWS), slice(-CHECKED_ROWS, None)):
            left, weight, x = (wide(a, self.precision) for a in (self.left[rows], self.weight, self.x[rows]))
            total = x + left @ weight.T + self.parameters[0]
            normalised = (total - total.mean(1, keepdims=True)) / np.sqrt(total.var(1, keepdims=True) + 1e-5)
            wanted = normalised * self.parameters[1] + self.parameters[2]
            worst = max(worst, relative(wide(found[1][rows], self.precision), wanted))
        return worst

    def free(self) -> None:
        for allocation in self.memory.values():
            allocation.free()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=USUAL)
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    card, failed = Card(), False
    unit = 2.0**-8 if arguments.precision == "bf16" else 2.0**-11
    for size in arguments.sizes:
        tokens, width, depth = (int(n) for n in size.split("x"))
        case = Case(card, (tokens, width, depth), arguments.precision)
        line: dict[str, Any] = {"size": size, "precision": arguments.precision}
        for name in ("own", "library"):
            found, repeats = repeated(partial(case.results, name))
            line[name] = {
                "us": round(microseconds(case.launch, case.call(name), arguments.rounds), 1),
                "repeats": repeats,
                "distance": round(case.distance(found), 6),
            }
        failed |= not (line["own"]["repeats"] and line["own"]["distance"] < 4 * unit)
        print(json.dumps(line), flush=True)
        case.free()
    return int(failed)


if __name__ == "__main__":
    run(main)
