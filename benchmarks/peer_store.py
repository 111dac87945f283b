"""Saves and loads the same state with safetensors and PyTorch; run by store.py in an interpreter that may have them.

Reads one word a line, `safetensors` or `torch`, and answers each with one JSON line: seconds (by the clock, and of all
cores together) of a durable save and of a verified load, or null where the library is missing. Arguments: folder,
layers, vocabulary, threads.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
from trained_state import State, make_state, touch_memory


def main() -> None:
    if sys.argv[1] == "load":
        print(json.dumps(measure_load(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
        return
    folder, layers, vocab, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    state = make_state(layers, vocab)
    for line in sys.stdin:
        name = line.strip()
        answer = None
        if importlib.util.find_spec(name) is not None:
            answer = measure(name, folder / f"peer.{name}", state, threads)
        print(json.dumps(answer), flush=True)


def measure(name: str, path: Path, state: State, threads: int) -> dict[str, Any]:
    """Saves here, loads in a new process."""
    touch_memory(sum(array.nbytes for array in state.values()))
    save = {"safetensors": save_safetensors, "torch": save_torch}[name](path, state, threads)
    start, start_cpu = time.perf_counter(), time.process_time()
    save()
    saved = {"save_seconds": time.perf_counter() - start, "save_cpu_seconds": time.process_time() - start_cpu}
    command = [sys.executable, __file__, "load", name, str(path), str(threads)]
    loaded = json.loads(subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout)
    size = path.stat().st_size
    path.unlink()
    return {**saved, **loaded, "bytes": size}


def digest(path: Path, threads: int) -> str:
    return blake3.blake3(max_threads=threads).update_mmap(path).hexdigest()


def save_safetensors(path: Path, state: State, threads: int) -> Callable[[], None]:
    """`save_file`, BLAKE3 of the file, fsync."""
    from safetensors.numpy import save_file

    def save() -> None:
        save_file(state, path)
        path.with_suffix(".blake3").write_text(digest(path, threads), encoding="ascii")
        sync(path)

    return save


def save_torch(path: Path, state: State, threads: int) -> Callable[[], None]:
    """`torch.save` and fsync: nothing is hashed."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in state.items()}

    def save() -> None:
        torch.save(tensors, path)
        sync(path)

    return save


def measure_load(name: str, path: Path, threads: int) -> dict[str, Any]:
    """BLAKE3 of the file again and `load_file`; or `torch.load`, which verifies nothing. Imports are not counted."""
    action: Callable[[], object]
    if name == "safetensors":
        import safetensors
        from safetensors.numpy import load_file

        def action() -> object:
            assert digest(path, threads) == path.with_suffix(".blake3").read_text(encoding="ascii")
            return load_file(path)

        version = safetensors.__version__
    else:
        import torch

        version = torch.__version__

        def action() -> object:
            return torch.load(path)

    touch_memory(path.stat().st_size)
    start, start_cpu = time.perf_counter(), time.process_time()
    loaded = action()
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    del loaded
    return {"load_seconds": seconds, "load_cpu_seconds": cpu, "version": version}


def sync(path: Path) -> None:
    for target in (path, path.parent):
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


if __name__ == "__main__":
    main()
