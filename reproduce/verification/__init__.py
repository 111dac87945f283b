"""Does this machine come to the same bits as a record says? Integrity first, then environment, then replay."""

from reproduce.verification.verifying import Request, verify

__all__ = ["Request", "verify"]
