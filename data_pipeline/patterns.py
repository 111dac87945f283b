"""Patterns over POSIX names: one definition for files on disk and members of an archive.

`*` stands for any characters within one component, `?` for one, `**` as a whole component for any
number of components, none included. As in a shell, none of them matches a leading dot, so
`.DS_Store` and the like stay out. Every other character, brackets included, stands for itself; case
counts.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from data_pipeline.errors import SourceError


def unsafe_reason(name: str) -> str | None:
    """Why `name` is no plain relative POSIX name; None where it is one."""
    if "\0" in name:
        return "it holds a NUL"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "it has an empty, '.' or '..' component"
    return None


def _check(pattern: str) -> str:
    if (reason := unsafe_reason(pattern)) is not None:
        raise ValueError(
            f"expected a relative path or pattern with '/' between components, found {pattern!r}: {reason}"
        )
    if any("**" in part and part != "**" for part in pattern.split("/")):
        raise ValueError(f"expected '**' as a whole component, found {pattern!r}")
    return pattern


Pattern = Annotated[str, AfterValidator(_check)]
"""A relative POSIX path or pattern, checked when the configuration is read."""


def in_order(names: Iterable[str]) -> list[str]:
    """The distinct names sorted by their UTF-8 bytes: independent of directory order and locale."""
    return sorted(set(names), key=lambda name: name.encode("utf-8"))


def select(names: Iterable[str], pattern: str) -> list[str]:
    """The names that `pattern` matches."""
    matcher = _compile(pattern)
    return [name for name in names if matcher.fullmatch(name)]


def on_disk(root: Path, name: str) -> bytes:
    """The path of the POSIX name `name` below `root`, as bytes.

    Names are UTF-8 on disk whatever the locale says, so Python must not translate them.
    """
    return os.path.join(os.fsencode(root), name.encode("utf-8"))


def files_matching(root: Path, pattern: str) -> list[str]:
    """POSIX names, relative to `root`, of the files that `pattern` matches, in no promised order.

    Links to files are followed; links to directories only where the pattern spells them out.
    Raises SourceError for a name that is not UTF-8.
    """
    parts = pattern.split("/")
    fixed = 0
    while fixed < len(parts) and not _is_wild(parts[fixed]):
        fixed += 1
    if fixed == len(parts):
        return [pattern] if os.path.isfile(on_disk(root, pattern)) else []
    start = on_disk(root, "/".join(parts[:fixed]))
    if not os.path.isdir(start):
        return []
    names = []
    for folder, _, files in os.walk(start, onerror=_raise):
        for file in files:
            path = os.path.join(folder, file)
            if os.path.isfile(path):
                names.append(_utf8_name(os.path.relpath(path, os.fsencode(root))))
    return select(names, pattern)


def _is_wild(part: str) -> bool:
    return "*" in part or "?" in part


def _compile(pattern: str) -> re.Pattern[str]:
    parts = pattern.split("/")
    out = []
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if part == "**":
            out.append(r"(?:(?!\.)[^/]+/)*" + (r"(?!\.)[^/]+" if last else ""))
            continue
        if part[0] in "*?":
            out.append(r"(?!\.)")
        out.extend({"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)) for char in part)
        if not last:
            out.append("/")
    return re.compile("".join(out))


def _utf8_name(name: bytes) -> str:
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"file name {name!r} is not UTF-8: rename it") from error


def _raise(error: OSError) -> None:
    raise error
