"""What each tier costs: speed and memory of a training step on the card, beside PyTorch's. Prints JSON lines.

    python benchmarks/price_list.py [--experiments NAME ...] [--tiers portable prod-bf16 prod-fp16]
        [--peer] [--peer-python PYTHON] [--peer-how compiled-graph|graph] [--dropout P] [--steps N] [--seconds S]
        [--markdown]
    python benchmarks/price_list.py --read FILE ... --markdown

Runs gpu_step.py once for each tier and, with --peer, peer_torch.py once for each precision, in processes of their own;
where one fails at an experiment, that is said and the others go on (exit code 1). `--markdown` adds the table; `--read`
takes lines printed before instead of measuring, so that a list can be made in parts. A tier is set beside PyTorch in
the precision that PEER_OF names, with the same sizes, batch and dropout, only within what was measured together.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_step import ROOT, load

HERE = Path(__file__).resolve().parent
EXPERIMENTS = ("tiny", "char-4.8m", "andrea-12m", "andrea-120m", "gpt2-124m")
TIERS = ("portable", "prod-bf16", "prod-fp16", "prod-fp8")
PEER_OF = {"portable": "fp32", "prod-bf16": "bf16", "prod-fp16": "bf16", "prod-fp8": "bf16"}
PROMISES = {
    "portable": "the same bits on every machine",
    "prod-bf16": "the same bits on the same model of card with the same libraries",
    "prod-fp16": "the same bits on the same model of card with the same libraries",
    "prod-fp8": "the same bits on the same model of card with the same libraries",
}
Line = dict[str, Any]
Measure = Callable[[list[str], list[str], float], Iterator[Line]]


def lines_of(command: list[str], experiments: list[str], limit: float) -> Iterator[Line]:
    """The JSON lines of one process, as they come; then, where it failed, one that says so."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    # `timeout` ends a process that hangs in the driver, where reading its lines would wait for ever.
    whole = ["timeout", str(limit * len(experiments)), *command]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        with subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith("{"):
                    yield json.loads(text)
        errors.seek(0)
        messages = errors.read().strip().splitlines()
    if process.returncode:
        print("\n".join(messages[-20:]), file=sys.stderr)
        yield {"error": f"exit code {process.returncode}: {messages[-1] if messages else 'no message'}"}


def in_turn(
    make_command: Callable[[list[str]], list[str]], experiments: list[str], limit: float, measure: Measure
) -> Iterator[Line]:
    """A line for each experiment; after a failure a new process goes on with the next one."""
    left = list(experiments)
    while left:
        seen = 0
        for line in measure(make_command(left), left, limit):
            if "error" in line and seen < len(left):
                yield {"experiment": left[seen], "error": line["error"]}
                seen += 1
            elif "error" not in line:
                yield line | {"experiment": left[seen]}
                seen += 1
        if seen == 0:
            yield {"experiment": left[0], "error": "no line was printed"}
            seen = 1
        left = left[seen:]


def tier_command(tier: str, arguments: argparse.Namespace) -> Callable[[list[str]], list[str]]:
    options = ["--steps", str(arguments.steps), "--seconds", str(arguments.seconds)]
    if arguments.dropout is not None:
        options += ["--dropout", str(arguments.dropout)]
    if tier != "portable":
        options += ["--precision", tier.removeprefix("prod-")]
    return lambda experiments: [sys.executable, str(HERE / "gpu_step.py"), *options, *experiments]


def peer_command(precision: str, arguments: argparse.Namespace) -> Callable[[list[str]], list[str]]:
    options = ["--device", "cuda", "--precision", precision, "--how", arguments.peer_how]

    def command(experiments: list[str]) -> list[str]:
        sizes = [json.dumps(peer_sizes(name, arguments)) for name in experiments]
        return [arguments.peer_python, str(HERE / "peer_torch.py"), *options, *sizes]

    return command


def peer_sizes(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    model, train = load(name)
    timed = {"steps": arguments.steps, "seconds": arguments.seconds}
    sizes = model.model_dump() | {"experiment": name, "batch": train.batch} | timed
    return sizes if arguments.dropout is None else sizes | {"dropout": arguments.dropout}


def tier_line(tier: str, found: Line) -> Line:
    line = {"experiment": found["experiment"], "tier": tier}
    if "error" in found:
        return line | {"error": found["error"]}
    sizes, speeds = ("batch", "dropout", "parameters"), ("timed_steps", "step_ms", "fastest_ms", "tokens_s", "tflops")
    return line | {key: found[key] for key in (*sizes, *speeds, "planned_gib")} | {"gib": found["used_gib"]}


def peer_line(precision: str, found: Line, sizes: dict[str, Any]) -> Line:
    line = {"experiment": found["experiment"], "tier": f"torch-{precision}"}
    if "error" in found:
        return line | {"error": found["error"]}
    return line | {
        "batch": sizes["batch"],
        "dropout": sizes["dropout"],
        "how": found["how"],
        "version": found["version"],
        "timed_steps": found["timed_steps"],
        "step_ms": round(found["seconds"] * 1e3, 3),
        "tokens_s": int(sizes["batch"] * sizes["context"] / found["seconds"]),
        "gib": found["peak_gib"],
    }


def measure_all(arguments: argparse.Namespace, measure: Measure = lines_of) -> Iterator[Line]:
    """All lines: for each tier its experiments, then PyTorch's."""
    names, limit = list(arguments.experiments), arguments.limit
    for tier in arguments.tiers:
        for found in in_turn(tier_command(tier, arguments), names, limit, measure):
            yield tier_line(tier, found)
    if arguments.peer:
        for precision in dict.fromkeys(PEER_OF[tier] for tier in arguments.tiers):
            for found in in_turn(peer_command(precision, arguments), names, limit, measure):
                yield peer_line(precision, found, peer_sizes(found["experiment"], arguments))


def markdown(lines: Sequence[Line]) -> str:
    """The table; a later line of the same experiment and tier stands for an earlier one."""
    latest = {(line["experiment"], line["tier"]): line for line in lines if "error" not in line}
    rows = [
        "| experiment | tier | tokens/s | ms a step | GiB | PyTorch, tokens/s | its GiB | ratio | promise |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys([*EXPERIMENTS, *(name for name, _ in latest)]))
    for name in names:
        for tier in TIERS:
            line = latest.get((name, tier))
            if line is None:
                continue
            peer = latest.get((name, f"torch-{PEER_OF[tier]}"))
            beside = ["", "", ""]
            if peer and all(peer[key] == line[key] for key in ("batch", "dropout")):
                speed, memory = f"{peer['tokens_s']:,} ({PEER_OF[tier]})", f"{peer['gib']:.2f}"
                beside = [speed, memory, f"{line['tokens_s'] / peer['tokens_s']:.2f}"]
            own = [name, tier, f"{line['tokens_s']:,}", f"{line['step_ms']:.2f}", f"{line['gib']:.2f}"]
            rows.append(
                f"| {' | '.join([*own, *beside, PROMISES[tier]])} |".replace("|  |", "| |").replace("|  |", "| |")
            )
    return "\n".join(rows)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--steps", type=int, default=20, help="timed steps at least; 20 if not given")
    parser.add_argument("--seconds", type=float, default=2, help="timed seconds at least; 2 if not given")
    parser.add_argument("--dropout", type=float, help="instead of the experiment's, for all")
    parser.add_argument("--peer", action="store_true", help="also PyTorch")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has PyTorch")
    parser.add_argument("--peer-how", choices=("compiled-graph", "graph"), default="compiled-graph")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one experiment may take on average")
    parser.add_argument("--markdown", action="store_true", help="also the table")
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="take lines from files, measure nothing")
    return parser.parse_args(words)


def read_lines(files: Sequence[Path]) -> Iterator[Line]:
    """The lines of files, which may hold other text between them."""
    for file in files:
        for text in file.read_text(encoding="utf-8").splitlines():
            if text.startswith("{"):
                line = json.loads(text)
                if "tier" in line and "experiment" in line:
                    yield line


def main() -> int:
    arguments = parse()
    lines = []
    for line in read_lines(arguments.read) if arguments.read else measure_all(arguments):
        lines.append(line)
        if not arguments.read:
            print(json.dumps(line), flush=True)
    if arguments.markdown:
        print(markdown(lines))
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
