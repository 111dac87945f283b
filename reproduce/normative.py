"""The sources that decide bits, by the hash of each: a record names them, and a run is made with one set of them."""

from pathlib import Path

from artifacts import hash_bytes, sources_digest
from reproduce.errors import ReproduceError

ROOT = Path(__file__).resolve().parent.parent

PATTERNS = (
    "data_pipeline/**/*.py",
    "engine/*.py",
    "engine/backends/*.py",
    "engine/numerics/*.py",
    "engine/operations/*.py",
    "reproduce/state.py",
)


def normative_sources(root: Path = ROOT) -> dict[str, str]:
    """BLAKE3 of every normative source file, by its path with `/`."""
    files: set[Path] = set()
    for pattern in PATTERNS:
        found = set(root.glob(pattern))
        if not found:
            raise ReproduceError(
                f"expected the sources {pattern} below {root}, found none: this installation is not whole"
            )
        files |= found
    return {path.relative_to(root).as_posix(): hash_bytes(path.read_bytes()) for path in sorted(files)}


def normative_digest(root: Path = ROOT) -> str:
    """One hash over all of them."""
    return sources_digest(normative_sources(root))
