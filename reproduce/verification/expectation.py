"""What a record promises on this machine: every bit, or a distance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts import Record
from reproduce.configuration import differences
from reproduce.environment import hardware_class
from reproduce.errors import Inconclusive
from reproduce.verification.distances import Tolerance


@dataclass(frozen=True)
class Expectation:
    """`tolerance` is None where every bit has to be the same; `why` in words, for people."""

    tolerance: Tolerance | None
    why: str

    @property
    def name(self) -> str:
        return "bit-exact" if self.tolerance is None else "within tolerance"


def expectation(record: Record, device: str = "cpu") -> Expectation:
    """Only what the tier's promise depends on decides. Raises Inconclusive where the record promises nothing here."""
    if record.tier == "portable":
        return Expectation(None, "the tier portable promises the same bits on every machine")
    apart = class_differences(record.hardware or {}, device)
    if not apart:
        return Expectation(None, f"this machine is of the class that the record's tier {record.tier} depends on")
    listed = "; ".join(apart)
    if (record.tolerance or {}).get("method") == "none":
        raise Inconclusive(
            f"a record of the tier {record.tier} promises its bits only on its class of machines, and this one "
            f"declares no tolerance for others: verify on such a machine. Different here: {listed}"
        )
    return Expectation(
        Tolerance.read(record.tolerance),
        f"the bits of the tier {record.tier} depend on what is different here: {listed}",
    )


def class_differences(there: Mapping[str, Any], device: str = "cpu") -> list[str]:
    """Where the class of this machine, computing on `device`, is not `there`, in lines."""
    return differences(there, hardware_class(device))
