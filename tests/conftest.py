"""What all tests share: the ``gpu`` and ``slow`` markers and the Hypothesis profile."""

from __future__ import annotations

import functools

import hypothesis
import pytest

# The same examples on every machine and in every run, however slow the machine.
hypothesis.settings.register_profile("samebits", derandomize=True, deadline=None)
hypothesis.settings.load_profile("samebits")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not cuda_gpu_present():
        pytest.skip("no CUDA GPU")


@functools.cache
def cuda_gpu_present() -> bool:
    """Whether PyCUDA can be imported and sees a device."""
    try:
        import pycuda.driver as cuda
    except ImportError:  # not installed, or installed without a driver library
        return False
    try:
        cuda.init()
    except cuda.Error:
        return False
    return bool(cuda.Device.count())
