"""Devices that a plan can be made for without having them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from reproduce.errors import ReproduceError

_GIB = 2**30

CARDS: Mapping[str, tuple[str, int, int]] = {
    "gtx1650": ("NVIDIA GeForce GTX 1650", 4, 75),
    "rtx2060": ("NVIDIA GeForce RTX 2060", 6, 75),
    "rtx2080ti": ("NVIDIA GeForce RTX 2080 Ti", 11, 75),
    "t4": ("NVIDIA T4", 16, 75),
    "rtx3050": ("NVIDIA GeForce RTX 3050", 8, 86),
    "rtx3060": ("NVIDIA GeForce RTX 3060", 12, 86),
    "rtx3070": ("NVIDIA GeForce RTX 3070", 8, 86),
    "rtx3080": ("NVIDIA GeForce RTX 3080", 10, 86),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24, 86),
    "a10": ("NVIDIA A10", 24, 86),
    "a100-40": ("NVIDIA A100 40GB", 40, 80),
    "a100-80": ("NVIDIA A100 80GB", 80, 80),
    "rtx4060": ("NVIDIA GeForce RTX 4060", 8, 89),
    "rtx4070": ("NVIDIA GeForce RTX 4070", 12, 89),
    "rtx4080": ("NVIDIA GeForce RTX 4080", 16, 89),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24, 89),
    "l4": ("NVIDIA L4", 24, 89),
    "l40s": ("NVIDIA L40S", 48, 89),
    "h100": ("NVIDIA H100", 80, 90),
    "h200": ("NVIDIA H200", 141, 90),
    "rtx5060": ("NVIDIA GeForce RTX 5060", 8, 120),
    "rtx5070": ("NVIDIA GeForce RTX 5070", 12, 120),
    "rtx5080": ("NVIDIA GeForce RTX 5080", 16, 120),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 32, 120),
}
"""Name on the command line -> its name, its memory in GiB and ten times its compute capability, as the vendor gives
them."""


@dataclass(frozen=True)
class Device:
    """Where a plan is to run. backend: which planner; memory: bytes; what: how messages call that memory; title: how
    they call a card; capability: ten times its compute capability."""

    name: str
    backend: str  # cpu or cuda
    memory: int
    what: str
    title: str = ""
    capability: int | None = None  # None: not a card


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
        return Device("cuda", "cuda", card.free_memory(), f"{card.name} has free", card.name, card.capability)
    key = name.lower().replace(" ", "").replace("_", "")
    if key not in CARDS:
        longer = [known for known in CARDS if key and known.startswith(key)]
        close = longer or difflib.get_close_matches(key[:40], CARDS, 1)
        hint = f"did you mean {' or '.join(close)}?" if close else f"expected cpu, cuda or one of {', '.join(CARDS)}"
        raise ReproduceError(f"--device: there is no {name[:40]!r} in the list of devices: {hint}")
    title, gibibytes, capability = CARDS[key]
    return Device(key, "cuda", gibibytes * _GIB, f"an {title} has", title, capability)
