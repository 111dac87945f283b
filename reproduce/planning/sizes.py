"""Bytes for people and from people."""

import re

from reproduce.errors import ReproduceError

_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_LARGEST = 2**63 - 1
_DIGITS = 19
# Units as others write them: 4GB, 4 gb, 4G, 4gib.
_MEANT = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([kmgt])(?:i?b)?\s*", re.ASCII | re.IGNORECASE)


def size(value: int) -> str:
    """`1.5 GiB`."""
    for unit, factor in _UNITS.items():
        if value >= factor > 1:
            return f"{value / factor:,.1f} {unit}"
    return f"{value} B"


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `1.5 GiB`, `512MiB` or `1000000B`. Raises ReproduceError for anything else."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    whole, point, part = text.removesuffix(unit).strip().partition(".")
    digits = whole + part
    number = digits.isascii() and digits.isdecimal() and whole and bool(point) == bool(part)
    if number and unit and len(digits) <= _DIGITS:
        value: int = int(digits) * _UNITS[unit] // int(10 ** len(part))
        if value <= _LARGEST:
            return value
    if meant := _MEANT.fullmatch(text):
        remedy = f": did you mean {meant[1]}{meant[2].upper()}iB?"
    else:
        remedy = f": write {text.strip()}GiB or whatever the unit is" if number and not unit and len(digits) < 7 else ""
    raise ReproduceError(
        f"expected a size with its unit, such as 4GiB or 512MiB ({', '.join(_UNITS)}), found {text[:40]!r}{remedy}"
    )
