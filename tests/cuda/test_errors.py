"""Every way in which a card can be missing or too small ends in one clear line and the right exit code."""

import sys
from types import ModuleType
from typing import Any

import pytest

from engine.backends.cuda.errors import DeviceUnavailable
from engine.backends.cuda.opening import cuda_plan, open_cuda_backend
from engine.errors import PlanRefused, SpecError
from engine.program import build_program
from tests.cuda.pairs import model, train


class FakeError(Exception):
    pass


def fake_driver(*, count: int = 1, version: int = 13000, capability: tuple[int, int] = (9, 0)) -> ModuleType:
    """A module that looks like pycuda.driver as far as the checks at start go."""

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        @staticmethod
        def count() -> int:
            return count

        def name(self) -> str:
            return "Some Card"

        def compute_capability(self) -> tuple[int, int]:
            return capability

    driver = ModuleType("pycuda.driver")
    parts: dict[str, Any] = {
        "Error": FakeError, "init": lambda: None, "Device": Device, "get_driver_version": lambda: version,
    }  # fmt: skip
    for name, value in parts.items():
        setattr(driver, name, value)
    return driver


def install(monkeypatch: pytest.MonkeyPatch, driver: ModuleType | None) -> None:
    package = ModuleType("pycuda")
    if driver is not None:
        package.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)  # type: ignore[arg-type]


def open_it() -> None:
    open_cuda_backend(build_program(model()), train(), "portable")


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (None, ["PyCUDA", "run.device"]),
        (fake_driver(count=0), ["found none", "run.device"]),
        (fake_driver(version=12080), ["CUDA 12.8", "13.0", "update the driver"]),
        (fake_driver(capability=(7, 0)), ["Some Card", "7.0", "7.5"]),
    ],
)
def test_a_card_that_cannot_be_used(
    driver: ModuleType | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, driver)
    with pytest.raises(DeviceUnavailable) as caught:
        open_it()
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message
    assert not [w for w in words if w not in message], message


def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fake_driver()

    def fail() -> None:
        raise FakeError("no device")

    monkeypatch.setattr(driver, "init", fail)
    install(monkeypatch, driver)
    with pytest.raises(DeviceUnavailable, match="no device"):
        open_it()


def test_too_long_a_context_is_refused_before_any_card_is_asked() -> None:
    with pytest.raises(SpecError, match="65536"):
        cuda_plan(build_program(model(context=65537)), train(), "portable")


def test_nothing_of_cuda_is_imported_for_the_cpu() -> None:
    import subprocess

    code = "import engine.trainer, sys; print([m for m in sys.modules if 'cuda' in m or m.startswith('pycuda')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_a_full_card_refuses_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.backends.cuda.card import Card

    monkeypatch.setattr(Card, "free_memory", lambda self: 1000)
    with pytest.raises(PlanRefused) as caught:
        open_it()
    assert caught.value.exit_code == 5
    assert "NVIDIA" in str(caught.value) and "MiB" in str(caught.value)
