"""The command line. Errors a user can cause end here: one message on stderr and their exit code."""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from reproduce import __version__
from reproduce.configuration import Configuration, load_configuration
from reproduce.display import print_line
from reproduce.plan_commands import COMMANDS
from reproduce.project import Project
from reproduce.store_commands import COMMANDS as STORE_COMMANDS
from reproduce.verdict_commands import COMMANDS as VERDICT_COMMANDS

UNEXPECTED = 70


class Part(click.ParamType[float]):
    """A part of a whole: 5% or 0.05."""

    name = "part"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        try:
            part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            part = -1.0
        if not 0 <= part <= 1:
            self.fail(f"{text!r} is not a part between 0% and 100%, such as 5% or 0.05", param, ctx)
        return part


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="reproduce")
def cli(debug: bool) -> None:
    """Train a language model; anyone can check the bits."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        result: Any = cli.main(words, "reproduce", standalone_mode=False)
    except click.exceptions.Exit as error:
        return int(error.exit_code)
    except click.Abort:
        return _interrupted()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # noqa: BLE001  # the last place to make a message of it
        return _report(error, debug)
    return result if isinstance(result, int) else 0


def _interrupted() -> int:
    _complain("reproduce: interrupted")
    return 130


def _report(error: Exception, debug: bool) -> int:
    code = getattr(error, "exit_code", None)
    if debug:
        traceback.print_exception(error)
    if isinstance(code, int):
        _complain(f"reproduce: {error}")
        return code
    if isinstance(error, OSError):
        _complain(f"reproduce: {_of_system(error)}")
        return 6 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 2
    if isinstance(error, MemoryError):
        _complain("reproduce: out of memory. `reproduce plan` says what a configuration needs")
        return 5
    _complain(f"reproduce: unexpected {type(error).__name__}: {error}")
    if not debug:
        _complain("This is a fault of the program: `reproduce --debug ...` shows where it happened")
    return UNEXPECTED


_REMEDIES = {
    errno.EACCES: "give yourself the right to it or name another place",
    errno.EPERM: "give yourself the right to it or name another place",
    errno.EROFS: "name a place that can be written",
    errno.EISDIR: "a file is expected there: name one",
    errno.ENOTDIR: "a folder is expected there: name one",
    errno.ENOSPC: "make room there or name another place",
    errno.EDQUOT: "make room there or name another place",
}


def _of_system(error: OSError) -> str:
    """The file as the user knows it, what the system says of it, and what to do."""
    where = ""
    if isinstance(error.filename, str | bytes):
        path = Path(os.fsdecode(error.filename))
        # Files are written under another name first; see outputs.write_bytes.
        name = path.name.removeprefix(".").removesuffix(".partial") if path.name.endswith(".partial") else path.name
        where = f"{path.with_name(name) if name else path}: "
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{error.strerror or error}" + (f": {remedy}" if remedy else "")


def _complain(text: str) -> None:
    print_line(sys.stderr, text)


def _answer(text: str) -> None:
    print_line(sys.stdout, text)


def _load(overrides: Sequence[str] = ()) -> tuple[Project, Configuration]:
    project = Project.find()
    return project, load_configuration(project.params, overrides)


@cli.command()
@click.argument("experiment")
def use(experiment: str) -> None:
    """Make EXPERIMENT (a name from experiments/) the current one: copy it to params.yaml."""
    from reproduce.experiments import use_experiment

    use_experiment(Project.find(), experiment)


@cli.command()
@click.argument("name", type=click.Choice(["fetch", "prepare", "plan", "train", "evaluate", "commit"]))
def stage(name: str) -> None:
    """Run one stage of the pipeline, as `dvc repro` does."""
    from reproduce.starter import watch_starter

    watch_starter()
    from reproduce.display import say
    from reproduce.stages import STAGES
    from reproduce.waiting import one_stage_at_a_time

    project, configuration = _load()
    with one_stage_at_a_time(project.private(), say):
        STAGES[name](project, configuration)


@cli.command()
def train() -> None:
    """Train the current experiment (the stage `train` of the pipeline)."""
    _train(None)


@cli.command()
@click.argument("bundle", required=False)
@click.option("--fork", "as_fork", is_flag=True, help="Make a new run of it, with the changes of -S.")
@click.option(
    "-S",
    "--set-param",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --fork: what changes, such as -S train.steps=2000.",
)
def resume(bundle: str | None, as_fork: bool, overrides: Sequence[str]) -> None:
    """Go on with the current experiment from its last bundle, or from BUNDLE."""
    if as_fork:
        _fork(bundle, overrides)
    elif overrides:
        raise click.UsageError("-S changes the configuration, and a run has one: add --fork to make a new run of it")
    else:
        _train(bundle, resuming=True)


def _fork(bundle: str | None, overrides: Sequence[str]) -> None:
    from reproduce.display import say
    from reproduce.forking import fork
    from reproduce.importing import bring_final
    from reproduce.waiting import one_stage_at_a_time

    project, configuration = _load()
    with one_stage_at_a_time(project.private(), say):
        start = None if bundle is None else bring_final(project, configuration.run, bundle)
        name = fork(project, configuration, start, overrides)
    _answer(f"record {name}\nCheck it: reproduce verify {name[:12]}")


def _train(bundle: str | None, resuming: bool = False) -> None:
    from reproduce.display import say
    from reproduce.forking import require_run
    from reproduce.history import find_bundle, require_same_configuration
    from reproduce.importing import bring_final
    from reproduce.stages import train_stage
    from reproduce.waiting import one_stage_at_a_time

    project, configuration = _load()
    with one_stage_at_a_time(project.private(), say):
        start = None
        if bundle is not None:
            store = project.store(configuration.run)
            start = find_bundle(store, bring_final(project, configuration.run, bundle))
            require_same_configuration(store, start, configuration)
        elif resuming:
            require_run(project, configuration)
        train_stage(project, configuration, start)
    _answer("`dvc repro` goes on with the pipeline from here")


@cli.command()
def commit() -> None:
    """Write the record of the finished run (the stage `commit` of the pipeline)."""
    from reproduce.committing import commit as write

    project, configuration = _load()
    _answer(write(project, configuration))


@cli.command()
def log() -> None:
    """All runs and records in the store."""
    from reproduce.history import log_lines

    project, configuration = _load()
    for line in log_lines(project, configuration):
        _answer(line)


@cli.command()
@click.argument("hash", required=False)
@click.option("--html", "page", type=click.Path(path_type=Path), help="Write one self-contained page to this file.")
def show(hash: str | None, page: Path | None) -> None:
    """What a record or bundle HASH (or `final`) is; without one, the results of the pipeline's last run."""
    from reproduce.history import show_committed, show_hash
    from reproduce.page import write_page

    project, configuration = _load()
    if page is not None:
        write_page(project, configuration, hash, page)
        return
    lines = show_committed(project) if hash is None else show_hash(project, configuration, hash)
    for line in lines:
        _answer(line)


@cli.command()
@click.argument("bundle")
@click.option("--prompt", help="Text to go on from.")
@click.option("--tokens", type=click.IntRange(1), help="Tokens to draw.")
@click.option("--temperature", type=click.FloatRange(0.0), help="0 takes the likeliest token.")
@click.option("--top-k", type=click.IntRange(0), help="Draw from the likeliest only; 0: from all.")
@click.option("--seed", type=click.IntRange(0), help="Another seed, another text.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="For an imported bundle: the dataset that has its tokenizer.",
)
def sample(bundle: str, tokenizer: Path | None, **options: Any) -> None:
    """Text from BUNDLE (a hash, or `final` for the pipeline's); by default as the configuration says."""
    from reproduce.history import sample_text

    project, configuration = _load()
    given = {name: value for name, value in options.items() if value is not None}
    _answer(sample_text(project, configuration, bundle, given, tokenizer))


@cli.command()
@click.argument("hash")
@click.option("--steps", metavar="A:B", help="Replay only steps A to B, from the bundle before A.")
@click.option(
    "--segments",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Replay only N of the segments between bundles, chosen by chance.",
)
@click.option("--seed", type=click.IntRange(0), help="Choose the segments of --segments with this number.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Segments replayed side by side.")
@click.option("--checkout", is_flag=True, help="Replay with the record's sources, from the Git commit that has them.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def verify(hash: str, segments: int | None, **asked: Any) -> int:
    """Replay the record HASH (or that in a capsule's file) and compare: 0 bit-exact or within tolerance, 1 differs,
    3 inconclusive, 4 corrupt."""
    from reproduce.verification import Request
    from reproduce.verification import verify as check
    from reproduce.verification.capsule import is_capsule, verify_capsule

    request = Request(segments=segments or 0, **asked)
    if is_capsule(hash):
        return verify_capsule(Path(hash), request)
    project, configuration = _load()
    return check(project, configuration.run, hash, request)


@cli.command()
@click.option(
    "--sample",
    "part",
    type=Part(),
    default="100%",
    show_default=True,
    help="Part of the objects whose content is read, such as 5% or 0.05.",
)
def fsck(part: float) -> int:
    """Check the store: exit 4 if anything is missing or corrupt."""
    from reproduce.upkeep import fsck_lines

    project, configuration = _load()
    lines, code = fsck_lines(project.store(configuration.run, read_only=True), part)
    for line in lines:
        _answer(line)
    return code


@cli.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--keep-last", type=click.IntRange(1), help="Of every run keep so many of the newest bundles.")
@click.option("--keep-every", type=click.IntRange(1), help="And those whose step is a multiple of this.")
def gc(dry_run: bool, keep_last: int | None, keep_every: int | None) -> None:
    """Remove from the store what no record and no run needs."""
    from reproduce.upkeep import gc_lines

    project, configuration = _load()
    for line in gc_lines(project.store(configuration.run), dry_run, keep_last, keep_every):
        _answer(line)


for command in (*COMMANDS, *STORE_COMMANDS, *VERDICT_COMMANDS):
    cli.add_command(command)
