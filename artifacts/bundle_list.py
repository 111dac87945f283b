"""A sealed file that lists bundles by step."""

from collections.abc import Mapping
from pathlib import Path

from artifacts.canonical import JSON
from artifacts.document import make_document, open_document
from artifacts.errors import Corrupt, InvalidInput, RunDiffers
from artifacts.hashing import is_hash, require_hash
from artifacts.sealed import read_sealed, seal
from artifacts.store import Store


def write_bundle_list(store: Store, path: Path, kind: str, bundles: Mapping[int, str]) -> None:
    """Replaces the list at `path` atomically."""
    store.write_file(path, seal(list_document(kind, bundles)))


def read_bundle_list(path: Path, kind: str, what: str) -> dict[int, str]:
    """The bundles of a list by step, ascending. Missing or Corrupt, naming `what`."""
    return open_bundle_list(read_sealed(path, what), kind, f"{what}: {path}")


def list_document(kind: str, bundles: Mapping[int, str]) -> JSON:
    """The document of a list."""
    return make_document(kind, {"bundles": list_entries(bundles)})


def list_entries(bundles: Mapping[int, str]) -> list[JSON]:
    """The entries of a list, ascending by step."""
    return [{"bundle": bundles[step], "step": step} for step in sorted(bundles)]


def open_bundle_list(document: JSON, kind: str, what: str) -> dict[int, str]:
    """The inverse of `list_document`. Corrupt, naming `what`."""
    return read_entries(open_document(document, kind, {"bundles"}, what)["bundles"], what)


def read_entries(entries: JSON, what: str) -> dict[int, str]:
    """The inverse of `list_entries`. Corrupt, naming `what`."""
    if not isinstance(entries, list):
        raise Corrupt(f"{what} has no list of bundles")
    bundles: dict[int, str] = {}
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != {"bundle", "step"}:
            raise Corrupt(f"{what} has an entry that is not a step and a bundle")
        step, bundle = entry["step"], entry["bundle"]
        if not _is_step(step) or not isinstance(bundle, str) or not is_hash(bundle):
            raise Corrupt(f"{what} has an entry that is not a step and a bundle")
        assert isinstance(step, int)
        if bundles and step <= next(reversed(bundles)):
            raise Corrupt(f"{what} is not sorted by step, each once")
        bundles[step] = bundle
    return bundles


def merge_bundles(before: Mapping[int, str], more: Mapping[int, str], what: str) -> dict[int, str]:
    """Both lists in one. RunDiffers, naming `what`, if they have different bundles for one step."""
    merged = dict(before)
    for step, bundle in more.items():
        if not _is_step(step):
            raise InvalidInput(f"{what}: step {step!r} is not a natural number")
        require_hash(bundle, f"{what}: bundle of step {step}")
        if merged.setdefault(step, bundle) != bundle:
            raise RunDiffers(
                f"{what}: step {step} was saved as bundle {merged[step]} before and is now "
                f"{bundle}; the same step has to have the same bits: compare both with "
                "`reproduce diff`"
            )
    return dict(sorted(merged.items()))


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
