"""Doing all faults, and saying what was found."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduce.display import duration, say
from reproduce.errors import ReproduceError
from reproduce.selftest.faults import Fault, faults, rehashed_attestation_is_accepted
from reproduce.selftest.lab import Lab, make_lab

UNSIGNED = (
    "an attestation that is altered and given the hash of its new content cannot be told from a true one: attestations "
    "are not signed, so they say who claims what and prove nothing. Records and bundles can be checked by replaying"
)


@dataclass(frozen=True)
class Outcome:
    """One fault, and what verification said. `caught` is also true of something harmless that was let pass."""

    fault: Fault
    caught: bool
    found: str
    seconds: float


def selftest(as_json: bool, keep: Callable[[Fault], bool] = lambda fault: True) -> int:
    """Trains, spoils, verifies, says so; 0 if everything was caught, 1 if not."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="samebits-selftest-") as folder:
        if not as_json:
            say("training a small model to spoil copies of it")
        lab = make_lab(Path(folder) / "true")
        true = lab.verify()
        if true["verdict"] != "bit-exact":
            raise ReproduceError(
                f"the run of the self-test itself is not bit-exact here: {true['reason']}. Nothing can be tested on "
                "it: `reproduce verify` would fail in the same way"
            )
        outcomes = []
        for number, fault in enumerate(fault for fault in faults() if keep(fault)):
            if not fault.applies():
                continue
            outcome = _try(fault, lab, Path(folder) / str(number))
            outcomes.append(outcome)
            if not as_json:
                say(_line(outcome))
        unsigned = rehashed_attestation_is_accepted(lab.copy(Path(folder) / "unsigned"))
    missed = [outcome for outcome in outcomes if not outcome.caught]
    seconds = time.monotonic() - started
    if as_json:
        say(json.dumps(_as_json(outcomes, unsigned, seconds), indent=2, sort_keys=True))
    else:
        if unsigned:
            say(f"not shown  {UNSIGNED}")
        say(f"{len(outcomes) - len(missed)} of {len(outcomes)} as they should be ({duration(seconds)})")
    return 1 if missed else 0


def _try(fault: Fault, lab: Lab, folder: Path) -> Outcome:
    clock = time.monotonic()
    try:
        found = fault.spoil(lab.copy(folder))
    except ReproduceError as error:
        return Outcome(fault, False, str(error), time.monotonic() - clock)
    return Outcome(fault, _as_expected(fault, found), _in_words(found), time.monotonic() - clock)


def _as_expected(fault: Fault, found: dict[str, Any]) -> bool:
    """Verdict, place and what has to be named."""
    if found["verdict"] != fault.verdict:
        return False
    if fault.step is not None and (not found["differences"] or found["differences"][0]["step"] != fault.step):
        return False
    text = json.dumps({name: found[name] for name in ("differences", "reason", "sources_changed")})
    return all(words in text for words in fault.says)


def _in_words(found: dict[str, Any]) -> str:
    return f"{found['verdict']}: {str(found['reason']).splitlines()[0]}"


def _line(outcome: Outcome) -> str:
    word = "harmless" if outcome.fault.harmless else "caught"
    state = word if outcome.caught else "MISSED"
    return f"{state:<9}  {outcome.fault.name}\n             {outcome.found}"


def _as_json(outcomes: list[Outcome], unsigned: bool, seconds: float) -> dict[str, Any]:
    return {
        "faults": [
            {
                "as_it_should_be": outcome.caught,
                "expected_step": outcome.fault.step,
                "expected_verdict": outcome.fault.verdict,
                "fault": outcome.fault.name,
                "found": outcome.found,
                "harmless": outcome.fault.harmless,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in outcomes
        ],
        "not_shown": [UNSIGNED] if unsigned else [],
        "seconds": round(seconds, 3),
    }
