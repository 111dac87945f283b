"""Small files that change (run state, index): one canonical JSON document under a line with its own
BLAKE3.

    <64 hexadecimal digits>\\n<canonical JSON>

Objects are checked by their name; these files have a fixed name, so they carry their hash.
"""

from pathlib import Path

from artifacts import canonical, durable
from artifacts.canonical import JSON
from artifacts.errors import Corrupt
from artifacts.hashing import hash_bytes

_SEAL_SIZE = 65

MAX_BYTES = canonical.MAX_BYTES + _SEAL_SIZE
"""Largest sealed file, in bytes."""


def seal(value: JSON) -> bytes:
    """The bytes of a sealed file."""
    document = canonical.dumps(value)
    return hash_bytes(document).encode("ascii") + b"\n" + document


def read_sealed(path: Path, what: str) -> JSON:
    """The value of a sealed file. Missing or Corrupt, naming `what`."""
    return unseal(durable.read_whole(path, MAX_BYTES, what), f"{what}: {path}")


def unseal(data: bytes, what: str) -> JSON:
    """The value of a sealed file with the bytes `data`. Corrupt, naming `what`."""
    document = data[_SEAL_SIZE:]
    if data[:_SEAL_SIZE] != hash_bytes(document).encode("ascii") + b"\n":
        raise Corrupt(f"{what} does not match the hash in its first line")
    return canonical.loads(document, what)
