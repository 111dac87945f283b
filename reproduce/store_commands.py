"""The commands that move what the store holds: push, pull, export, import, attest."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reproduce.display import counted, print_line

if TYPE_CHECKING:
    from artifacts import Store
    from artifacts.transfer import Transfer
    from reproduce.configuration import Configuration
    from reproduce.project import Project

_SAME = {"bit-exact", "trained", "within tolerance"}
_FILE = click.Path(path_type=Path)
_KIND = click.option(
    "--as",
    "kind",
    type=click.Choice(["capsule", "folder", "gpt2", "andrea"]),
    default="capsule",
    show_default=True,
    help="A record in one file, a bundle as plain files, GPT-2 weights in safetensors, or an ANDREA checkpoint.",
)


def _open() -> "tuple[Project, Configuration, Store]":
    from reproduce.configuration import load_configuration
    from reproduce.project import Project

    project = Project.find()
    configuration = load_configuration(project.params)
    return project, configuration, project.store(configuration.run)


def _record(store: "Store", prefix: str) -> str:
    """The full hash of the record meant."""
    from artifacts import resolve
    from reproduce.errors import ReproduceError

    found = resolve(store, prefix)
    if found.kind != "record":
        holders = "".join(f"\n  record {name}" for name in found.records)
        raise ReproduceError(f"{prefix} is a bundle, expected a record" + (f"; it is in{holders}" if holders else ""))
    return found.hash


def _say(text: str) -> None:
    print_line(sys.stdout, text)


def _require_no_file(url: str) -> None:
    from reproduce.errors import ReproduceError

    if Path(url).is_file():
        raise ReproduceError(f"{url} is a file: name a folder or a URL (`export` and `import` are for single files)")


def _moved(verb: str, transfer: "Transfer") -> None:
    from reproduce.planning.sizes import size

    _say(
        f"{verb} {counted(len(transfer.records), 'record')}: {counted(transfer.sent, 'object')} "
        f"({size(transfer.bytes)}), {transfer.present} were there already"
    )
    for record in transfer.records:
        _say(f"  {record}")


@click.command()
@click.argument("url")
@click.argument("records", nargs=-1)
def push(url: str, records: Sequence[str]) -> None:
    """Copy RECORDS (all, if none is named) with all they need to URL: a folder, s3://bucket/folder, ..."""
    from artifacts.transfer import push as send

    _require_no_file(url)
    _, _, store = _open()
    chosen = [_record(store, prefix) for prefix in records] or None
    _moved("pushed", send(store, url, chosen))


@click.command()
@click.argument("url")
@click.argument("records", nargs=-1)
def pull(url: str, records: Sequence[str]) -> None:
    """Copy RECORDS (all, if none is named) with all they need from URL; every byte is verified."""
    from artifacts.transfer import pull as fetch

    _require_no_file(url)
    _, _, store = _open()
    _moved("pulled", fetch(store, url, list(records) or None))


@click.command()
@click.argument("hash")
@click.argument("path", type=_FILE)
@_KIND
@click.option("--data", is_flag=True, help="Put the dataset into the capsule as well.")
@click.option("--all-bundles", is_flag=True, help="Put the bundles in between into the capsule as well.")
def export(hash: str, path: Path, kind: str, data: bool, all_bundles: bool) -> None:
    """Write the record or bundle HASH to PATH, for other machines or other programs."""
    if kind != "capsule" and (data or all_bundles):
        raise click.UsageError("--data and --all-bundles are for capsules")
    project, configuration, store = _open()
    if kind == "capsule":
        from reproduce.capsules import write_capsule

        contents = write_capsule(project, store, _record(store, hash), path, data, all_bundles)
        _say(
            f"record {contents.record} with {len(contents.bundles)} bundles, "
            f"{len(contents.attestations)} attestations and {len(contents.files)} files is in {path}"
        )
        return
    _export_bundle(project, store, configuration, hash, path, kind)


def _export_bundle(
    project: "Project", store: "Store", configuration: "Configuration", hash: str, path: Path, kind: str
) -> None:
    from artifacts import load_bundle, write_folder
    from reproduce.history import configuration_of, find_bundle
    from reproduce.imported import is_imported
    from reproduce.interchange import export_andrea, export_gpt2
    from reproduce.naming import digits

    name = find_bundle(store, digits(project, hash))
    if kind == "folder":
        write_folder(store, name, path)
    else:
        bundle = load_bundle(store, name)
        known = configuration if is_imported(bundle) else configuration_of(store, name, configuration)
        model = known.model
        if kind == "gpt2":
            export_gpt2(bundle, name, model, path)
        else:
            export_andrea(bundle, model, path)
    _say(f"bundle {name} is in {path}")


@click.command(name="import")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@_KIND
@click.option("--files", type=_FILE, help="Put the capsule's data and sources into this new folder.")
def import_(path: Path, kind: str, files: Path | None) -> None:
    """Take PATH, written by `export` or another program, into the store; says what it lacks."""
    if kind != "capsule" and files is not None:
        raise click.UsageError("--files is for capsules")
    project, configuration, store = _open()
    match kind:
        case "capsule":
            from reproduce.capsules import require_capsule, take_capsule

            require_capsule(path)

            contents, where = take_capsule(project, store, path, files)
            _say(f"record {contents.record} with {len(contents.bundles)} bundles is in the store")
            if where is not None:
                _say(f"its files are in {where}")
            _say(f"Check it: reproduce verify {contents.record[:12]}")
        case "folder":
            from artifacts import import_folder
            from reproduce.kinds import require_folder

            require_folder(path)
            bundle = import_folder(store, path)
            _say(f"bundle {bundle} is in the store; `reproduce gc` removes it unless a run or record lists it")
        case _:
            from reproduce.interchange import import_andrea, import_gpt2

            take = import_gpt2 if kind == "gpt2" else import_andrea
            found = take(store, path, configuration.model)
            _say(f"bundle {found.bundle} is in the store, listed by run {found.run}")
            for lacking in found.lacks:
                _say(f"  the file does not have: {lacking}")


@click.command()
@click.argument("record")
@click.option(
    "--add",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Add the statement in this file, made on another machine.",
)
def attest(record: str, add: Path | None) -> int:
    """Who saw RECORD, with which verdict, as in-toto statements; exit 1 if verdicts disagree."""
    from artifacts import read_attestations
    from artifacts.attestation import loads, statement, write_attestation
    from artifacts.canonical import MAX_BYTES
    from artifacts.durable import read_whole
    from reproduce.kinds import require_statement

    _, _, store = _open()
    name = _record(store, record)
    if add is not None:
        require_statement(add)
        what = f"attestation {add}"
        write_attestation(store, loads(read_whole(add, MAX_BYTES, what), name, what))
    seen = read_attestations(store, name)
    _say(json.dumps([statement(item) for item in seen.values()], indent=2, sort_keys=True, ensure_ascii=False))
    verdicts = {item.verdict.get("verdict") for item in seen.values()}
    return 1 if "differs" in verdicts and verdicts & _SAME else 0


COMMANDS = (push, pull, export, import_, attest)
