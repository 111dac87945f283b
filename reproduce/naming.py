"""What a word on the command line means: a hash, its first digits, or `final` for the pipeline's last bundle."""

from artifacts import Bundle, Resolved, Store, load_bundle, read_folder, resolve
from artifacts.errors import Ambiguous, InvalidInput
from reproduce.errors import Inconclusive
from reproduce.outputs import read_json
from reproduce.project import Project

FINAL = "final"
REMEDY = "run `dvc repro`"


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


def final_from_folder(project: Project, name: str) -> Bundle:
    """The pipeline's final bundle, `name`, as DVC keeps it. Raises Inconclusive if it is not there, Corrupt."""
    folder = project.outputs / "bundle"
    if not folder.is_dir():
        raise Inconclusive(f"the final bundle is not in {folder}: get it with `dvc pull`, or make it with `dvc repro`")
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
