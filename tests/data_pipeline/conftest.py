"""Python processes with another environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Run code in a fresh interpreter with changed environment variables; return what it prints."""

    def run(code: str, cwd: Path, *arguments: str, **environment: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            capture_output=True,
        )
        assert result.returncode == 0, result.stderr.decode("utf-8", "replace")
        return result.stdout.decode("utf-8")

    return run
