"""The one hash of the project: BLAKE3 with 256 bits, written as 64 lower-case hexadecimal
digits."""

import re

from blake3 import blake3

from artifacts.errors import InvalidInput

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


def hash_bytes(data: bytes | memoryview) -> str:
    """BLAKE3 of `data` as 64 hexadecimal digits."""
    return blake3(data).hexdigest()


def is_hash(text: object) -> bool:
    """Whether `text` is a hash as this package writes it."""
    return isinstance(text, str) and _HASH.fullmatch(text) is not None


def require_hash(text: str, what: str = "hash") -> str:
    """`text` itself; InvalidInput if it is not 64 lower-case hexadecimal digits."""
    if not is_hash(text):
        raise InvalidInput(f"{what}: expected 64 lower-case hexadecimal digits, found {text!r}")
    return text
