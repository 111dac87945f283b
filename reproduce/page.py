"""One self-contained HTML page about a record or bundle: results, loss curve, samples, configuration, hashes, machines.

Nothing is loaded from anywhere, nothing runs; everything that came from elsewhere is escaped.
"""

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import (
    Attestation,
    Record,
    Store,
    hash_bytes,
    list_runs,
    load_bundle,
    read_attestations,
    read_record,
    record_bundles,
    resolve,
)
from artifacts.bundle import Array
from reproduce.asked import require_place, write_asked
from reproduce.configuration import Configuration
from reproduce.errors import Inconclusive
from reproduce.lineage import Lineage
from reproduce.naming import digits
from reproduce.project import Project

_WIDTH, _HEIGHT, _MARGIN = 860, 320, 56
_MOST_POINTS = 800

_STYLE = """
:root { color-scheme: light dark; --line: #1668b8; --other: #c2410c; --faint: #8888; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
h3 { font-size: 1rem; margin-bottom: .25rem; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; vertical-align: top; padding-right: 1rem; width: 32%; }
td, th { border-top: 1px solid var(--faint); padding-top: .25rem; padding-bottom: .25rem; }
td, th { overflow-wrap: anywhere; } code, pre, td { font-family: ui-monospace, monospace; font-size: .85rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--faint); padding-left: 1rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.loss { fill: none; stroke: var(--line); stroke-width: 1.5; } .held { fill: var(--other); }
.grid { stroke: var(--faint); stroke-width: 1; }
"""


def write_page(project: Project, configuration: Configuration, prefix: str | None, path: Path) -> None:
    """Writes the page of a record or bundle, by default of the pipeline's last record, to `path`."""
    require_place(path)
    if prefix is None:
        record = project.outputs / "record.json"
        if not record.is_file():
            raise Inconclusive(f"{record} is missing: `dvc repro` makes or finishes it; or name a record or bundle")
        prefix = hash_bytes(record.read_bytes())
    write_asked(path, page(project.store(configuration.run), digits(project, prefix)))


def page(store: Store, prefix: str) -> str:
    """The page of the record or bundle that a hash or its first digits mean."""
    found = resolve(store, prefix)
    is_record = found.kind == "record"
    parts = _record_parts(store, found.hash) if is_record else _bundle_parts(store, found.hash, found.records)
    body = "\n".join(parts)
    title = f"{found.kind} {found.hash[:12]}"
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{found.kind} <code>{found.hash}</code></h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _record_parts(store: Store, name: str) -> Iterator[str]:
    record = read_record(store, name)
    final = load_bundle(store, record.final_bundle)
    simple = {key: value for key, value in record.results.items() if not isinstance(value, dict | list)}
    yield _section("Results", _table({"tier": record.tier, "steps": record.steps, **simple}))
    yield _section("Loss", curve(final.tensors.get("history/loss"), _held_out(record)))
    yield from _samples(store, record.final_bundle)
    yield _section("Who saw it", _attestations(read_attestations(store, name)))
    yield _section("Configuration", _table(_flat(record.configuration)))
    yield _section(
        "Hashes",
        _table(
            {
                "record": name,
                "first bundle": record.first_bundle,
                "final bundle": record.final_bundle,
                "step digests": record.digests,
                "dataset": record.dataset,
                "tokenizer": record.tokenizer,
                "specification": record.specification,
                "pipeline": record.pipeline,
                "sources": record.sources_digest,
            }
        ),
    )
    yield _section("Bundles", _table({f"step {step}": hash for step, hash in record_bundles(store, name).items()}))
    yield _section("Sources", _table(record.sources))


def _held_out(record: Record) -> dict[str, Any]:
    """Losses on held-out text by step, the one at the end included."""
    held = record.results.get("validation")
    return {
        **(held if isinstance(held, dict) else {}),
        str(record.steps): record.results.get("validation_loss"),
    }


def _bundle_parts(store: Store, name: str, records: Sequence[str]) -> Iterator[str]:
    bundle = load_bundle(store, name)
    yield _section("State", _table(_flat(bundle.state)))
    yield _section("Loss", curve(bundle.tensors.get("history/loss"), {}))
    yield from _samples(store, name)
    yield _section("Records that hold it", _table({str(n + 1): record for n, record in enumerate(records)}))
    tensors = {key: f"{array.dtype} {list(array.shape)}" for key, array in sorted(bundle.tensors.items())}
    yield _section("Tensors", _table(tensors))


def _samples(store: Store, bundle: str) -> Iterator[str]:
    """What runs that hold the bundle have written on the way."""
    for info in list_runs(store):
        lineage = Lineage.read(info.lineage, info.run_id)
        if lineage is None or bundle not in info.bundles.values() or not lineage.samples:
            continue
        texts = [
            f"<h3>after step {step}</h3>\n<pre>{html.escape(text)}</pre>"
            for step, text in lineage.samples_by_step().items()
        ]
        yield _section("Samples", "\n".join(texts))
        return


def _attestations(seen: Mapping[str, Attestation]) -> str:
    """All of them side by side, also those that disagree."""
    parts = []
    for name, item in seen.items():
        verdict = str(item.verdict.get("verdict"))
        title = item.activity if item.activity == verdict else f"{item.activity}: {verdict}"
        parts.append(f"<h3>{html.escape(title)}</h3>")
        times = {"attestation": name, "started": item.started, "finished": item.finished}
        parts.append(_table({**times, **_flat(item.verdict), **_flat(item.environment)}))
    return "\n".join(parts) or "<p>Nobody so far.</p>"


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{content}\n</section>"


def _table(rows: Mapping[str, Any]) -> str:
    if not rows:
        return "<p>None.</p>"
    lines = [f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(_text(rows[key]))}</td></tr>" for key in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(value[key])}" for key in value) or "none"
    if isinstance(value, list | tuple):
        # Parts that have parts of their own are kept apart by more than a comma.
        between = "; " if any(isinstance(item, Mapping | list) for item in value) else ", "
        return between.join(map(_text, value)) or "none"
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested objects as one, keys joined by dots."""
    rows: dict[str, Any] = {}
    for key, item in sorted(value.items()):
        if isinstance(item, Mapping) and item:
            rows |= _flat(item, f"{before}{key}.")
        else:
            rows[f"{before}{key}"] = item
    return rows


def curve(losses: Array | None, held: Mapping[str, Any]) -> str:
    """Training loss as a line (means of neighbours where there are many steps), loss on held-out text as dots."""
    if losses is None or len(losses) == 0:
        return "<p>No steps yet.</p>"
    pieces = np.array_split(losses.astype(np.float64), min(len(losses), _MOST_POINTS))
    ends = np.cumsum([len(piece) for piece in pieces])
    line = [(float(end - (len(piece) - 1) / 2), float(piece.mean())) for end, piece in zip(ends, pieces, strict=True)]
    dots = [(float(step), float(loss)) for step, loss in held.items() if isinstance(loss, int | float)]
    values = [y for _, y in line + dots]
    low, high = min(values), max(values)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    last = max(x for x, _ in line + dots)

    def across(x: float) -> float:
        return _MARGIN + (_WIDTH - 2 * _MARGIN) * x / last

    def down(y: float) -> float:
        return 16 + (_HEIGHT - _MARGIN - 16) * (high - y) / (high - low)

    grid = []
    for text, y in ticks(low, high):
        level = f"{down(y):.1f}"
        grid.append(f'<line class="grid" x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{level}" y2="{level}"/>')
        grid.append(f'<text x="{_MARGIN - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{text}</text>')
    for text, x in ticks(0, last):
        if x == int(x):
            grid.append(f'<text x="{across(x):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{text}</text>')
    points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
    circles = [f'<circle class="held" cx="{across(x):.1f}" cy="{down(y):.1f}" r="3.5"/>' for x, y in dots]
    caption = "training loss (line)" + (" and loss on held-out text (dots)" if dots else "")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{caption} by step">\n'
        + "\n".join(grid)
        + f'\n<polyline class="loss" points="{points}"/>\n'
        + "\n".join(circles)
        + f'\n<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">'
        + f"{caption}, nats per token, by step</text>\n</svg>"
    )


def ticks(low: float, high: float) -> list[tuple[str, float]]:
    """Three to seven round numbers from `low` to `high` (which is more), each with how it is written."""
    power = math.floor(math.log10((high - low) / 3))
    step = next(f for f in (5, 2, 1) if 3 * f * 10.0**power <= high - low)
    unit = step * 10.0**power
    numbers = range(math.ceil(low / unit), math.floor(high / unit) + 1)
    return [(f"{number * unit:.{max(0, -power)}f}", number * unit) for number in numbers]
