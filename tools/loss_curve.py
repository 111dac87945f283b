"""Writes docs/tiny-loss.svg, README's loss curve, from the committed run/: `.venv/bin/python tools/loss_curve.py`."""

import csv
import json
from pathlib import Path

import numpy as np

from reproduce.page import curve

ROOT = Path(__file__).resolve().parent.parent
STYLE = """<style>
svg { background: #fff; } text { font: 12px system-ui, sans-serif; fill: #333; } .grid { stroke: #ddd; }
.loss { fill: none; stroke: #1f6feb; stroke-width: 1.5; } .held { fill: #d1242f; }
</style>"""


def main() -> None:
    with (ROOT / "run" / "plots" / "training.csv").open(encoding="utf-8", newline="") as rows:
        losses = np.array([float(row["loss"]) for row in csv.DictReader(rows)])
    held = dict(json.loads((ROOT / "run" / "run.json").read_bytes())["validation"])
    held[str(len(losses))] = json.loads((ROOT / "run" / "metrics.json").read_bytes())["validation_loss"]
    drawing = curve(losses, held).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, rest = drawing.split(">", 1)
    path = ROOT / "docs" / "tiny-loss.svg"
    path.write_text(f"{head}>\n{STYLE}{rest}\n", encoding="utf-8", newline="")


if __name__ == "__main__":
    main()
