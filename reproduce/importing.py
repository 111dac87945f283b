"""Finding the record that somebody means, also one that only came with the project's files."""

from pathlib import Path

from artifacts import (
    Record,
    Store,
    hash_bytes,
    import_folder,
    list_runs,
    resolve,
    save_bundle,
    write_digests,
    write_record,
)
from artifacts.errors import Ambiguous, InvalidInput
from artifacts.record import loads
from reproduce.configuration import RunOptions, from_identity
from reproduce.errors import Differs, Inconclusive, ReproduceError
from reproduce.naming import FINAL, committed_record, digits, final_from_folder, require_digits
from reproduce.project import Project
from reproduce.workbench import open_workbench


def find_or_import(project: Project, options: RunOptions, prefix: str) -> tuple[Store, str]:
    """The store and the hash of the record that a hash or its first digits mean, or that holds the bundle meant.

    A record that the store does not know is taken from run/, where Git and `dvc pull` put it.
    """
    require_digits(prefix)
    store = project.store(options)
    try:
        found = resolve(store, prefix)
    except Ambiguous:
        raise
    except InvalidInput as error:
        path = project.outputs / "record.json"
        if committed_record(project, prefix) is None:
            also = f", and {path} is another record" if path.is_file() else ""
            raise ReproduceError(f"{error}{also}: `reproduce log` lists what there is") from error
        return store, _import(project, options, store, path)
    if len(found.records) == 1:
        return store, found.records[0]
    if not found.records:
        raise ReproduceError(f"bundle {found.hash} is in no record: finish its run and commit it with `dvc repro`")
    listed = "\n".join(f"  {name}" for name in found.records)
    raise ReproduceError(f"bundle {found.hash} is in several records; verify one of\n{listed}")


def bring_final(project: Project, options: RunOptions, word: str) -> str:
    """`word` itself; for `final` the hash of that bundle, whose record is taken from run/ if the store has it not."""
    if word != FINAL:
        return word
    name, store = digits(project, word), project.store(options)
    try:
        resolve(store, name)
    except InvalidInput:
        path = project.outputs / "record.json"
        if not path.is_file():
            raise Inconclusive(f"{path} is missing: `dvc repro` makes it, or it comes with Git") from None
        _import(project, options, store, path)
    return name


def _import(project: Project, options: RunOptions, store: Store, path: Path) -> str:
    """Puts the record and the bundles it names into the store; the first one follows from the configuration.

    Where a run of this store ended in the record's bundle, as after `dvc repro` on outputs that were committed already,
    its bundles are the record's.
    """
    record = loads(path.read_bytes(), str(path))
    final = final_from_folder(project, record.final_bundle)
    if saved := _saved_on_the_way(store, record):
        with store.using():
            write_digests(store, [bytes(row) for row in final.tensors["history/digest"]])
            return write_record(store, record, saved)
    configuration = from_identity(record.configuration, options, str(path))
    with store.using(), open_workbench(configuration, project.dataset) as workbench:
        workbench.trainer.initialise()
        first = save_bundle(store, workbench.trainer.state(), workbench.identity.state(0))
        if first != record.first_bundle:
            raise Differs(
                f"record {hash_bytes(path.read_bytes())}: expected the first bundle {record.first_bundle}, "
                f"this machine makes {first}"
            )
        import_folder(store, project.outputs / "bundle")
        write_digests(store, [bytes(row) for row in final.tensors["history/digest"]])
        return write_record(store, record, {})


def _saved_on_the_way(store: Store, record: Record) -> dict[int, str]:
    """By step, the bundles of a run from the record's first bundle to its final one; empty if there is no such run."""
    for info in list_runs(store):
        if info.bundles.get(record.steps) == record.final_bundle and record.first_bundle in info.bundles.values():
            return dict(info.bundles)
    return {}
