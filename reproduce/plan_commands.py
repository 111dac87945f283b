"""The commands `plan` and `model`: what a configuration needs, and the two views of its model."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from reproduce.configuration import Configuration
    from reproduce.model.source import ModelError, Source
    from reproduce.project import Project

_FILE = click.Path(path_type=Path)
_OVERRIDES = click.option(
    "-S",
    "--set-param",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a parameter, as in DVC: -S train.batch=64.",
)
_FIX = click.option("--fix", is_flag=True, help="Write what mends shape faults into the model's file.")


@click.command()
@click.argument("experiment", required=False)
@_OVERRIDES
@click.option("--model", "model_file", type=_FILE, help="Plan the model of this file (code view).")
@_FIX
@click.option("--device", "device_name", metavar="NAME", help="Plan for cpu or a card such as rtx3060.")
@click.option("--budget", metavar="SIZE", help="Refuse (exit 5) if more memory is needed: 4GiB, 512MiB.")
@click.option("--graph", "graph_file", type=_FILE, help="Write a drawing of the model to this SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--apply", "number", type=int, metavar="N", help="Write remedy N to params.yaml.")
@click.option("--measure", is_flag=True, help="Train a few steps here to know the time.")
def plan(
    experiment: str | None,
    overrides: Sequence[str],
    model_file: Path | None,
    fix: bool,
    device_name: str | None,
    budget: str | None,
    graph_file: Path | None,
    as_json: bool,
    number: int | None,
    measure: bool,
) -> int:
    """Memory, disk and work of EXPERIMENT, by default the current one."""
    from reproduce import outputs
    from reproduce.asked import require_place, write_asked
    from reproduce.errors import ReproduceError
    from reproduce.model.code import graph_of
    from reproduce.model.drawing import draw
    from reproduce.planning.devices import find_device, present_card
    from reproduce.planning.display import console_for, show_card, show_fits, show_refusal, show_report
    from reproduce.planning.rates import measure as measure_rate
    from reproduce.planning.rates import read_rate
    from reproduce.planning.remedies import apply_remedy, choose, find_remedies
    from reproduce.planning.report import limit_of, plan_for, refusal, refuse_early, report, require_tier
    from reproduce.planning.sizes import parse_size
    from reproduce.project import Project
    from reproduce.vocabulary import check_vocabulary, prepared_vocabulary

    if fix and model_file is None:
        raise click.UsageError("--fix mends a model's file: name it with --model FILE")
    if graph_file is not None:
        require_place(graph_file)
        if graph_file.suffix.lower() != ".svg":
            raise ReproduceError(f"{graph_file}: the drawing is SVG: name it {graph_file.with_suffix('.svg')}")
    project = Project.find()
    path, configuration = _planned(project, experiment, overrides, model_file, fix)
    tokens = prepared_vocabulary(project.dataset, configuration.data)
    if tokens is not None:
        check_vocabulary(configuration.model, tokens)
    device = find_device(device_name or configuration.run.device)
    if measure and device.name != configuration.run.device:
        raise ReproduceError(
            f"--measure trains on run.device, which is {configuration.run.device}: it cannot tell the time that "
            f"{device.name} takes. Leave out one of both"
        )
    require_tier(configuration, device)
    limit = limit_of(device, None if budget is None else parse_size(budget))
    refuse_early(configuration, limit)
    found = report(configuration, device)
    if graph_file is not None:
        write_asked(graph_file, draw(graph_of(configuration.model)))
    problem = refusal(found, limit)
    remedies = [] if problem is None else find_remedies(configuration, device, limit)
    if number is not None:
        if problem is None:
            raise ReproduceError(f"--apply {number}: the plan fits as it is, there is nothing to apply")
        remedy = choose(remedies, number)
        outputs.write_text(project.params, apply_remedy(path, configuration, remedy))
        kept = f"{experiment or 'what it was'}{''.join(f', {change}' for change in overrides)}"
        elsewhere = "" if device_name is None else f"; run.device is still {configuration.run.device}"
        _say(f"params.yaml is now {kept}, with {remedy.says}{elsewhere}", to=sys.stderr if as_json else None)
        return 0
    rate = None
    if device.name == configuration.run.device:
        rate_of = measure_rate if measure and problem is None else read_rate
        rate = rate_of(project.private(), configuration)
    if as_json:
        verdict = {
            "fits": problem is None,
            "limit": limit.bytes,
            "remedies": [remedy.to_json() for remedy in remedies],
            "tokens_per_second_measured_here": None if rate is None else rate.tokens_per_second,
        }
        _say(json.dumps({**found.to_json(), **verdict}, indent=2, sort_keys=True))
        return 0 if problem is None else problem.exit_code
    console = console_for()
    show_report(console, found, experiment or "params.yaml", limit, rate)
    if device_name is None and device.backend == "cpu" and (card := present_card()) is not None:
        show_card(console, card, plan_for(configuration, card)[1].arena_bytes)
    if problem is None:
        show_fits(console, found, limit)
        return 0
    show_refusal(console, str(problem), remedies)
    return problem.exit_code


@click.group()
def model() -> None:
    """The model in its two views: the form (section `model` of params.yaml) and the code view."""


@model.command()
@click.argument("experiment", required=False)
@_OVERRIDES
@click.option("-o", "--output", type=_FILE, help="Write it to this new file; one that says the same stays as it is.")
def code(experiment: str | None, overrides: Sequence[str], output: Path | None) -> None:
    """The code view of EXPERIMENT's model, by default the current one."""
    from reproduce.asked import write_asked
    from reproduce.model.code import require_same, write_code
    from reproduce.model.source import Source
    from reproduce.project import Project

    _, configuration = _planned(Project.find(), experiment, overrides, None, False)
    if output is None:
        _say(write_code(configuration.model).rstrip("\n"))
    elif output.is_file():
        require_same(Source.read(output), configuration.model)
    else:
        write_asked(output, write_code(configuration.model))


@model.command()
@click.argument("file", type=_FILE)
@click.option("--write", is_flag=True, help="Write it into params.yaml instead.")
@_FIX
def form(file: Path, write: bool, fix: bool) -> None:
    """The model of FILE (code view) as the section `model`."""
    from reproduce import outputs
    from reproduce.configuration import read_text
    from reproduce.model.code import read_code
    from reproduce.model.form import put_form, write_form
    from reproduce.project import Project

    spec = read_code(_read_model(file, fix)).spec
    if not write:
        _say(write_form(spec).rstrip("\n"))
        return
    params = Project.find().params
    outputs.write_text(params, put_form(read_text(params), spec, str(params)))
    _say(f"the section model of params.yaml is now the model of {file}")


@model.command()
@click.argument("file", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print specification and graph, or the fault, as JSON.")
@_FIX
def check(file: Path, as_json: bool, fix: bool) -> int:
    """Check the model of FILE (code view): syntax, shapes, and whether the engine has it."""
    from reproduce.model.code import read_code, write_code
    from reproduce.model.source import ModelError
    from reproduce.state import hash_of

    try:
        understood = read_code(_read_model(file, fix))
    except ModelError as error:
        if not as_json:
            raise
        _say(json.dumps({"fault": str(error), "mended_by_fix": error.fix is not None}, indent=2, sort_keys=True))
        return error.exit_code
    specification = hash_of(understood.spec.identity())
    if as_json:
        whole = {
            "graph": understood.graph.to_json(),
            "model": understood.spec.model_dump(),
            "parameters": understood.graph.parameter_count,
            "specification": specification,
        }
        _say(json.dumps(whole, indent=2, sort_keys=True))
        return 0
    _say(f"{file} is sound: {understood.graph.parameter_count:,} parameters, specification {specification}")
    _say("With nothing left to a default it reads:")
    _say(write_code(understood.spec, understood.graph.name).rstrip("\n"))
    return 0


def _planned(
    project: "Project", experiment: str | None, overrides: Sequence[str], model_file: Path | None, fix: bool
) -> "tuple[Path, Configuration]":
    """The file that is planned, and its configuration with what the command line changes."""
    from reproduce.configuration import load_configuration
    from reproduce.experiments import experiment_path
    from reproduce.model.code import read_code

    path = project.params if experiment is None else experiment_path(project, experiment)
    configuration = load_configuration(path, overrides)
    if model_file is not None:
        spec = read_code(_read_model(model_file, fix)).spec
        configuration = configuration.model_copy(update={"model": spec})
    return path, configuration


def _read_model(file: Path, fix: bool) -> "Source":
    """The text of a model's file; with `fix`, mended there as far as that can be."""
    from reproduce import outputs
    from reproduce.model.code import mend
    from reproduce.model.source import Source

    source = Source.read(file)
    if not fix:
        return source
    mended, faults = mend(source)
    if faults:
        outputs.write_text(file, mended.text)
    for fault in faults:
        _say(f"{_first_line(fault)}\n  mended in {file}", to=sys.stderr)
    return mended


def _say(text: str, to: TextIO | None = None) -> None:
    from reproduce.display import print_line

    print_line(to or sys.stdout, text)


def _first_line(fault: "ModelError") -> str:
    return str(fault).splitlines()[0]


COMMANDS: tuple[Any, ...] = (plan, model)
