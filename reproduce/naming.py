"""What a word on the command line means: a hash, its first digits, or `final` for the pipeline's last bundle."""

import re

from artifacts import Bundle, Resolved, Store, hash_bytes, load_bundle, read_folder, resolve
from artifacts.errors import Ambiguous, InvalidInput
from reproduce.errors import Inconclusive, ReproduceError
from reproduce.outputs import read_json
from reproduce.project import Project

FINAL = "final"
REMEDY = "run `dvc repro`"

_DIGITS = re.compile(r"[0-9a-f]{4,64}", re.ASCII)


def are_digits(word: str) -> bool:
    """Whether it has the form of a hash or of its first digits."""
    return _DIGITS.fullmatch(word) is not None


def require_digits(word: str) -> None:
    """Raises ReproduceError for what can be no hash, with a guess at what was meant."""
    refuse_final(word)
    if are_digits(word):
        return
    if "." in word or "/" in word:
        raise ReproduceError(f"{word}: there is no such file, and a hash is 4 to 64 lower-case hexadecimal digits")
    raise ReproduceError(
        f"{word!r}: expected 4 to 64 lower-case hexadecimal digits of a hash: `reproduce log` lists what there is"
    )


def refuse_final(word: str) -> None:
    """For where a record is meant."""
    if word == FINAL:
        raise ReproduceError(f"`{FINAL}` is not taken here: give the hash that `reproduce show` prints")


def digits(project: Project, word: str) -> str:
    """`word` itself, or the hash of the pipeline's final bundle for `final`. Raises Inconclusive if there is none."""
    if word != FINAL:
        return word
    path = project.outputs / "run.json"
    if not path.is_file():
        raise Inconclusive(
            f"there is no final bundle yet, {path} is missing: `dvc repro` makes or finishes it, "
            "and `reproduce log` lists what is saved so far"
        )
    return str(read_json(path, REMEDY)["final_bundle"])


def committed_record(project: Project, prefix: str) -> tuple[str, bytes] | None:
    """Hash and content of the record in run/, where Git puts it, if its hash begins so."""
    path = project.outputs / "record.json"
    if not path.is_file():
        return None
    content = path.read_bytes()
    name = hash_bytes(content)
    return (name, content) if name.startswith(prefix) else None


def final_from_folder(project: Project, name: str) -> Bundle:
    """The pipeline's final bundle, `name`, as DVC keeps it. Raises Inconclusive if it is not there, Corrupt."""
    folder = project.outputs / "bundle"
    if not folder.is_dir():
        remedy = "make it with `dvc repro`, or, if a remote has it, get it with `dvc pull`"
        raise Inconclusive(f"the final bundle is not in {folder}: {remedy}")
    return read_folder(folder, name)


def find_state(project: Project, store: Store, word: str) -> tuple[Resolved, Bundle | None]:
    """The record or bundle that `word` means, with the bundle if it is one; `final` need not be in the store."""
    name = digits(project, word)
    try:
        found = resolve(store, name)
    except Ambiguous:
        raise
    except InvalidInput:
        if word != FINAL:
            raise
        return Resolved("bundle", name, ()), final_from_folder(project, name)
    return found, None if found.kind == "record" else load_bundle(store, found.hash)
