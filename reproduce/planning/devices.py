"""Devices that a plan can be made for without having them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from reproduce.errors import ReproduceError

_GIB = 2**30

CARDS: Mapping[str, tuple[str, float, int]] = {
    "gtx1650": ("NVIDIA GeForce GTX 1650", 3.75, 75),
    "rtx2060": ("NVIDIA GeForce RTX 2060", 5.625, 75),
    "rtx2080ti": ("NVIDIA GeForce RTX 2080 Ti", 10.3125, 75),
    "t4": ("NVIDIA T4", 15, 75),
    "rtx3050": ("NVIDIA GeForce RTX 3050", 7.5, 86),
    "rtx3060": ("NVIDIA GeForce RTX 3060", 11.25, 86),
    "rtx3070": ("NVIDIA GeForce RTX 3070", 7.5, 86),
    "rtx3080": ("NVIDIA GeForce RTX 3080", 9.375, 86),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 22.5, 86),
    "a10": ("NVIDIA A10", 22.5, 86),
    "a100-40": ("NVIDIA A100 40GB", 38, 80),
    "a100-80": ("NVIDIA A100 80GB", 78, 80),
    "rtx4060": ("NVIDIA GeForce RTX 4060", 7.5, 89),
    "rtx4070": ("NVIDIA GeForce RTX 4070", 11.25, 89),
    "rtx4080": ("NVIDIA GeForce RTX 4080", 15, 89),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 22.5, 89),
    "l4": ("NVIDIA L4", 22.5, 89),
    "l40s": ("NVIDIA L40S", 45, 89),
    "h100": ("NVIDIA H100", 78, 90),
    "h200": ("NVIDIA H200", 139, 90),
    "rtx5060": ("NVIDIA GeForce RTX 5060", 7.5, 120),
    "rtx5070": ("NVIDIA GeForce RTX 5070", 11.25, 120),
    "rtx5080": ("NVIDIA GeForce RTX 5080", 15, 120),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 30, 120),
}
"""Name on the command line -> its name, GiB that it leaves to programs, and ten times its compute capability.

Less than the vendor's number is left: a sixteenth goes for error correction of GDDR memory, or else to driver and
context, and 2 GiB of the cards with HBM (an H200 has 139 of its 141 free).
"""


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
    return Device(key, "cuda", int(gibibytes * _GIB), f"an {title} leaves", title, capability)
