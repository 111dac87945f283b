"""From the name of a device to a plan and the backend that executes it."""

from typing import Literal

import psutil

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.plan import Plan, make_plan
from engine.program import Program
from engine.self_test import check_machine
from engine.spec import Tier, TrainSpec

Device = Literal["cpu", "cuda"]


def open_backend(program: Program, train: TrainSpec, tier: Tier, device: Device, threads: int) -> tuple[Plan, Backend]:
    """Test the device, plan for it and allocate. Raises UnsoundMachine, DeviceUnavailable or PlanRefused.

    On the CPU the tier prod runs in the arithmetic of `portable`: good for checking a run, not for its bits.
    """
    if device == "cpu":
        check_machine()
        plan = make_plan(program, train, tier, threads)
        plan.check_fits(psutil.virtual_memory().available, "this machine")
        return plan, CpuBackend(program, plan, train)
    # Only here, so that nothing of CUDA is imported where it is not asked for.
    from engine.backends.cuda.opening import open_cuda_backend

    return open_cuda_backend(program, train, tier)
