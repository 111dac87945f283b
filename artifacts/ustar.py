"""The smallest part of the tar format (POSIX.1-1988, ustar) that holds plain files: nothing that any tar could not
unpack, and exactly one way to write each file.

A member is a header of 512 bytes, the content, and zero bytes up to a multiple of 512; the end is 1024 zero bytes. A
reader builds the header that name and size call for and compares it: so there are no links, devices, owners, times,
or second spellings to think about.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

from artifacts.errors import Corrupt, InvalidInput

BLOCK = 512
END = bytes(2 * BLOCK)
MAX_NAME = 100
MAX_SIZE = 8**11 - 1
"""Largest member, in bytes: eleven octal digits."""

PART = 4 * 2**20
"""Most bytes that are held of a member at once."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*", re.ASCII)


def is_name(name: str) -> bool:
    """Whether a member may be called so: at most 100 of A-Z a-z 0-9 _ . - in parts joined by /, none of which begins
    with a dot. So no name leads out of a folder."""
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def header(name: str, size: int) -> bytes:
    """The header of a member. InvalidInput for a name or size that it has no room for."""
    if not is_name(name) or not 0 <= size <= MAX_SIZE:
        raise InvalidInput(f"a capsule cannot hold a file {name!r} of {size} bytes")
    fields = [
        name.encode("ascii").ljust(100, b"\0"),
        b"0000644\0" + b"0000000\0" * 2,  # mode, owner, group
        b"%011o\0" % size,
        b"00000000000\0",  # time
        b" " * 8,  # the checksum counts as spaces in itself
        b"0" + bytes(100),  # a plain file, linked to nothing
        b"ustar\0" + b"00",
        bytes(32 + 32 + 16),  # names of owner and group, device
        bytes(155 + 12),  # prefix of the name, and the rest of the block
    ]
    block = b"".join(fields)
    return block.replace(b" " * 8, b"%06o\0 " % sum(block), 1)


def padding(size: int) -> bytes:
    """What follows a content of `size` bytes."""
    return bytes(-size % BLOCK)


class MemberReader:
    """Reads members one after the other, never more than a part of one at once. Corrupt, naming `what`, for anything
    that `header` and `padding` would not write."""

    def __init__(self, file: BinaryIO, what: str) -> None:
        self._file = file
        self.what = what

    def next(self) -> tuple[str, int] | None:
        """Name and size of the next member, whose content has to be read before the one after it; None at the end,
        after which nothing may follow."""
        block = self.take(BLOCK)
        if block == bytes(BLOCK):
            if self.take(BLOCK) != bytes(BLOCK) or self._file.read(1):
                raise Corrupt(f"{self.what}: something follows the end")
            return None
        name, size = self._named(block)
        if block != header(name, size):
            raise Corrupt(f"{self.what}: the header of {name!r} is not as a capsule's has to be")
        return name, size

    def content(self, size: int) -> Iterator[bytes]:
        """The content of the member, in parts; all of them have to be taken."""
        for at in range(0, size, PART):
            yield self.take(min(PART, size - at))
        if self.take(-size % BLOCK).strip(b"\0"):
            raise Corrupt(f"{self.what}: the padding is not zero")

    def take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise Corrupt(f"{self.what}: ends early")
        return data

    def _named(self, block: bytes) -> tuple[str, int]:
        try:
            name = block[:100].rstrip(b"\0").decode("ascii")
            size = int(block[124:135].decode("ascii"), 8)
        except ValueError as error:
            raise Corrupt(f"{self.what}: expected the header of a file, found something else") from error
        if not is_name(name) or size < 0:
            raise Corrupt(f"{self.what}: a file may not be called {name!r}")
        return name, size
