"""Errors of the engine that a user can cause or meet; each carries the process exit code."""


class EngineError(Exception):
    """Base of all engine errors."""

    exit_code = 2


class SpecError(EngineError):
    """The model or training section of the configuration is not usable."""


class PlanRefused(EngineError):
    """The plan needs more memory than there is."""

    exit_code = 5


class NonFinite(EngineError):
    """A NaN or an infinity appeared; names the step and the tensor."""

    exit_code = 7


class TokenError(EngineError):
    """A token number that the model has no embedding for."""


class StateMismatch(EngineError):
    """A saved state does not fit the model it is loaded into."""

    exit_code = 4


class UnsoundMachine(EngineError):
    """A start-up self-test failed: this machine or process does not compute IEEE arithmetic as needed."""

    exit_code = 3
