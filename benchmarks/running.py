"""How benchmarks start: what a machine lacks is said in a line, with that error's exit code."""

import sys
from collections.abc import Callable
from typing import NoReturn

from engine.errors import EngineError


def run(main: Callable[[], int | None]) -> NoReturn:
    """End the process with what `main` returns."""
    try:
        code = main() or 0
    except EngineError as error:
        print(f"Error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
