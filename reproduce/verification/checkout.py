"""Replaying with the sources that a record was made with: the Git commit that has them, checked out for the while."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from artifacts import hash_bytes
from reproduce.errors import Inconclusive
from reproduce.project import Project
from reproduce.verification.datasets import Found
from reproduce.yaml_edit import set_values

_QUICK_SECONDS = 120


def find_commit(root: Path, sources: Mapping[str, str]) -> str | None:
    """The newest commit of the repository at `root`, on any branch, whose normative sources are these; None if there
    is none, or no Git."""
    listed = _git(root, "rev-list", "--all", "--full-history", "HEAD", "--", *sorted(sources))
    if listed is None:
        return None
    known: dict[str, str] = {}
    for commit in listed.decode("ascii").split():
        blobs = _blobs(root, commit)
        if sources.keys() <= blobs.keys() and all(
            _content_hash(root, blobs[path], known) == wanted for path, wanted in sources.items()
        ):
            return commit
    return None


def _blobs(root: Path, commit: str) -> dict[str, str]:
    """Git's names of all files of a commit, by path below `root`."""
    listed = _git(root, "ls-tree", "-r", "-z", commit) or b""
    found = {}
    for entry in listed.split(b"\0"):
        if entry:
            head, _, path = entry.partition(b"\t")
            found[os.fsdecode(path)] = head.split()[2].decode("ascii")
    return found


def _content_hash(root: Path, blob: str, known: dict[str, str]) -> str:
    """BLAKE3 of a blob's bytes, each read once."""
    if blob not in known:
        content = _git(root, "cat-file", "blob", blob)
        known[blob] = "" if content is None else hash_bytes(content)
    return known[blob]


def verify_in_checkout(
    project: Project,
    store: Path,
    commit: str,
    record: str,
    words: Sequence[str],
    threads: int,
    dataset: Found | None,
    live: bool,
) -> tuple[int, dict[str, Any] | None]:
    """`reproduce verify` as `commit` has it, in a working tree of its own removed afterwards. It attests by itself.
    dataset: the record's, if it is at hand. Returns its exit code and, unless `live`, what it prints as JSON."""
    place = project.private() / "checkouts" / commit[:16]
    _remove(project.root, place)
    place.parent.mkdir(exist_ok=True)
    if _git(project.root, "worktree", "add", "--force", "--detach", str(place), commit) is None:
        raise Inconclusive(f"Git could not check out {commit}: `git worktree add --detach {place} {commit}` says why")
    try:
        _furnish(store, place, threads, dataset)
        command = [sys.executable, "-m", "reproduce", "verify", record, *words]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command if live else [*command, "--json"],
            cwd=place,
            env=environment,
            stdout=None if live else subprocess.PIPE,
            check=False,
        )
        return done.returncode, None if live else _parsed(done.stdout, commit)
    finally:
        _remove(project.root, place)


def _furnish(store: Path, place: Path, threads: int, dataset: Found | None) -> None:
    """Lets the checkout see the store and the record's data if that is at hand; it verifies both itself."""
    params = place / "params.yaml"
    text = params.read_text(encoding="utf-8")
    values: dict[tuple[str, ...], str | int] = {
        ("run", "store"): json.dumps(str(store.absolute())),
        ("run", "threads"): threads,
    }
    params.write_text(set_values(text, values, str(params)), encoding="utf-8", newline="")
    if dataset is not None:
        shutil.copytree(dataset.folder, place / "data" / "dataset", dirs_exist_ok=True)


def _parsed(output: bytes, commit: str) -> dict[str, Any]:
    try:
        found = json.loads(output)
    except ValueError as error:
        raise Inconclusive(
            f"`reproduce verify` of commit {commit} did not end with a verdict; its message is above"
        ) from error
    assert isinstance(found, dict)
    return found


def _remove(root: Path, place: Path) -> None:
    if place.exists():
        _git(root, "worktree", "remove", "--force", str(place))
        with suppress(FileNotFoundError):
            shutil.rmtree(place)


def _git(root: Path, *words: str) -> bytes | None:
    """What Git prints; None if there is no Git, no repository, or it refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_QUICK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
