"""The commands `diff` and `selftest`: what there is to say of records beside verifying them."""

from collections.abc import Sequence

import click


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def diff(a: str, b: str, as_json: bool) -> int:
    """Where A and B part: exit 0 if they are the same, 1 if not. Each is a record, run or bundle, with FOLDER: before
    it if it is in another store; or both are stores' folders."""
    from reproduce.configuration import load_configuration
    from reproduce.diff import diff as compare
    from reproduce.diff.sides import find_side, is_store, open_store
    from reproduce.diff.stores import diff_stores
    from reproduce.project import Project

    if is_store(a) or is_store(b):  # a store is compared with a store
        return diff_stores(open_store(a), open_store(b), as_json)
    project = Project.find()
    run = load_configuration(project.params).run
    store = project.store(run)
    return compare(project, run, find_side(store, a), find_side(store, b), as_json)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def selftest(as_json: bool) -> int:
    """Spoil copies of a small run on purpose and see that each fault is found: exit 1 if one is not."""
    from reproduce.selftest.report import selftest as test

    return test(as_json)


COMMANDS: Sequence[click.Command] = (diff, selftest)
