"""The fastest algorithm for every product of an experiment's training step in the tier prod, on the card at hand.

    python benchmarks/tune_products.py [--precision bf16] [--rounds N] EXPERIMENT...

Takes the products that one step queues, with their shapes and places, times what the library proposes for each (at
most eight, twenty launches in one graph, the median of the rounds), and adds the fastest to
engine/backends/cuda/mixed/chosen.json. That changes the bits of later runs from scratch on this model of card: their
bundles say which algorithms they use. Prints one JSON line for each product: microseconds of the library's first
proposal, and of the fastest.
"""

import argparse
import json
from typing import Any

from gpu_step import RandomBatches, load
from gpu_timing import microseconds
from running import run

from engine.backends.cuda.mixed.backend import MixedBackend
from engine.backends.cuda.mixed.products import CHOSEN, Products, Shape, library_version
from engine.trainer import Trainer


def products_of_a_step(backend: MixedBackend) -> dict[Shape, tuple[Any, ...]]:
    """Each shape with the arguments of one call that has it."""
    calls: dict[Shape, tuple[Any, ...]] = {}
    multiply = Products.multiply

    def noted(self: Products, stream: int, sizes: Any, a: Any, b: Any, out: Any, **forms: Any) -> None:
        multiply(self, stream, sizes, a, b, out, **forms)
        strides, types = (a.stride, b.stride, out.stride), (a.dtype, out.dtype)
        forward = {name: forms[name] for name in ("a_by_k", "b_by_n", "batches", "epilogue")}
        forward["plus"] = bool(forms["plus"])
        calls[Shape(*sizes, strides=strides, types=types, **forward)] = (sizes, a, b, out, forms)

    Products.multiply = noted  # type: ignore[method-assign]
    try:
        backend._queue_step()
    finally:
        Products.multiply = multiply  # type: ignore[method-assign]
    backend.launcher.synchronise()
    return calls


def tune(backend: MixedBackend, shape: Shape, call: tuple[Any, ...], rounds: int) -> tuple[str, float, float]:
    """The fastest algorithm, the time of the library's first proposal, and its own."""
    products = backend.products
    sizes, a, b, out, forms = call
    stream = int(backend.launcher.stream.handle)

    def multiply() -> None:
        products.multiply(stream, sizes, a, b, out, **forms)

    product = products.describe_product(shape, (a.batch, b.batch, out.batch), (a.scales, b.scales))
    times = []
    for algorithm in products.proposals(product, 8):
        products.ready[shape] = product, algorithm
        times.append((microseconds(backend.launcher, multiply, rounds), bytes(algorithm).hex()))
    # Differences within the noise are not worth another sum: the first proposal stays unless beaten by 2 %.
    fastest = min(times)
    chosen = fastest if fastest[0] < 0.98 * times[0][0] else times[0]
    return chosen[1], times[0][0], chosen[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp8"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    tables = json.loads(CHOSEN.read_text(encoding="utf-8"))
    for name in arguments.experiments:
        model, train = load(name)
        train = train.model_copy(update={"precision": arguments.precision})
        trainer = Trainer(model, train, "prod", RandomBatches(model.vocab), threads=1, device="cuda")
        trainer.initialise()
        trainer.train_step()
        backend = trainer.backend
        assert isinstance(backend, MixedBackend)
        table = tables.setdefault(f"{backend.card.name}, cublasLt {library_version()}", {})
        for shape, call in products_of_a_step(backend).items():
            chosen, first, fastest = tune(backend, shape, call, arguments.rounds)
            table[shape.key] = chosen
            teraflops = 2e-6 * shape.m * shape.n * shape.k * shape.batches / fastest
            print(
                json.dumps({"product": shape.key, "first_us": first, "fastest_us": fastest, "tflops": teraflops}),
                flush=True,
            )
        trainer.close()
    CHOSEN.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    run(main)
