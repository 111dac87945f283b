"""The start-up test: does this machine, with this NumPy, Numba and LLVM, compute the bits that it must?

Trains a model of a few hundred parameters for two steps and compares the step digest with the one on record. That runs
every kernel of the portable tier once (the widths are ragged on purpose), so a compiler, processor or library that
computes anything differently is found before it can reach a result.
"""

from functools import cache

import numpy as np

from engine.backends.cpu import CpuBackend
from engine.digest import step_digest
from engine.errors import UnsoundMachine
from engine.initial import fill_initial
from engine.numerics.self_test import check_float_environment
from engine.plan import make_plan
from engine.program import build_program
from engine.schedule import step_values
from engine.spec import ModelSpec, TrainSpec

MODEL = ModelSpec(
    vocab=37,
    context=11,
    d_model=12,
    heads=3,
    layers=1,
    hidden=20,
    activation="gelu",
    dropout=0.1,
    linear_bias=True,
    norm_parameters=True,
    tied=True,
    init_std=0.5,
    attention="tiled",
)
TRAIN = TrainSpec(
    steps=2,
    batch=4,
    shards=2,
    seed=1,
    learning_rate=0.01,
    final_learning_rate=0.001,
    warmup_steps=1,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    weight_decay=0.1,
    decayed=["matrix"],
    clip_norm=1.0,
)
DIGEST = "2c90e815dac11e0b41d83849f83f8d3ead09a7d991f4d4dfed25375e18339bad"


def micro_digest(threads: int = 1) -> str:
    """Step digest (hex) after both steps of the micro training."""
    program = build_program(MODEL)
    backend = CpuBackend(program, make_plan(program, TRAIN, "portable", threads), TRAIN)
    for number, parameter in enumerate(program.parameters):
        fill_initial(parameter, number, TRAIN.seed, backend.parameters[parameter.name])
    shape = (TRAIN.batch, MODEL.context)
    tokens = np.arange(TRAIN.batch * MODEL.context, dtype=np.int32).reshape(shape)
    digest = b""
    for step in range(TRAIN.steps):
        ids, targets = (tokens * (step + 2)) % MODEL.vocab, (tokens * (step + 3) + 1) % MODEL.vocab
        gradients, loss = backend.run_shards(step, ids, targets)
        backend.update(gradients, backend.gradient_norm(gradients), step_values(TRAIN, step))
        mean = np.float32(loss * 2.0**-30 / tokens.size)
        digest = step_digest(step + 1, mean, backend.sums)
    backend.close()
    return digest.hex()


@cache
def check_machine() -> None:
    """Raise UnsoundMachine unless this process computes IEEE-754 arithmetic and the digest on record."""
    check_float_environment()
    found = micro_digest()
    if found != DIGEST:
        raise UnsoundMachine(
            f"the start-up test expected the step digest {DIGEST}, found {found}: this machine or its "
            "libraries compute something differently, and no result from here could be trusted. Please "
            "report the processor and the versions of NumPy, Numba and llvmlite"
        )
