"""Gradients of several shards, or of two sets, added by the tree (k_join_gradients of optimizer_mixed.cu)."""

from engine.backends.cuda.launching import Launcher
from engine.backends.cuda.run import THREADS, ceiling
from engine.backends.cuda.sources import Unit


def join(launch: Launcher, unit: Unit, parts: int, count: int, size: int, out: int, adds: bool) -> None:
    """out fp32 [size] is, or has added, the tree over parts [count, size]; `unit`: optimizer_mixed."""
    values = (parts, count, size, size, out, int(adds))
    launch(unit, "k_join_gradients", "PiqqPi", (ceiling(size, 4 * THREADS),), (THREADS,), *values)
