"""Memory on a card that tells what was written and what was not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from engine.backends.cuda.launching import Launcher
from tests.cuda.fake_card import Array

GUARD = 4096  # bytes behind every buffer


@contextmanager
def guarded(
    launcher: Launcher, given: Mapping[str, Array], made: Mapping[str, Array], scratch: Mapping[str, int] | None = None
) -> Iterator[dict[str, int]]:
    """Addresses by name of what is given, of what is to be made, in memory of ones (NaN as floats), and of scratch
    (bytes). At the end results are copied to `made`, and nothing has been written behind any buffer."""
    driver = launcher.card.driver
    sizes = {name: array.nbytes for name, array in {**given, **made}.items()} | dict(scratch or {})
    memory = {name: driver.mem_alloc(size + GUARD) for name, size in sizes.items()}
    for name, address in memory.items():
        driver.memset_d8(address, 0xFF, sizes[name] + GUARD)
    for name, array in given.items():
        driver.memcpy_htod(memory[name], np.ascontiguousarray(array))
    yield {name: int(address) for name, address in memory.items()}
    launcher.synchronise()
    for name, array in made.items():
        if array.size:
            driver.memcpy_dtoh(array, memory[name])
    guard = np.empty(GUARD, np.uint8)
    for name, address in memory.items():
        driver.memcpy_dtoh(guard, int(address) + sizes[name])
        assert guard.min() == 0xFF, f"written behind {name}"
        address.free()
