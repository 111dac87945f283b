"""The plan for people: tables with colours on a terminal, plain elsewhere."""

import io
import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reproduce.display import counted
from reproduce.planning.devices import Device
from reproduce.planning.items import TITLES, Item
from reproduce.planning.rates import Rate
from reproduce.planning.remedies import Remedy
from reproduce.planning.report import Limit, Report, describe_largest
from reproduce.planning.sizes import size

_PLAIN_WIDTH = 118
# Categories whose items are shown one by one, and how many of them.
_ITEMISED = {"activations": 10, "attention": 10}


def console_for(stream: TextIO | None = None) -> Console:
    """A console that wraps at the terminal's width, or at a fixed one where there is no terminal."""
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a terminal that has no × is no reason to fail
    width = None if stream.isatty() else _PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False)


def show_report(console: Console, found: Report, name: str, limit: Limit, rate: Rate | None) -> None:
    """All of a plan but the verdict."""
    train, sizes = found.configuration.train, found.plan.sizes
    threads = f", {counted(sizes.threads, 'thread')}" if found.device.backend == "cpu" else ""
    console.print(Text(f"{name} on {found.device.name}{threads}, tier {found.configuration.tier}", style="bold"))
    console.print(
        f"{sizes.batch} of the {train.batch} rows of a batch at once ({counted(train.shards, 'shard')}), "
        f"{sizes.context} tokens each; specification {found.specification[:12]}"
    )
    console.print(_memory_table(found, limit))
    console.print(_parameter_table(found))
    console.print(_totals(found, rate))


def show_fits(console: Console, found: Report, limit: Limit) -> None:
    console.print(f"largest item: {describe_largest(found)}")
    console.print(
        f"fits: {size(found.peak)} needed, {limit.what} {size(limit.bytes)}, {size(limit.bytes - found.peak)} left",
        style="green",
    )


def show_card(console: Console, card: Device, needed: int) -> None:
    """One line on the card that is there but was not asked for."""
    fits = needed <= card.memory
    verdict = f"fits, {size(card.memory - needed)} left" if fits else "does not fit"
    console.print(f"as run.device=cuda: {size(needed)} needed, {card.what} {size(card.memory)}: {verdict}")


def show_refusal(console: Console, message: str, remedies: Sequence[Remedy]) -> None:
    """The refusal in red, and below it what would help."""
    console.print(f"refused: {message}", style="bold red")
    if not any(remedy.fits for remedy in remedies):
        console.print("No single change makes it fit: use a smaller model or a device with more memory.")
    if not remedies:
        return
    table = Table(box=box.SIMPLE, title="What would help, each planned anew", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("change")
    table.add_column("then needs", justify="right")
    table.add_column("enough")
    table.add_column("operations", justify="right")
    table.add_column("bits")
    number = 0
    for remedy in remedies:
        number += remedy.fits
        table.add_row(
            str(number) if remedy.fits else "",
            Text(remedy.says),
            Text(size(remedy.peak), style="green" if remedy.fits else "red"),
            "yes" if remedy.fits else "no",
            f"{remedy.more_operations:+.1%}".replace("%", " %"),
            "change" if remedy.changes_bits else "stay the same",
            style=None if remedy.fits else "dim",
        )
    console.print(table)
    if number:
        console.print("--apply N writes change N to params.yaml")


def _memory_table(found: Report, limit: Limit) -> Table:
    memory = found.memory
    table = Table(box=box.SIMPLE_HEAD, title="Memory", title_justify="left")
    table.add_column("item", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("each", justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for category, total in memory.by_category().items():
        items = [item for item in memory.items if item.category == category]
        table.add_row(Text(TITLES[category], style="bold"), size(total), "", _note(found, category, items))
        shown = items[: _ITEMISED.get(category, 0)]
        for item in shown:
            each = f"{item.count} × {size(item.each)}" if item.count > 1 else ""
            table.add_row(Text(f"  {item.kind}", style="dim"), size(item.bytes), each, _shape(item))
        rest = items[len(shown) :]
        if shown and rest:
            table.add_row(Text(f"  {len(rest)} smaller kinds", style="dim"), size(sum(i.bytes for i in rest)), "", "")
    if memory.gaps:
        table.add_row("between them", size(memory.gaps), "", "alignment, and room that fits nothing at that time")
    table.add_section()
    fits = found.peak <= limit.bytes
    table.add_row(
        Text("total", style="bold"),
        Text(size(found.peak), style="bold green" if fits else "bold red"),
        "",
        f"the arena, fullest at {memory.moment}; {size(memory.shared)} if no buffer took another's place",
    )
    return table


def _note(found: Report, category: str, items: Sequence[Item]) -> str:
    train, model = found.configuration.train, found.configuration.model
    if category == "gradients":
        return f"{counted(found.plan.gradient_sets, 'set')}, to add up {counted(train.shards, 'shard')} in their order"
    if category == "attention" and found.plan.sizes.batch < train.batch:
        whole = train.batch * model.heads * model.context**2
        return (
            f"a whole batch at once: {train.batch}·{model.heads}·{model.context}·{model.context} floats, "
            f"{size(4 * whole)} a layer"
        )
    if category == "workspace":
        largest = max(items, key=lambda item: item.bytes)
        return f"scratch of that moment, most of it {largest.kind}"
    return ""


def _shape(item: Item) -> Text:
    return Text(f"[{', '.join(str(length) for length in item.shape)}] {item.dtype}", style="dim")


def _parameter_table(found: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Parameters", title_justify="left")
    table.add_column("parameter", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("times", justify="right")
    table.add_column("numbers", justify="right", no_wrap=True)
    for item in found.parameters:
        table.add_row(
            item.kind, Text(str(list(item.shape))), f"{item.count:,}" if item.count > 1 else "", f"{item.elements:,}"
        )
    table.add_section()
    tied = "head tied to the token embedding" if found.configuration.model.tied else "head with weights of its own"
    table.add_row(Text("total", style="bold"), tied, "", Text(f"{found.parameter_count:,}", style="bold"))
    return table


def _totals(found: Report, rate: Rate | None) -> Table:
    work, disk = found.work, found.disk
    table = Table(box=box.SIMPLE_HEAD, title="Work and disk", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("a step", justify="right", no_wrap=True)
    table.add_column(f"{work.steps:,} steps", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    steps = work.steps
    table.add_row("tokens", f"{work.tokens:,}", f"{work.tokens * steps:,}", "")
    table.add_row("operations", _count(work.operations), _count(work.operations * steps), "in matrix products")
    if work.again:
        share = f"of these: blocks computed again, {work.again / (work.operations - work.again):.1%} more".replace(
            "%", " %"
        )
        table.add_row("", _count(work.again), _count(work.again * steps), share)
    table.add_row(
        "memory traffic", size(work.bytes), size(work.bytes * steps), "every operand once for every operation"
    )
    table.add_row(
        "bundles",
        "",
        f"{disk.bundles:,}",
        f"at most {size(disk.total)} in the store, before compression ({size(disk.largest)} each)",
    )
    if rate is not None:
        seconds = work.tokens / rate.tokens_per_second
        table.add_row(
            "time",
            f"{seconds:,.2f} s",
            _duration(seconds * steps),
            f"measured on this machine: {rate.tokens_per_second:,.0f} tokens/s over {rate.steps} steps",
        )
    table.add_row(
        "first loss", f"{found.initial_loss:.4f}", "", f"about ln({found.configuration.model.vocab}), before training"
    )
    return table


def _count(number: int) -> str:
    for unit, factor in (("E", 10**18), ("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number:,}"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:,} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
