"""What can go wrong with the device, each with one line that says what to do."""

from engine.errors import EngineError


class DeviceUnavailable(EngineError):
    """No usable GPU, driver, PyCUDA or compiler: this machine cannot run on device cuda."""

    exit_code = 3


class DeviceLost(EngineError):
    """The card failed during the run; what was saved before is whole."""

    exit_code = 3
