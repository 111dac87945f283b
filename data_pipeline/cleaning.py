"""Cleaning steps: named, declared in the configuration, applied to each document in the declared
order."""

import unicodedata
from collections.abc import Callable, Iterable
from typing import Literal, get_args

from data_pipeline.errors import TextError
from data_pipeline.text import show

CleaningStep = Literal["strip_bom", "newlines", "nfc"]
"""`strip_bom` drops one U+FEFF at the start; `newlines` makes CRLF and lone CR into LF; `nfc`
composes characters (Unicode normalisation form C)."""


def clean(text: str, steps: Iterable[CleaningStep], name: str) -> str:
    """One document after the steps, in their order. Raises TextError, naming the document."""
    for step in steps:
        text = _STEPS[step](text, name)
    return text


def _strip_bom(text: str, name: str) -> str:
    return text.removeprefix("\ufeff")


def _newlines(text: str, name: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _nfc(text: str, name: str) -> str:
    """Normalise, once every character is known to this Python's Unicode tables.

    Normalisation of assigned characters never changes between Unicode versions; that of unassigned
    ones may, so refusing them keeps the bits independent of the Python version.
    """
    for character in sorted(set(text)):
        if unicodedata.category(character) == "Cn" and not _is_noncharacter(ord(character)):
            raise TextError(
                f"{name}: cleaning step nfc needs characters of Unicode "
                f"{unicodedata.unidata_version}, found the "
                f"unassigned {show(character)} at character {text.index(character)}: remove it, "
                "drop the step or "
                "use a newer Python"
            )
    return unicodedata.normalize("NFC", text)


def _is_noncharacter(code: int) -> bool:
    return code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF


_STEPS: dict[CleaningStep, Callable[[str, str], str]] = {
    "strip_bom": _strip_bom,
    "newlines": _newlines,
    "nfc": _nfc,
}
assert set(_STEPS) == set(get_args(CleaningStep))
