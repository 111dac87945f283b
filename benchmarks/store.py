"""Bundles beside safetensors and torch.save: durable save, verified load, size, blocking, fsck. Prints JSON.

    PYTHONPATH=. .venv/bin/python benchmarks/store.py                   ours, and safetensors
    PYTHONPATH=. .venv/bin/python benchmarks/store.py --peer PYTHON     PYTHON: one with safetensors, blake3, PyTorch

The state is one of GPT-2's shape with moments, 1.5 GB unless --layers or --vocab say less. All save and load in turn,
several rounds; ratios are taken round by round and their median is what counts. Files lie in --folder, which should be
on the disk that matters. Loads, each in a new process, find them in the page cache, where saving left them, and every
measurement finds memory that the machine has just had in hand (see `touch_memory`). fsck is measured with the cache
dropped, against the lesser of two speeds: reading the same files cold, and decompressing and hashing them from memory
on the same cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from trained_state import State, make_state, steps_later, touch_memory

from artifacts import Store, hash_bytes, load_bundle, open_run, save_bundle
from artifacts.bundle import load_manifest, parallel
from artifacts.encoding import MAX_CONTENT, decode
from artifacts.fsck import fsck
from artifacts.saver import BackgroundSaver

PEER = Path(__file__).with_name("peer_store.py")
PEERS = ("safetensors", "torch")


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def both_seconds(action: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of all cores together, which other work on the machine changes less."""
    cpu = time.process_time()
    clock = seconds(action)
    return clock, time.process_time() - cpu


def stored(store: Store) -> int:
    """Bytes of all object files."""
    return sum(store.object_path(name).stat().st_size for name in store.objects())


@contextmanager
def fresh(folder: Path) -> Iterator[Store]:
    path = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield Store(path)
    finally:
        shutil.rmtree(path)


def measure_ours(folder: Path, state: State) -> dict[str, Any]:
    """One durable save and one verified load, then the second bundle of a state 100 steps on."""
    raw = sum(array.nbytes for array in state.values())
    with fresh(folder) as store:
        name = ""

        def save() -> None:
            nonlocal name
            name = save_bundle(store, state, {})

        touch_memory(raw)
        saved, saved_cpu = both_seconds(save)
        size = stored(store)
        command = [sys.executable, __file__, "--load", str(store.path), name]
        loaded = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout)
        later = {tensor: array.copy() for tensor, array in state.items()}
        steps_later(later, 100)
        touch_memory(raw)
        again = seconds(lambda: save_bundle(store, later, {}))
        more = stored(store) - size
    return {
        "save_seconds": saved,
        "save_cpu_seconds": saved_cpu,
        **loaded,
        "bytes": size,
        "second_save_seconds": again,
        "second_bytes": more,
    }


def measure_load(path: Path, name: str) -> dict[str, float]:
    """A verified load in this process, which is new: as when a run is taken up again. Imports are not counted."""
    import artifacts.floats  # noqa: F401

    store = Store(path, read_only=True)
    touch_memory(sum(entry.nbytes for entry in load_manifest(store, name).tensors))
    loaded, loaded_cpu = both_seconds(lambda: load_bundle(store, name))
    return {"load_seconds": loaded, "load_cpu_seconds": loaded_cpu}


def measure_blocking(folder: Path, state: State, rounds: int) -> dict[str, float]:
    """How long a caller that saves in the background waits, against a plain copy of the state."""
    buffer = {name: np.empty_like(array) for name, array in state.items()}

    def copy() -> None:
        for name, array in state.items():
            np.copyto(buffer[name], array)

    copy()
    plain, blocked = [], []
    with fresh(folder) as store, BackgroundSaver(store) as saver:

        def submit() -> None:
            saver.wait_free()
            copy()
            saver.submit(buffer, {}, lambda name: None)

        for _ in range(rounds):
            plain.append(seconds(copy))
            blocked.append(seconds(submit))
            saver.drain()
    return {
        "copy_seconds": statistics.median(plain),
        "blocked_seconds": statistics.median(blocked),
        "ratio": statistics.median(b / p for b, p in zip(blocked, plain, strict=True)),
    }


def drop_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_fsck(folder: Path, state: State) -> dict[str, float]:
    """Bytes of content per second that fsck checks, and what it could check at best."""
    with fresh(folder) as store:
        with open_run(store, "benchmark") as run, store.using():
            run.record_bundle(0, save_bundle(store, state, {}))
        names = list(store.objects())
        paths = [store.object_path(name) for name in names]
        content = sum(array.nbytes for array in state.values())
        drop_cache(paths)
        disk = seconds(lambda: parallel(Path.read_bytes, paths))
        # A part that fits in memory twice over, spread over all tensors.
        part = [path.read_bytes() for path in paths[::4]]
        unpacked = sum(len(decode(file, MAX_CONTENT, "it")) for file in part)
        compute = seconds(lambda: parallel(lambda file: hash_bytes(decode(file, MAX_CONTENT, "it")), part))
        drop_cache(paths)
        checked = seconds(lambda: fsck(store))
    limit = min(content / disk, unpacked / compute)
    return {
        "fsck_bytes_per_second": content / checked,
        "disk_bytes_per_second": content / disk,
        "compute_bytes_per_second": unpacked / compute,
        "of_the_lesser": content / checked / limit,
    }


class Peer:
    """The other interpreter, kept running so that it makes its state once."""

    def __init__(self, python: str, folder: Path, layers: int, vocab: int) -> None:
        threads = len(os.sched_getaffinity(0))
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        self._process = subprocess.Popen(
            [python, str(PEER), str(folder), str(layers), str(vocab), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
        )

    def measure(self, name: str) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] | None = json.loads(self._process.stdout.readline())
        return result

    def close(self) -> None:
        self._process.communicate()


def median(results: list[dict[str, Any]], key: str) -> float:
    return statistics.median(result[key] for result in results)


def ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a peer: its seconds, and ours over its, round by round."""
    report: dict[str, Any] = {"version": theirs[0]["version"], "bytes": theirs[0]["bytes"]}
    for key in ("save_seconds", "save_cpu_seconds", "load_seconds", "load_cpu_seconds"):
        pairs = zip(ours, theirs, strict=True)
        report[key] = median(theirs, key)
        report[f"our_{key}_over_theirs"] = statistics.median(mine[key] / its[key] for mine, its in pairs)
    return report


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", default=sys.executable, help="an interpreter that has the peers")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", nargs=2, metavar=("STORE", "BUNDLE"), help="only load this, for the run that asks")
    arguments = parser.parse_args()
    if arguments.load:
        json.dump(measure_load(Path(arguments.load[0]), arguments.load[1]), sys.stdout)
        return
    state = make_state(arguments.layers, arguments.vocab)
    raw = sum(array.nbytes for array in state.values())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        peer = Peer(arguments.peer, folder, arguments.layers, arguments.vocab)
        ours: list[dict[str, Any]] = []
        theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in PEERS}
        for _ in range(arguments.rounds):
            ours.append(measure_ours(folder, state))
            for name in PEERS:
                result = peer.measure(name)
                if result is not None:
                    theirs[name].append(result)
        peer.close()
        report = {
            "raw_bytes": raw,
            "cores": len(os.sched_getaffinity(0)),
            "ours": {key: median(ours, key) for key in ours[0]},
            "stored_over_raw": ours[0]["bytes"] / raw,
            "peers": {name: ratios(ours, results) for name, results in theirs.items() if results},
            "blocking": measure_blocking(folder, state, arguments.rounds),
            "fsck": measure_fsck(folder, state),
        }
    json.dump(rounded(report), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
