"""Saves and loads the same state with safetensors and PyTorch; run by store.py in an interpreter that may have them.

Reads one word a line, `safetensors` or `torch`, and answers each with one JSON line: seconds (by the clock, and of all
cores together) of a durable save and of a verified load, or null where the library is missing. Arguments: folder,
layers, vocabulary, threads.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
from trained_state import State, make_state, touch_memory


def main() -> None:
    folder, layers, vocab, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    state = make_state(layers, vocab)
    for line in sys.stdin:
        name = line.strip()
        answer = None
        if importlib.util.find_spec(name) is not None:
            measure = {"safetensors": measure_safetensors, "torch": measure_torch}[name]
            answer = measure(folder / f"peer.{name}", state, threads)
        print(json.dumps(answer), flush=True)


def measure_safetensors(path: Path, state: State, threads: int) -> dict[str, Any]:
    """`save_file`, BLAKE3 of the file, fsync; then BLAKE3 again and `load_file`."""
    import safetensors
    from safetensors.numpy import load_file, save_file

    def digest() -> str:
        return blake3.blake3(max_threads=threads).update_mmap(path).hexdigest()

    saved = ""

    def save() -> None:
        nonlocal saved
        save_file(state, path)
        saved = digest()
        sync(path)

    def load() -> object:
        assert digest() == saved
        return load_file(path)

    return both(path, state, save, load, safetensors.__version__)


def measure_torch(path: Path, state: State, threads: int) -> dict[str, Any]:
    """`torch.save` and fsync; then `torch.load`. Neither hashes."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in state.items()}

    def save() -> None:
        torch.save(tensors, path)
        sync(path)

    return both(path, state, save, lambda: torch.load(path), torch.__version__)


def both(
    path: Path, state: State, save: Callable[[], None], load: Callable[[], object], version: str
) -> dict[str, Any]:
    size = sum(array.nbytes for array in state.values())
    report: dict[str, Any] = {"version": version}
    for name, action in (("save", save), ("load", load)):
        touch_memory(size)
        start, start_cpu = time.perf_counter(), time.process_time()
        result = action()
        report[f"{name}_seconds"] = time.perf_counter() - start
        report[f"{name}_cpu_seconds"] = time.process_time() - start_cpu
        del result
    report["bytes"] = path.stat().st_size
    path.unlink()
    return report


def sync(path: Path) -> None:
    for target in (path, path.parent):
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


if __name__ == "__main__":
    main()
