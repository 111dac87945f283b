"""Errors that a user of the data pipeline can cause.

Each class carries the exit code that the command line ends with: 2 usage or configuration, 4
corrupt, 6 no space.
"""


class DataError(Exception):
    """Base of every error of this package; the message says what was expected, what was found and
    what to do."""

    exit_code = 2


class SourceError(DataError):
    """A source could not give its documents: nothing matches, the network or pip failed, a name is
    unsafe."""


class TextError(DataError):
    """Text that cannot be used as it is: not UTF-8, a lone surrogate, a character outside the
    vocabulary."""


class TooShortError(DataError):
    """The text is too short for what is asked of it: an empty split, fewer tokens than one
    window."""


class StorageError(DataError):
    """A file or directory could not be read or written, or must not be replaced."""


class CorruptDataError(DataError):
    """Bytes differ from the hash that was pinned or recorded, or a file is missing or
    unexpected."""

    exit_code = 4


class NoSpaceError(DataError):
    """The filesystem is full or a quota is reached; nothing half-written is left."""

    exit_code = 6
