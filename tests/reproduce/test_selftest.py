"""The sabotage suite that users have: everything is found, and what could not be found would be said."""

import json

import pytest

from reproduce.selftest import report
from reproduce.selftest.faults import Fault, faults
from reproduce.selftest.lab import quietly


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_every_fault_is_found_for_what_it_is(fault, spoilt):
    if not fault.applies():
        pytest.skip("sets the x86 control word")
    outcome = report._try(fault, spoilt, spoilt.project.root.parent / "copy")
    assert outcome.caught, outcome.found


def test_there_are_as_many_as_promised():
    found = faults()
    assert len({fault.name for fault in found if not fault.harmless}) >= 20
    assert len({fault.name for fault in found if fault.harmless}) >= 4


def test_an_altered_attestation_with_its_new_hash_is_said_to_be_beyond_it(spoilt):
    assert report.rehashed_attestation_is_accepted(spoilt)


def test_a_fault_that_is_missed_is_said_and_exits_with_1(monkeypatch):
    """The self-test itself can fail: here nothing is spoilt, and differs at a step that it does not differ at."""
    clean = Fault("nothing at all", lambda lab: lab.verify(), "differs", 3)
    early = Fault("found elsewhere", faults()[0].spoil, "differs", 11)
    monkeypatch.setattr(report, "faults", lambda: [clean, early, faults()[2]])
    code, said = quietly(lambda: report.selftest(True))
    found = json.loads(said)
    assert code == 1
    assert [entry["as_it_should_be"] for entry in found["faults"]] == [False, False, True]
    assert "not signed" in found["not_shown"][0]
    code, said = quietly(lambda: report.selftest(False))
    assert code == 1
    assert said.count("MISSED") == 2
    assert "1 of 3 as they should be" in said
