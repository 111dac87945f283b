"""Two stores: which records and runs are in one of them only, and which of those tell of the same run differently."""

import json
from collections.abc import Iterable
from typing import Any

from artifacts import Record, Store, find_records, list_runs, read_record
from reproduce.display import say


def diff_stores(a: Store, b: Store, as_json: bool) -> int:
    """Says what is in one only; 0 if both hold the same records and runs with the same bundles."""
    records = {store.path: {name: read_record(store, name) for name in find_records(store)} for store in (a, b)}
    only_a = {name: found for name, found in records[a.path].items() if name not in records[b.path]}
    only_b = {name: found for name, found in records[b.path].items() if name not in records[a.path]}
    runs = _runs(a, b)
    pairs = _same_claim(only_a, only_b)
    found = {
        "only_a": sorted(only_a),
        "only_b": sorted(only_b),
        "same_claim": pairs,
        "runs": runs,
    }
    same = not any(found.values())
    if as_json:
        say(json.dumps({"a": str(a.path), "b": str(b.path), "same": same, **found}, indent=2, sort_keys=True))
        return 0 if same else 1
    say(f"A: store {a.path}\nB: store {b.path}")
    for name, where in (*((name, "A") for name in only_a), *((name, "B") for name in only_b)):
        say(f"record {name}: only in {where}")
    for pair in pairs:
        say(
            f"records {pair[0][:12]} and {pair[1][:12]} have the same configuration, data and sources: "
            f"`reproduce diff {a.path}:{pair[0][:12]} {b.path}:{pair[1][:12]}` says where they part"
        )
    for line in runs:
        say(line)
    if same:
        say("the same records, and runs with the same bundles")
    return 0 if same else 1


def _same_claim(only_a: dict[str, Record], only_b: dict[str, Record]) -> list[list[str]]:
    """Pairs of records that were to come to the same bits."""
    return [[x, y] for x in sorted(only_a) for y in sorted(only_b) if _claim(only_a[x]) == _claim(only_b[y])]


def _claim(record: Record) -> tuple[Any, ...]:
    return record.configuration, record.dataset, record.tokenizer, record.sources_digest


def _runs(a: Store, b: Store) -> list[str]:
    """Runs in one store only, and bundles by which a run in both differs at the same step."""
    there = {info.run_id: info.bundles for info in list_runs(b)}
    here = {info.run_id: info.bundles for info in list_runs(a)}
    lines = [f"run {name}: only in A" for name in _without(here, there)]
    lines += [f"run {name}: only in B" for name in _without(there, here)]
    for name in sorted(set(here) & set(there)):
        for step in sorted(set(here[name]) & set(there[name])):
            x, y = here[name][step], there[name][step]
            if x != y:
                lines.append(f"run {name}: at step {step} A has bundle {x[:12]}, B {y[:12]}")
                break
    return lines


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    return sorted(set(names) - set(others))
