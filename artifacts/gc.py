"""Removes what no record and no run reaches.

Why this is safe while others use the store: everybody who saves holds the store's gate shared
(`Store.using`) from before the first look whether an object is there until a run or record names
the bundle, and everybody who reads holds it while reading. Collection holds the gate exclusively
from before it marks until after it has swept. So no object is found present, and relied upon, that
is then removed; and at the time of marking every bundle that anybody will still rely on is named
somewhere. For the same reason all temporary files are leftovers of the dead. Should the collector
die itself, shortened lists are on disk before the first object goes, so nothing that is named is
ever removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from artifacts import filesystem, index, runs
from artifacts.errors import Corrupt, InvalidInput
from artifacts.record import record_bundles
from artifacts.references import Policy, find_references
from artifacts.store import Store


@dataclass(frozen=True)
class GcReport:
    """What was removed, or with `dry_run` would be. `freed` is in bytes of the store's files.

    `dropped` names the bundles taken off a list by a keep policy, by the record or run of the list.
    """

    dry_run: bool
    objects: tuple[str, ...]
    leftovers: tuple[Path, ...]
    dropped: Mapping[str, tuple[str, ...]]
    freed: int


def gc(
    store: Store,
    dry_run: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> GcReport:
    """Removes unreached objects and leftovers; waits until nobody uses the store.

    With a policy, a run or record keeps of its bundles only the `keep_last` newest and those whose
    step is a multiple of `keep_every`, and always its first and last. Corrupt if the store is not
    whole: what cannot be read might still be needed. InvalidInput for numbers below 1.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name} {value}: expected at least 1")
    with store.collecting():
        policy = _policy(keep_last, keep_every)
        found = find_references(store, policy)
        faults = [*found.missing, *found.corrupt]
        if faults:
            raise Corrupt(
                f"nothing was collected: {faults[0].message}\nThe store is not whole: "
                "`reproduce fsck` names everything that is damaged; `reproduce pull URL` or `reproduce import CAPSULE` "
                f"brings back what a record needs. To do without the rest, move {store.path} away: "
                "`reproduce train` makes another"
            )
        unreached = tuple(name for name in store.objects() if name not in found.needed)
        leftovers = tuple(
            path for path in (*store.strays(), *store.temporary_files()) if not filesystem.is_directory(path)
        )
        paths = [*map(store.object_path, unreached), *leftovers]
        report = GcReport(
            dry_run=dry_run,
            objects=unreached,
            leftovers=leftovers,
            dropped=_shorten_lists(store, policy, dry_run),
            freed=sum(map(filesystem.file_size, paths)),
        )
        if not dry_run:
            for path in paths:
                filesystem.unlink(path)
    return report


def _policy(keep_last: int | None, keep_every: int | None) -> Policy:
    def keep(bundles: Mapping[int, str]) -> dict[int, str]:
        steps = sorted(bundles)
        kept = {*steps[:1], *steps[-1:], *steps[-(keep_last or 1) :]}
        if keep_every is not None:
            kept |= {step for step in steps if step % keep_every == 0}
        return {step: bundles[step] for step in sorted(kept)}

    return keep if keep_last is not None or keep_every is not None else dict


def _shorten_lists(store: Store, policy: Policy, dry_run: bool) -> dict[str, tuple[str, ...]]:
    dropped = {}
    for record in index.records(store):
        before, kept = index.bundles(store, record), policy(record_bundles(store, record))
        after = {step: bundle for step, bundle in before.items() if step in kept}
        if after != before:
            dropped[f"record {record}"] = _without(before, after)
            if not dry_run:
                index.replace(store, record, after)
    for run_id in runs.run_ids(store):
        before = runs.listed(store, run_id)
        after = policy(before)
        if after != before:
            dropped[f"run {run_id}"] = _without(before, after)
            if not dry_run:
                runs.replace_list(store, run_id, after)
    return dropped


def _without(before: Mapping[int, str], after: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(bundle for step, bundle in before.items() if step not in after)
