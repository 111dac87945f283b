"""The store's health and size, in lines."""

from artifacts import Store
from artifacts.fsck import fsck
from artifacts.gc import gc
from reproduce.planning.sizes import size


def fsck_lines(store: Store, part: float) -> tuple[list[str], int]:
    """What is wrong with the store, and the exit code."""
    report = fsck(store, part)
    lines = [f"missing: {fault.subject}: {fault.message}" for fault in report.missing]
    lines += [f"corrupt: {fault.subject}: {fault.message}" for fault in report.corrupt]
    lines.append(
        f"{report.objects} objects, {report.checked} of them read and verified; "
        f"{len(report.missing)} missing, {len(report.corrupt)} corrupt"
    )
    if report.missing or report.corrupt:
        lines.append("`reproduce pull URL` brings back what a store elsewhere still has of the records")
    if report.dangling or report.leftovers:
        lines.append(
            f"{len(report.dangling)} objects that nothing needs and {len(report.leftovers)} left-over files: "
            "`reproduce gc` removes them"
        )
    return lines, report.exit_code


def gc_lines(store: Store, dry_run: bool, keep_last: int | None, keep_every: int | None) -> list[str]:
    """What was removed, or would be."""
    report = gc(store, dry_run=dry_run, keep_last=keep_last, keep_every=keep_every)
    lines = [
        f"{holder}: bundle {bundle[:12]} is no longer kept"
        for holder, bundles in report.dropped.items()
        for bundle in bundles
    ]
    verb = "would remove" if report.dry_run else "removed"
    lines.append(
        f"{verb} {len(report.objects)} objects and {len(report.leftovers)} left-over files, {size(report.freed)}"
    )
    return lines
