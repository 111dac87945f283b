"""A training state of GPT-2's shape with values like those of a trained model; made the same way everywhere.

Weights are normal, first moments normal with a scale of their own per parameter, second moments positive and spread
over many powers of two. The lowest bits are random, as after real steps, so nothing compresses better than it would.
"""

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

State = dict[str, NDArray[Any]]


def shapes(layers: int, d: int, vocab: int, context: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a GPT-2 by name; 12, 768, 50304 and 1024 make 124 million."""
    found: dict[str, tuple[int, ...]] = {"embed.token": (vocab, d), "embed.position": (context, d)}
    for layer in range(layers):
        block = f"block{layer}"
        for name, rows, columns in (
            ("attn_qkv", 3 * d, d),
            ("attn_out", d, d),
            ("mlp_up", 4 * d, d),
            ("mlp_down", d, 4 * d),
        ):
            found[f"{block}.{name}.weight"] = (rows, columns)
            found[f"{block}.{name}.bias"] = (rows,)
        for name in ("norm1", "norm2"):
            found[f"{block}.{name}.gain"] = found[f"{block}.{name}.bias"] = (d,)
    found["norm.gain"] = found["norm.bias"] = (d,)
    return found


def make_state(layers: int, vocab: int) -> State:
    """Weights, m and v as fp32."""
    random = np.random.default_rng(124)
    state: State = {}
    for name, shape in shapes(layers, 768, vocab, 1024).items():
        scale = np.float32(np.exp(random.normal(0, 1)) * 1e-5)
        state[f"weights/{name}"] = random.standard_normal(shape, np.float32) * np.float32(0.05)
        moment = random.standard_normal(shape, np.float32)
        spread = np.exp(random.standard_normal(shape, np.float32))
        state[f"m/{name}"] = moment * spread * scale
        state[f"v/{name}"] = (spread * scale) ** 2 * (1 + np.abs(moment))
    return state


def steps_later(state: State, steps: int) -> None:
    """Changes every number as so many small steps would, in place."""
    random = np.random.default_rng(steps)
    for name, array in state.items():
        if name.startswith("weights/"):
            array += random.standard_normal(array.shape, np.float32) * np.float32(steps * 1e-5)
        else:
            array *= 1 + random.standard_normal(array.shape, np.float32) * np.float32(0.05)


def touch_memory(size: int) -> None:
    """Makes pages of `size` bytes and gives them back.

    A virtual machine may have returned free memory to its host, and whoever touches it next waits for the host. Before
    everything that is measured, here and in the peers' process, this has just been done. What earlier measurements left
    for the disk is written first.
    """
    os.sync()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1
