"""Files that the user names on the command line."""

from pathlib import Path

from reproduce.errors import ReproduceError
from reproduce.outputs import write_text


def require_place(path: Path) -> None:
    """Raises ReproduceError, before any work is done, if `path` cannot be a file to write."""
    if path.is_dir():
        raise ReproduceError(f"{path} is a folder: name a file, such as {path / 'NAME'}")
    if not path.parent.is_dir():
        raise ReproduceError(f"{path}: there is no such folder, {path.parent}: make it or name another file")


def write_asked(path: Path, text: str) -> None:
    """Writes a file that the user named, in a folder that is there. Raises ReproduceError naming it."""
    require_place(path)
    try:
        write_text(path, text)
    except PermissionError as error:
        raise ReproduceError(f"{path} cannot be written: {error.strerror}: name a place that is yours") from error
