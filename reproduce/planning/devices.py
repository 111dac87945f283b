"""Devices that a plan can be made for without having them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from reproduce.errors import ReproduceError

_GIB = 2**30

CARDS: Mapping[str, tuple[str, int]] = {
    "gtx1650": ("NVIDIA GeForce GTX 1650", 4),
    "rtx2060": ("NVIDIA GeForce RTX 2060", 6),
    "rtx2080ti": ("NVIDIA GeForce RTX 2080 Ti", 11),
    "t4": ("NVIDIA T4", 16),
    "rtx3050": ("NVIDIA GeForce RTX 3050", 8),
    "rtx3060": ("NVIDIA GeForce RTX 3060", 12),
    "rtx3070": ("NVIDIA GeForce RTX 3070", 8),
    "rtx3080": ("NVIDIA GeForce RTX 3080", 10),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24),
    "a10": ("NVIDIA A10", 24),
    "a100-40": ("NVIDIA A100 40GB", 40),
    "a100-80": ("NVIDIA A100 80GB", 80),
    "rtx4060": ("NVIDIA GeForce RTX 4060", 8),
    "rtx4070": ("NVIDIA GeForce RTX 4070", 12),
    "rtx4080": ("NVIDIA GeForce RTX 4080", 16),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24),
    "l4": ("NVIDIA L4", 24),
    "l40s": ("NVIDIA L40S", 48),
    "h100": ("NVIDIA H100", 80),
    "h200": ("NVIDIA H200", 141),
    "rtx5060": ("NVIDIA GeForce RTX 5060", 8),
    "rtx5070": ("NVIDIA GeForce RTX 5070", 12),
    "rtx5080": ("NVIDIA GeForce RTX 5080", 16),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 32),
}
"""Name on the command line -> its name and its memory in GiB, as the vendor gives it."""


@dataclass(frozen=True)
class Device:
    """Where a plan is to run. backend: which planner; memory: bytes; what: how messages call that memory."""

    name: str
    backend: str  # cpu or cuda
    memory: int
    what: str


def present_card() -> Device | None:
    """The card of this machine, if there is one that can be used."""
    from engine.backends.cuda.errors import DeviceUnavailable

    try:
        return find_device("cuda")
    except DeviceUnavailable:
        return None


def find_device(name: str) -> Device:
    """The device of that name: `cpu` is this machine, `cuda` its card. Raises ReproduceError naming those there are,
    and DeviceUnavailable if there is no card."""
    if name == "cpu":
        return Device("cpu", "cpu", psutil.virtual_memory().available, "this machine has free")
    if name == "cuda":
        from engine.backends.cuda.card import Card

        card = Card()
        return Device("cuda", "cuda", card.free_memory(), f"{card.name} has free")
    key = name.lower().replace(" ", "").replace("_", "")
    if key not in CARDS:
        close = difflib.get_close_matches(key[:40], CARDS, 1)
        hint = f"did you mean {close[0]}?" if close else f"expected cpu, cuda or one of {', '.join(CARDS)}"
        raise ReproduceError(f"--device: there is no {name[:40]!r} in the list of devices: {hint}")
    title, gibibytes = CARDS[key]
    return Device(key, "cuda", gibibytes * _GIB, f"an {title} has")
