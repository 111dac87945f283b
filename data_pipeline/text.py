"""Bytes to text and back, refusing what is not UTF-8."""

from data_pipeline.errors import TextError


def decode(data: bytes, name: str) -> str:
    """The text of a document. Raises TextError with the offset of the first byte that is not
    UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{name}: expected UTF-8, found byte 0x{data[error.start]:02x} at byte offset "
            f"{error.start} "
            f"({error.reason}): convert the document to UTF-8"
        ) from error


def check(text: str) -> None:
    """Raise TextError where `text` holds a lone surrogate, which no UTF-8 text can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"expected text, found the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}: "
            "remove it or read the text as UTF-8"
        ) from error


def show(character: str) -> str:
    """A character as an error message names it."""
    return f"{character!r} (U+{ord(character):04X})"
