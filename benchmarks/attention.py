"""Our attention kernels beside cuDNN's on the card at hand, for the sizes of the experiments.

    python benchmarks/attention.py [--precision bf16] [--dropout P] [--rounds N] [HEADSxWIDTHxTOKENSxROWS[/PART] ...]

PART: rows that cuDNN takes in a call. Prints one JSON line for each size: microseconds (median of rounds of 20 calls in
one graph), the largest distances from float64 relative to the largest number, for some heads, and whether three repeats
gave the same bits. Exits with 1 where a repeat differs or a distance is above a few roundings.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from comparing import repeated
from gpu_timing import microseconds
from running import run

from engine.backends.cuda.card import Card
from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.layout import VALUES
from engine.backends.cuda.mixed.flash import Flash, Heads, Places
from engine.backends.cuda.mixed.hopper_attention import HopperAttention, numbers_bytes

Array = npt.NDArray[Any]
# gpt2-124m, andrea-120m, andrea-12m and char-4.8m, as many rows as a step takes at once
USUAL = ["12x64x1024x16", "12x64x1024x8/4", "12x32x1024x8/4", "8x32x256x32"]
SITE = 3


def narrow(x: Array, precision: str) -> Array:
    if precision == "fp16":
        return x.astype(np.float16).view(np.uint16)
    words = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def wide(words: Array, precision: str) -> Array:
    if precision == "fp16":
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def reference(q: Array, k: Array, v: Array, dy: Array, kept: Array | float) -> tuple[Array, ...]:
    """y, dq, dk, dv of one head in float64; kept: what each weight is multiplied by."""
    scale = 1 / np.sqrt(q.shape[1])
    scores = np.where(np.tri(len(q), dtype=bool), q @ k.T * scale, -np.inf)
    w = np.exp(scores - scores.max(1, keepdims=True))
    w /= w.sum(1, keepdims=True)
    dw = (dy @ v.T) * kept
    ds = w * (dw - (dw * w).sum(1, keepdims=True)) * scale
    return (w * kept) @ v, ds @ k, ds.T @ q, (w * kept).T @ dy


class Case:
    """Inputs of one size on the card, and what both give."""

    def __init__(self, card: Card, heads: Heads, rows: int, part: int, precision: str) -> None:
        self.card, self.heads, self.rows, self.part, self.precision = card, heads, rows, part, precision
        self.launch = Launcher(card)
        rng = np.random.default_rng(1)
        t, d = heads.context, heads.d_model
        one = rng.standard_normal((t, 4, heads.heads, heads.width), np.float32)
        # Random numbers for each row take longer than all else: rows are those of the first, moved along.
        each = np.stack([np.roll(narrow(one, precision).reshape(-1), 7919 * b).reshape(one.shape) for b in range(rows)])
        self.qkv, self.dy = np.ascontiguousarray(each[:, :, :3]), np.ascontiguousarray(each[:, :, 3])
        values = np.zeros(1, VALUES)
        values["key"], values["step"] = (5, 6), 7
        sizes = {
            "qkv": self.qkv.nbytes,
            "y": 2 * rows * t * d,
            "stats": 4 * rows * heads.heads * t,
            "workspace": max(heads.backward_workspace(part), numbers_bytes(heads, rows)),
            "dy": self.dy.nbytes,
            "dqkv": self.qkv.nbytes,
            "values": 64,
            "seed": 64,
        }
        self.memory = {name: card.driver.mem_alloc(size) for name, size in sizes.items()}
        self.sizes = sizes
        for name, array in (("qkv", self.qkv), ("dy", self.dy), ("values", values), ("seed", np.arange(8))):
            card.driver.memcpy_htod(self.memory[name], array)
        threshold = round(heads.dropout * 65536)
        self.mask = (SITE, threshold, 65536 / (65536 - threshold))
        self.flash = Flash(int(self.launch.stream.handle), precision)  # type: ignore[arg-type]
        self.own = HopperAttention(self.launch, "bfloat16" if precision == "bf16" else "float16")

    def places(self, first: int = 0) -> Places:
        m, h = {name: int(a) for name, a in self.memory.items()}, self.heads
        line = 2 * h.context * h.d_model * first
        return Places(
            m["qkv"] + 3 * line, m["y"] + line, m["stats"] + 4 * h.heads * h.context * first, m["workspace"],
            m["dy"] + line, m["dqkv"] + 3 * line, m["seed"], m["seed"], m["values"], first, self.mask,
        )  # fmt: skip

    def calls(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        if name == "own":
            places = self.places()
            return (
                lambda: self.own.forward(self.heads, self.rows, places),
                lambda: self.own.backward(self.heads, self.rows, places),
            )
        parts = [self.places(first) for first in range(0, self.rows, self.part)]

        def each(call: Callable[[Heads, int, Places], None]) -> Callable[[], None]:
            def run() -> None:
                for places in parts:
                    call(self.heads, self.part, places)

            return run

        return each(self.flash.forward), each(self.flash.backward)

    def results(self, name: str) -> list[Array]:
        """y, stats and dqkv, on memory that held NaN before."""
        for buffer in ("y", "stats", "dqkv", "workspace"):
            self.launch.fill(int(self.memory[buffer]), 0xFF, self.sizes[buffer])
        for call in self.calls(name):
            call()
        self.launch.synchronise()
        found = []
        for buffer, dtype in (("y", np.uint16), ("stats", np.float32), ("dqkv", np.uint16)):
            array = np.empty(self.sizes[buffer] // np.dtype(dtype).itemsize, dtype)
            self.card.driver.memcpy_dtoh(array, self.memory[buffer])
            found.append(array)
        return found

    def distances(self, found: list[Array]) -> list[float]:
        """Of y, dq, dk and dv from float64, relative to the largest number, over three heads."""
        h = self.heads
        y = found[0].reshape(self.rows, h.context, h.heads, h.width)
        dqkv = found[2].reshape(self.rows, h.context, 3, h.heads, h.width)
        worst = [0.0] * 4
        for b, head in {(0, 0), (self.rows // 2, h.heads // 2), (self.rows - 1, h.heads - 1)}:
            inputs = (*(self.qkv[b, :, i, head] for i in range(3)), self.dy[b, :, head])
            wanted = reference(*(wide(np.ascontiguousarray(x), self.precision) for x in inputs), 1.0)
            have = (y[b, :, head], *(dqkv[b, :, i, head] for i in range(3)))
            for number, (a, e) in enumerate(zip(have, wanted, strict=True)):
                distance = np.abs(wide(np.ascontiguousarray(a), self.precision) - e).max() / max(np.abs(e).max(), 1e-30)
                worst[number] = max(worst[number], float(distance) if np.isfinite(distance) else np.inf)
        return worst

    def free(self) -> None:
        for allocation in self.memory.values():
            allocation.free()


def parsed(size: str, dropout: float) -> tuple[Heads, int, int]:
    whole, _, part = size.partition("/")
    heads, width, tokens, rows = (int(n) for n in whole.split("x"))
    return Heads(heads, width, tokens, dropout), rows, int(part or rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=USUAL)
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="do not time")
    parser.add_argument("--own", action="store_true", help="leave cuDNN out")
    arguments = parser.parse_args()
    card, failed = Card(), False
    unit = 2.0**-8 if arguments.precision == "bf16" else 2.0**-11
    for size in arguments.sizes:
        case = Case(card, *parsed(size, arguments.dropout), arguments.precision)
        line: dict[str, Any] = {"size": size, "precision": arguments.precision, "dropout": arguments.dropout}
        for name in ("own",) if arguments.own else ("own", "cudnn"):
            found, repeats = repeated(partial(case.results, name))
            line[name] = {"repeats": repeats}
            if not arguments.dropout:
                line[name]["distances"] = [round(x, 5) for x in case.distances(found)]
                failed |= name == "own" and not max(line[name]["distances"]) < 4 * unit
            failed |= name == "own" and not repeats
            if not arguments.check:
                line[name]["us"] = [round(microseconds(case.launch, c, arguments.rounds), 1) for c in case.calls(name)]
        print(json.dumps(line), flush=True)
        case.free()
    return int(failed)


if __name__ == "__main__":
    run(main)
