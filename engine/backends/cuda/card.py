"""The card: found, checked, and asked for memory. All of PyCUDA that the rest needs comes from here."""

from importlib import import_module
from typing import Any

from engine.backends.cuda.errors import DeviceUnavailable

OLDEST_DRIVER = 13000  # CUDA 13.0, as the compiler's code needs it
OLDEST_CAPABILITY = (7, 5)


class Card:
    """The current process's card (CUDA_VISIBLE_DEVICES chooses which) with its primary context made current."""

    def __init__(self) -> None:
        try:
            import pycuda.driver as driver
        except ImportError as error:
            raise DeviceUnavailable(
                f"device cuda needs PyCUDA, which cannot be imported ({error}). Build it with `pip install pycuda` (it "
                "wants a CUDA 13 toolkit and NumPy), or set run.device to cpu. To plan for a card without having one, "
                "name it: reproduce plan --device h200"
            ) from error
        try:
            driver.init()
            count = driver.Device.count()
        except driver.Error as error:
            raise DeviceUnavailable(f"the CUDA driver cannot be used: {error}. Set run.device to cpu") from error
        if count == 0:
            raise DeviceUnavailable("device cuda needs a CUDA GPU, found none. Set run.device to cpu")
        version = driver.get_driver_version()
        if version < OLDEST_DRIVER:
            raise DeviceUnavailable(
                f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, at least "
                f"{OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10} is needed: update the driver"
            )
        device = driver.Device(0)
        capability = device.compute_capability()
        if capability < OLDEST_CAPABILITY:
            raise DeviceUnavailable(
                f"{device.name()} has compute capability {capability[0]}.{capability[1]}, at least "
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} is needed. Set run.device to cpu"
            )
        try:
            import_module("pycuda.autoprimaryctx")  # keeps the primary context current until exit
        except driver.Error as error:
            raise DeviceUnavailable(f"{device.name()} cannot be opened: {error}") from error
        self.driver: Any = driver
        self.name: str = device.name()
        self.capability: int = 10 * capability[0] + capability[1]
        self.processors: int = device.get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
        self.shared_limit: int = device.get_attribute(driver.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    def free_memory(self) -> int:
        """Bytes that are free now."""
        free, _ = self.driver.mem_get_info()
        return int(free)
