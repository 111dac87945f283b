"""Errors of the artifacts package. Each carries the exit code of the command line (see
docs/design.md)."""


class ArtifactError(Exception):
    """Base of every error that a user of a store can meet."""

    exit_code = 2


class InvalidInput(ArtifactError):
    """What the caller asked for is not allowed: a wrong name, dtype, hash, path or combination."""

    exit_code = 2


class Ambiguous(InvalidInput):
    """A hash prefix fits several records or bundles; `candidates` lists their full hashes."""

    def __init__(self, message: str, candidates: tuple[str, ...]) -> None:
        super().__init__(message)
        self.candidates = candidates


class ReadOnly(InvalidInput):
    """A write was asked of a store opened read-only or lying in a folder that cannot be written."""


class RemoteFailed(ArtifactError):
    """A place that a URL names cannot be reached, read or written. What was moved before stays."""


class RunLocked(InvalidInput):
    """Another process is writing this run."""


class RunDiffers(ArtifactError):
    """A run reached a step again with other bits than it had saved for that step before."""

    exit_code = 1


class Corrupt(ArtifactError):
    """Stored bytes are not what their name or their format says."""

    exit_code = 4


class Missing(Corrupt):
    """An object, record, run or file that something refers to is not there."""


class UnknownVersion(Corrupt):
    """The format or version is not one that this program reads."""


class NoSpace(ArtifactError):
    """Disk (or memory, on loading) is too small for what was asked."""

    exit_code = 6


class DamagedBundle(Corrupt):
    """The newest bundle of a run cannot be read; `fallback` is step and hash of the newest whole
    one, if any."""

    def __init__(self, message: str, fallback: tuple[int, str] | None) -> None:
        super().__init__(message)
        self.fallback = fallback


class SaveFailed(ArtifactError):
    """A bundle could not be saved; `cause` says why and lends its exit code, `last` is the newest
    whole bundle, if any."""

    def __init__(self, cause: BaseException, last: str | None) -> None:
        if last is None:
            remedy = "No bundle was saved before."
        else:
            remedy = f"The last whole bundle is {last}: go on from it with `reproduce resume {last}`"
        super().__init__(f"saving a bundle failed: {cause}\n{remedy}")
        # A medium that fails without saying how is as good as damaged.
        self.exit_code = getattr(cause, "exit_code", Corrupt.exit_code)
        self.cause = cause
        self.last = last
