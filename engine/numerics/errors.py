"""Errors of the numerics that a user can cause."""

from engine.errors import EngineError


class NumericsDomainError(EngineError):
    """An argument lies outside the domain on which a numeric function is defined."""

    exit_code = 2
