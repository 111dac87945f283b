"""What a configuration needs, before anything is allocated."""

from dataclasses import dataclass
from math import prod

import psutil

from engine.plan import make_plan
from engine.program import build_program
from reproduce.configuration import Configuration
from reproduce.errors import PlanRefused, ReproduceError

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "B": 1}
# Forward and backward take two and four operations per parameter and token.
_OPERATIONS_PER_PARAMETER = 6


@dataclass(frozen=True)
class Estimate:
    """Memory, disk and work. Sizes in bytes; `memory` is the arena, `by_category` counts shared places twice."""

    parameters: int
    memory: int
    by_category: dict[str, int]
    bundle: int
    bundles: int
    tokens: int
    operations: int


def estimate(configuration: Configuration, threads: int) -> Estimate:
    """The plan of a configuration for a number of threads."""
    program = build_program(configuration.model)
    train = configuration.train
    plan = make_plan(program, train, configuration.tier, threads)
    parameters = sum(prod(p.shape) for p in program.parameters)
    every = configuration.run.save_every_steps
    tokens = train.steps * train.batch * configuration.model.context
    return Estimate(
        parameters=parameters,
        memory=plan.arena_bytes,
        by_category=plan.totals(),
        bundle=3 * 4 * parameters + 36 * train.steps,
        bundles=2 + (train.steps - 1) // every,
        tokens=tokens,
        operations=_OPERATIONS_PER_PARAMETER * parameters * tokens,
    )


def require_memory(found: Estimate, budget: int | None) -> None:
    """Raises PlanRefused if the arena is larger than the budget, or than the memory that is free here."""
    available = psutil.virtual_memory().available
    limit, what = (available, "this machine has free") if budget is None else (budget, "the budget is")
    if found.memory > limit:
        largest = max(found.by_category, key=lambda name: found.by_category[name])
        raise PlanRefused(
            f"the plan needs {size(found.memory)} of memory, {what} {size(limit)}; most of it is for {largest} "
            f"({size(found.by_category[largest])}). Use more train.shards (smaller shards), a shorter model.context, "
            "model.attention=tiled or a smaller model"
        )


def table(found: Estimate) -> str:
    """The estimate for people."""
    rows = [
        ("parameters", f"{found.parameters:,}"),
        ("memory", size(found.memory)),
        *((f"  {name}", size(value)) for name, value in sorted(found.by_category.items())),
        ("one bundle", size(found.bundle)),
        ("bundles", f"{found.bundles:,} ({size(found.bundle * found.bundles)} before compression)"),
        ("tokens to train on", f"{found.tokens:,}"),
        ("work", f"{found.operations:.2e} operations"),
    ]
    return "\n".join(f"{name:<20} {value:>14}" for name, value in rows)


def size(value: int) -> str:
    """Bytes for people."""
    for unit in ("GiB", "MiB", "KiB"):
        if value >= _UNITS[unit]:
            return f"{value / _UNITS[unit]:,.1f} {unit}"
    return f"{value} B"


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512 MiB` or `1000000`. Raises ReproduceError for anything else."""
    for unit, factor in _UNITS.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.isdecimal():
            return int(number) * factor
    if text.isdecimal():
        return int(text)
    raise ReproduceError(f"expected a size such as 4GiB, 512MiB or 1000000, found {text!r}")
