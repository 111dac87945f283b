"""Verifying a copy in a process of its own, with other surroundings."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reproduce.errors import ReproduceError
from reproduce.normative import ROOT, normative_sources
from reproduce.selftest.lab import Lab


def verify_elsewhere(
    lab: Lab,
    *,
    environment: Mapping[str, str] | None = None,
    flush_to_zero: bool = False,
    comment_in: str = "",
) -> dict[str, Any]:
    """`lab.verify()` in a new process: with other environment variables, with the processor set to flush subnormals
    to zero, or with a comment at the end of one source (which then is the one that runs)."""
    words = [sys.executable, "-m", "reproduce.selftest.elsewhere", str(lab.project.root), lab.record]
    if flush_to_zero:
        words.append("--flush-to-zero")
    if comment_in:
        words += ["--sources", str(_copy_of_sources(lab.project.root / "sources", comment_in)), comment_in]
    done = subprocess.run(
        words,
        env={**os.environ, **(environment or {}), "PYTHONPATH": str(ROOT)},
        cwd=lab.project.root,
        capture_output=True,
        check=False,
    )
    try:
        return {**json.loads(done.stdout), "code": done.returncode}
    except ValueError as error:
        said = done.stderr.decode("utf-8", "backslashreplace").strip()
        raise ReproduceError(f"a verification in another process ended without a verdict: {said}") from error


def _copy_of_sources(folder: Path, changed: str) -> Path:
    for path in normative_sources():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    with (folder / changed).open("a", encoding="utf-8", newline="") as out:
        out.write("# Without effect.\n")
    return folder


def _run_from(folder: Path, changed: str) -> None:
    """Loads one module from `folder`, and has the normative sources read there; all others stay where they are, so that
    nothing has to be compiled again."""
    import importlib.util

    import reproduce.normative as normative

    name = changed.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, folder / changed)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    original = normative.normative_sources
    import reproduce.verification.verifying as verifying

    def there(root: Path = folder) -> dict[str, str]:
        return original(root)

    verifying.normative_sources = there  # type: ignore[attr-defined]


def main(words: list[str]) -> int:
    """What the new process does; prints the report."""
    from reproduce.configuration import load_configuration
    from reproduce.project import Project

    root, record, *more = words
    if "--sources" in more:
        _run_from(Path(more[1]), more[2])
    from reproduce.verification import Request, verify

    project = Project(Path(root))
    configuration = load_configuration(project.params)
    if "--flush-to-zero" in more:
        from reproduce.selftest.control_word import flush_to_zero

        flush_to_zero()
    return verify(project, configuration.run, record, Request(as_json=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
