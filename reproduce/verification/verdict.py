"""What a verification found out, and what that comes to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["bit-exact", "within tolerance", "differs", "inconclusive", "corrupt"]
EXIT_CODES: Mapping[Verdict, int] = {
    "bit-exact": 0,
    "within tolerance": 0,
    "differs": 1,
    "inconclusive": 3,
    "corrupt": 4,
}
ADVICE: Mapping[Verdict, str] = {
    "differs": "verify on another machine, to learn whether the record or this one is the odd one out; "
    "`reproduce diff` compares two records or runs",
    "corrupt": "`reproduce fsck` lists all that is damaged in the store; `reproduce pull URL` or a capsule brings "
    "whole copies. If the record contradicts itself, ask whoever made it",
}
"""What to do after a verdict; that of inconclusive is in its reason."""


@dataclass
class Findings:
    """What the replay of one segment came to.

    exact: every bit compared was the same. differences: what contradicts the record. distances: for a record with a
    tolerance, how far what was compared lies apart, and how far it may.
    """

    compared: dict[str, int] = field(default_factory=lambda: {"digests": 0, "bundles": 0, "evaluations": 0})
    differences: list[dict[str, Any]] = field(default_factory=list)
    distances: list[dict[str, Any]] = field(default_factory=list)
    exact: bool = True
    seconds: float = 0.0


@dataclass
class Report:
    """What was found out; all of it goes into the attestation and the JSON."""

    record: str
    steps: tuple[int, int] = (0, 0)
    verdict: Verdict = "inconclusive"
    reason: str = ""
    compared: dict[str, int] = field(default_factory=lambda: {"digests": 0, "bundles": 0, "evaluations": 0})
    differences: list[dict[str, Any]] = field(default_factory=list)
    distances: list[dict[str, Any]] = field(default_factory=list)
    expected: str = ""
    segments: list[dict[str, Any]] = field(default_factory=list)
    seed: int | None = None
    sources_changed: list[str] = field(default_factory=list)
    dataset_from: str = ""
    seconds: float = 0.0

    def conclude(self, verdict: Verdict, reason: str) -> None:
        self.verdict, self.reason = verdict, reason

    def add(self, start: int, last: int, findings: Findings) -> None:
        """Takes in what the replay from bundle `start` to step `last` came to."""
        for name, count in findings.compared.items():
            self.compared[name] += count
        self.differences += findings.differences
        self.distances += findings.distances
        state = "differs" if findings.differences else "bit-exact" if findings.exact else "within tolerance"
        self.segments.append(
            {"first": start + 1, "last": last, "seconds": round(findings.seconds, 3), "verdict": state}
        )

    def as_json(self) -> dict[str, Any]:
        """Without the time it took: two verifications that find the same say the same."""
        segments = [{k: v for k, v in segment.items() if k != "seconds"} for segment in self.segments]
        return {
            "compared": self.compared,
            "dataset_from": self.dataset_from,
            "differences": self.differences,
            "distances": self.distances,
            "expected": self.expected,
            "reason": self.reason,
            "record": self.record,
            "seed": self.seed,
            "segments": segments,
            "sources_changed": self.sources_changed,
            "steps": list(self.steps),
            "verdict": self.verdict,
        }
