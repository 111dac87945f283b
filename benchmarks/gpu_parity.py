"""Do CPU and CUDA card go through the same states? Prints one line for each check; exits 1 on any difference.

python benchmarks/gpu_parity.py digests EXPERIMENT STEPS     every step digest, CPU against card
python benchmarks/gpu_parity.py repeats EXPERIMENT RUNS STEPS [bf16|fp16|fp8]
                                                             RUNS times STEPS steps on the card, and once more with a
                                                             new trainer from the middle on: one last digest
python benchmarks/gpu_parity.py one-step                     one small step on the card (for compute-sanitizer)
"""

import os
import sys
import time
from typing import Any

import numpy as np
from gpu_step import RandomBatches, load
from running import run

from engine.self_test import MODEL, TRAIN
from engine.spec import Precision, Tier
from engine.trainer import Trainer


def digests(name: str, steps: int) -> bool:
    model, train = load(name)
    found = {}
    for device in ("cuda", "cpu"):
        start = time.perf_counter()
        trainer = Trainer(
            model, train, "portable", RandomBatches(model.vocab), threads=os.cpu_count() or 1, device=device
        )
        trainer.initialise()
        found[device] = [trainer.train_step() for _ in range(steps)]
        trainer.close()
        print(f"{name} {device}: {steps} steps in {time.perf_counter() - start:.1f} s", flush=True)
    for cpu, cuda in zip(found["cpu"], found["cuda"], strict=True):
        if cpu.digest != cuda.digest:
            print(
                f"{name}: DIFFERS at step {cpu.step}: loss {cpu.loss!r} {cuda.loss!r}, "
                f"norm {cpu.gradient_norm!r} {cuda.gradient_norm!r}"
            )
            return False
    last = found["cuda"][-1]
    print(f"{name}: equal for {steps} steps, loss {last.loss:.6f}, digest {last.digest.hex()}", flush=True)
    return True


def repeats(name: str, runs: int, steps: int, precision: Precision | None) -> bool:
    model, train = load(name)
    tier: Tier = "prod" if precision else "portable"
    train = train.model_copy(update={"precision": precision})

    def opened() -> Trainer:
        return Trainer(model, train, tier, RandomBatches(model.vocab), threads=1, device="cuda")

    trainer = opened()
    seen = set()
    for _ in range(runs):
        trainer.initialise()
        for step in range(steps):
            if step == steps // 2:
                middle = {name: array.copy() for name, array in trainer.state().items()}
            result = trainer.train_step()
        seen.add(result.digest.hex())
    trainer.close()
    resumed = opened()
    resumed.load_state(middle)
    for _ in range(steps - steps // 2):
        result = resumed.train_step()
    seen.add(result.digest.hex())
    resumed.close()
    what = f"{name} {precision or 'portable'}: {runs} runs of {steps} steps and a resumed one"
    print(f"{what}, {len(seen)} digest(s): {sorted(seen)[:2]}", flush=True)
    return len(seen) == 1


def one_step() -> bool:
    model = MODEL.model_copy(update={"context": 70, "d_model": 24, "heads": 2, "hidden": 40})
    trainer = Trainer(model, TRAIN, "portable", RandomBatches(model.vocab), threads=1, device="cuda")
    trainer.initialise()
    print(trainer.train_step().digest.hex(), float(np.abs(trainer.next_logits(np.arange(5, dtype=np.int32))).max()))
    trainer.close()
    return True


def main() -> int:
    command, *rest = sys.argv[1:]
    if command == "digests":
        good = digests(rest[0], int(rest[1]))
    elif command == "repeats":
        precision: Any = rest[3] if len(rest) > 3 else None
        good = repeats(rest[0], int(rest[1]), int(rest[2]), precision)
    else:
        good = one_step()
    return 0 if good else 1


if __name__ == "__main__":
    run(main)
