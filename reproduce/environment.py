"""The machine and software that something was computed with. It enters attestations, never a hash of bits."""

import locale
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import threadpoolctl  # type: ignore[import-untyped]

from engine.errors import UnsoundMachine
from engine.numerics.self_test import check_float_environment
from reproduce.configuration import available_cores

LIBRARIES = ("blake3", "llvmlite", "numba", "numpy", "tokenizers", "zstandard")

CARD_LIBRARIES = ("nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "pycuda")

SWITCHES = ("BLIS_", "CUDA_", "KMP_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_", "VECLIB_")
"""Beginnings of environment variables that change how libraries compute."""


def fingerprint(root: Path, threads: int) -> dict[str, Any]:
    """Everything that may explain a difference, as JSON."""
    return {
        "blas": blas(),
        "cores": available_cores(),
        "cpu": cpu(),
        "float": _float_modes(),
        "git": git_commit(root),
        "gpu": gpu(),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "random"),
        "libraries": {name: _version(name) for name in (*LIBRARIES, *CARD_LIBRARIES)},
        "locale": _locale(),
        "os": {
            "libc": " ".join(platform.libc_ver()).strip(),
            "machine": platform.machine(),
            "release": platform.release(),
            "system": platform.system(),
        },
        "python": {"implementation": sys.implementation.name, "version": platform.python_version()},
        "switches": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SWITCHES)},
        "threads": threads,
    }


def hardware_class(device: str = "cpu") -> dict[str, Any]:
    """What the bits of the tiers `debug` and `prod` depend on.

    On the CPU the products are the BLAS's, which picks its kernel by processor and cuts large products by threads; all
    else is compiled as for the tier `portable`. On a GPU they are kernels of this engine, compiled for the card; the
    tier `prod` takes NVIDIA's for products and attention.
    """
    if device != "cpu":
        return {"device": device, "gpu": gpu(), "libraries": {name: _version(name) for name in CARD_LIBRARIES}}
    return {
        "device": device,
        "blas": blas(),
        "cpu": cpu()["model"],
        "libraries": {name: _version(name) for name in ("llvmlite", "numba", "numpy")},
        "machine": platform.machine(),
    }


def cpu() -> dict[str, Any]:
    """Model and instruction-set flags of the processor, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    model = fields.get("model name") or _sysctl("machdep.cpu.brand_string") or platform.processor()
    return {"flags": sorted((fields.get("flags") or fields.get("Features") or "").split()), "model": model}


def blas() -> list[dict[str, Any]]:
    """The BLAS libraries in this process."""
    import numpy  # noqa: F401  # so that its BLAS is in this process

    return sorted(
        (
            {
                "kernel": str(entry.get("architecture", "unknown")),
                "library": str(entry["internal_api"]),
                "threads": int(entry["num_threads"]),
                "version": str(entry.get("version")),
            }
            for entry in threadpoolctl.threadpool_info()
            if entry["user_api"] == "blas"
        ),
        key=lambda entry: sorted(entry.items()),
    )


def gpu() -> list[dict[str, str]]:
    """Model, memory and driver of every NVIDIA GPU that the driver's own tool lists; empty without."""
    fields = ("name", "memory.total", "driver_version", "compute_cap")
    listed = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    rows = (line.split(",") for line in (listed or "").splitlines())
    return [dict(zip(fields, map(str.strip, row), strict=True)) for row in rows if len(row) == len(fields)]


def git_commit(root: Path) -> dict[str, Any] | None:
    """The commit of the project and whether its tree was clean; None without Git."""
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return {"clean": changes == "", "commit": commit}


def _float_modes() -> str:
    try:
        check_float_environment()
    except UnsoundMachine as error:
        return f"not IEEE-754: {str(error).splitlines()[1].strip()}"
    return "IEEE-754"


def _locale() -> str:
    return ".".join(part or "C" for part in locale.getlocale())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _sysctl(name: str) -> str | None:
    return _output(["sysctl", "-n", name]) if platform.system() == "Darwin" else None


def _output(command: list[str]) -> str | None:
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode:
        return None
    return result.stdout.decode("utf-8", errors="replace").strip()
