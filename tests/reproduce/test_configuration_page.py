"""docs/configuration.md says what the code checks."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_tool_writes() -> None:
    program = "from tools.configuration_page import page; import sys; sys.stdout.reconfigure(encoding='utf-8'); "
    program += "sys.stdout.write(page())"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
    page = (ROOT / "docs" / "configuration.md").read_bytes()
    assert run.stdout == page, "run .venv/bin/python tools/configuration_page.py"


def test_every_key_is_described() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    empty = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert not empty
