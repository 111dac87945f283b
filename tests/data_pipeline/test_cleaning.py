"""Cleaning steps."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import TextError
from data_pipeline.cleaning import CleaningStep, clean

NASTY = "\ufeffa\r\nb\rc\n\ufeffe\u0301\0"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), NASTY),
        (("strip_bom",), NASTY[1:]),
        (("newlines",), "\ufeffa\nb\nc\n\ufeffe\u0301\0"),
        (("nfc",), "\ufeffa\r\nb\rc\n\ufeff\u00e9\0"),
        (("newlines", "strip_bom", "nfc"), "a\nb\nc\n\ufeff\u00e9\0"),
    ],
)
def test_each_step_does_what_it_says_and_no_more(steps: tuple[CleaningStep, ...], expected: str) -> None:
    assert clean(NASTY, steps, "d") == expected


def test_only_one_bom_goes() -> None:
    assert clean("\ufeff\ufeffa", ("strip_bom",), "d") == "\ufeffa"


def test_mixed_line_ends() -> None:
    assert clean("\r\r\n\n\r", ("newlines",), "d") == "\n\n\n\n"


def test_nfc_refuses_what_this_unicode_does_not_know() -> None:
    with pytest.raises(TextError) as caught:
        clean("ab\U000e1000", ("nfc",), "play")
    assert "play" in str(caught.value)
    assert "U+E1000" in str(caught.value)
    assert "character 2" in str(caught.value)


def test_nfc_takes_noncharacters() -> None:
    assert clean("\ufffe\uffff\ufdd0\U0010ffff", ("nfc",), "d") == "\ufffe\uffff\ufdd0\U0010ffff"


@given(st.text(st.characters(exclude_categories=["Cs", "Cn"])))
def test_every_step_changes_nothing_the_second_time(text: str) -> None:
    for step in ("newlines", "nfc"):
        once = clean(text, (step,), "d")
        assert clean(once, (step,), "d") == once
    assert unicodedata.is_normalized("NFC", clean(text, ("nfc",), "d"))
    assert "\r" not in clean(text, ("newlines",), "d")
