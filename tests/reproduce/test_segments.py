"""Which steps a verification replays: every choice covers what was asked for, once, from bundles that are there."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduce.errors import ReproduceError
from reproduce.verification.segments import choose, parse_steps, pieces, whole

RECORD = "ab" * 32
BUNDLES = st.sets(st.integers(0, 200), min_size=2, max_size=12).map(sorted)


@given(BUNDLES, st.data())
def test_pieces_cover_the_steps_once_and_start_at_bundles(bundles, data):
    first = data.draw(st.integers(bundles[0] + 1, bundles[-1]))
    last = data.draw(st.integers(first, bundles[-1]))
    found = pieces(bundles, first, last)
    assert [step for s in found for step in range(s.first, s.last + 1)] == list(range(first, last + 1))
    assert all(s.start in bundles and not any(s.start < b < s.last for b in bundles) for s in found)
    (one,) = whole(bundles, first, last)
    assert (one.start, one.last) == (found[0].start, last)


@given(BUNDLES, st.integers(1, 15), st.integers(0, 2**32))
def test_chosen_segments_are_distinct_whole_and_repeatable(bundles, count, seed):
    found = choose(bundles, count, seed, RECORD)
    assert found == choose(bundles, count, seed, RECORD)
    assert len({s.start for s in found}) == len(found) == min(count, len(bundles) - 1)
    ends = dict(pairwise(bundles))
    assert all((s.first, s.last) == (s.start + 1, ends[s.start]) for s in found)


def test_another_seed_or_record_chooses_otherwise():
    bundles = range(0, 1000, 10)
    chosen = {tuple(choose(bundles, 3, seed, record)) for seed in range(20) for record in (RECORD, "cd" * 32)}
    assert len(chosen) == 40


def test_every_segment_is_chosen_by_some_seed():
    assert {choose(range(6), 1, seed, RECORD)[0].start for seed in range(200)} == set(range(5))


def test_steps_of_a_run_that_begins_later():
    assert parse_steps(None, 40, 60) == (41, 60)
    assert parse_steps("50:", 40, 60) == (50, 60)
    with pytest.raises(ReproduceError, match="expected 41 <= A <= B <= 60"):
        parse_steps("3:50", 40, 60)
