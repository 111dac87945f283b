"""Errors of the command line. Each carries the exit code of docs/design.md."""


class ReproduceError(Exception):
    """Base: wrong use, unless a subclass says otherwise."""

    exit_code = 2


class ConfigurationError(ReproduceError):
    """The configuration cannot be used; the message lists every fault."""


class Changed(ReproduceError):
    """A bundle belongs to another configuration, dataset or tokenizer than the present one."""


class Busy(ReproduceError):
    """Another process does the same work and did not end in time."""


class Differs(ReproduceError):
    """This machine comes to other bits."""

    exit_code = 1


class Inconclusive(ReproduceError):
    """This machine cannot say: something that is needed is missing."""

    exit_code = 3


class CorruptOutput(ReproduceError):
    """A file of the pipeline is not what the pipeline wrote."""

    exit_code = 4


class PlanRefused(ReproduceError):
    """What the configuration asks for does not fit."""

    exit_code = 5


class Interrupted(ReproduceError):
    """Stopped by a signal (or because the process that started it is gone) after saving."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
