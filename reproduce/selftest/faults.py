"""The faults: what is done to a copy, and what verification has to say of it."""

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts import Attestation, read_attestations, record_bundles, write_attestation, write_digests
from artifacts.errors import ArtifactError
from data_pipeline import open_dataset
from engine.trainer import Trainer
from reproduce.comparing import state_digest
from reproduce.outputs import write_bytes
from reproduce.selftest.elsewhere import verify_elsewhere
from reproduce.selftest.lab import Deviation, Lab, Settings, bits, make_lab

Found = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """name: what was done. spoil: does it to a copy and verifies. verdict, step, says: what the verdict has to be, at
    which step the first difference, and what the report has to name. harmless: nothing is wrong, and must not be found
    wrong. step 0 is the state before the first step; None where the verdict has no step."""

    name: str
    spoil: Callable[[Lab], Found]
    verdict: str
    step: int | None = None
    says: tuple[str, ...] = ()
    harmless: bool = False
    needs: str = ""

    def applies(self) -> bool:
        return not self.needs or platform.machine() in ("x86_64", "AMD64")


def faults() -> list[Fault]:
    """All of them."""
    return [*_states(), *_trainings(), *_settings(), *_files(), *_harmless()]


# Saved states


def _states() -> list[Fault]:
    def flip(lab: Lab) -> Found:
        def change(tensors: dict[str, Any]) -> None:
            bits(tensors["weights/embed.token"])[21] ^= np.uint32(1)

        return lab.verify(lab.forge_final(change))

    def swap(lab: Lab) -> Found:
        def change(tensors: dict[str, Any]) -> None:
            m, v = tensors["m/embed.token"], tensors["v/embed.token"]
            tensors["m/embed.token"], tensors["v/embed.token"] = v, m

        return lab.verify(lab.forge_final(change))

    def swap_digests(lab: Lab) -> Found:
        final = lab.store.get(lab.read().digests)
        rows = [final[at : at + 32] for at in range(0, len(final), 32)]
        rows[3], rows[4] = rows[4], rows[3]
        return lab.verify(lab.forge(digests=write_digests(lab.store, rows)))

    return [
        Fault("a flipped bit in a weight", flip, "differs", 12, ("weights/embed.token", '"index": [1, 5]')),
        Fault("the two moments of a tensor swapped", swap, "differs", 12, ("m/embed.token", "v/embed.token")),
        Fault("two step digests swapped", swap_digests, "corrupt", None, ("step digests",)),
    ]


# Trainings that did something else than their record claims


def _trainings() -> list[Fault]:
    def run(deviation: Deviation) -> Callable[[Lab], Found]:
        return lambda lab: lab.verify(lab.forge_run(deviation))

    def skip(trainer: Trainer, step: int) -> None:
        before = {name: array.copy() for name, array in trainer.state().items()}
        trainer.train_step()
        if step == 7:
            _restore(trainer, before)

    def repeat(trainer: Trainer, step: int) -> None:
        trainer.train_step()
        if step == 7:
            trainer.step -= 1
            trainer.train_step()

    def flip_midway(trainer: Trainer, step: int) -> None:
        if step == 6:
            bits(trainer.state()["weights/embed.position"])[40] ^= np.uint32(1 << 20)
            trainer.backend.weights_changed()  # type: ignore[attr-defined]
        trainer.train_step()

    def another_data_byte(lab: Lab) -> Found:
        text = (lab.project.root / "corpus" / "text.txt").read_bytes()
        other = make_lab(lab.project.root / "other", text=text.replace(b"fox 60", b"fax 60", 1).decode("utf-8"))
        return lab.verify(lab.forge_run(Deviation(dataset=open_dataset(other.project.dataset))))

    def another_vocabulary_order(lab: Lab) -> Found:
        order = np.arange(lab.dataset().tokenizer.size, dtype=np.int32)[::-1]
        return lab.verify(lab.forge_run(Deviation(batches=lambda true: _Renumbered(true, order))))

    return [
        Fault("a step skipped", run(Deviation(around_step=skip)), "differs", 7),
        Fault("a step done twice", run(Deviation(around_step=repeat)), "differs", 7),
        Fault("a bit of a weight flipped while training", run(Deviation(around_step=flip_midway)), "differs", 6),
        Fault("one token of one batch changed", run(Deviation(batches=_OneToken)), "differs", 5),
        Fault("two batches swapped", run(Deviation(batches=_Swapped)), "differs", 4),
        Fault("trained on data with one byte changed", another_data_byte, "differs", 12),
        Fault("trained with another order of the vocabulary", another_vocabulary_order, "differs", 1),
    ]


class _Batches:
    """Batches like those of `true`."""

    def __init__(self, true: Any) -> None:
        self.true = true

    def fill(self, step: int, inputs: Any, targets: Any) -> None:
        self.true.fill(step, inputs, targets)


class _OneToken(_Batches):
    def fill(self, step: int, inputs: Any, targets: Any) -> None:
        super().fill(step, inputs, targets)
        if step == 4:
            inputs[1, 3] = (inputs[1, 3] + 1) % 30


class _Swapped(_Batches):
    def fill(self, step: int, inputs: Any, targets: Any) -> None:
        super().fill({3: 8, 8: 3}.get(step, step), inputs, targets)


class _Renumbered(_Batches):
    def __init__(self, true: Any, order: Any) -> None:
        super().__init__(true)
        self.order = order

    def fill(self, step: int, inputs: Any, targets: Any) -> None:
        super().fill(step, inputs, targets)
        inputs[...], targets[...] = self.order[inputs], self.order[targets]


def _restore(trainer: Trainer, before: dict[str, Any]) -> None:
    """Weights and moments of before the step, with a digest that fits them."""
    state = trainer.state()
    for name, array in state.items():
        if not name.startswith("history/"):
            array[...] = before[name]
    trainer.backend.weights_changed()  # type: ignore[attr-defined]
    digest = state_digest(trainer, state)
    trainer.digests[trainer.step - 1] = np.frombuffer(digest, np.uint8)


# Trainings with another configuration than their record claims


def _settings() -> list[Fault]:
    def run(settings: Settings) -> Callable[[Lab], Found]:
        return lambda lab: lab.verify(lab.forge_run(Deviation(settings=settings)))

    next_rate = float(np.nextafter(np.float32(2e-3), np.float32(1)))
    return [
        Fault("trained with another seed", run({"train": {"seed": 1338}}), "differs", 0),
        Fault("trained with another dropout rate", run({"model": {"dropout": 0.2}}), "differs", 1),
        Fault(
            "trained with the learning rate one fp32 step higher",
            run({"train": {"learning_rate": next_rate}}),
            "differs",
            1,
        ),
        Fault("trained with another clipping threshold", run({"train": {"clip_norm": 0.26}}), "differs", 1),
        Fault("trained with another beta1", run({"train": {"beta1": 0.8}}), "differs", 1),
        Fault("trained with another beta2", run({"train": {"beta2": 0.98}}), "differs", 1),
        Fault("trained with another epsilon", run({"train": {"epsilon": 2e-8}}), "differs", 1),
        Fault("trained with another weight decay", run({"train": {"weight_decay": 0.11}}), "differs", 1),
        Fault("trained with a longer warm-up", run({"train": {"warmup_steps": 3}}), "differs", 1),
        Fault("trained with other logical shards", run({"train": {"shards": 4}}), "differs", 1),
    ]


# Files


def _files() -> list[Fault]:
    def doctor_in_place(lab: Lab) -> Found:
        path = lab.store.object_path(lab.record)
        _overwrite(path, _flipped(path.read_bytes()))
        return lab.verify()

    def doctor(lab: Lab) -> Found:
        return lab.verify(lab.forge(results={**lab.read().results, "validation_loss": 1.0}))

    def doctor_configuration(lab: Lab) -> Found:
        configuration = json.loads(json.dumps(lab.read().configuration))
        configuration["train"]["learning_rate"] = 1e-3
        return lab.verify(lab.forge(configuration=configuration))

    def alter_attestation(lab: Lab) -> Found:
        folder = lab.store.path / "attestations" / lab.record
        path = next(iter(sorted(folder.iterdir())))
        _overwrite(path, path.read_bytes().replace(b'"trained"', b'"trusted"', 1))
        return lab.verify()

    def remove_object(lab: Lab) -> Found:
        lab.store.object_path(lab.read().final_bundle).unlink()
        return lab.verify()

    def damage_object(lab: Lab) -> Found:
        path = lab.store.object_path(lab.read().digests)
        _overwrite(path, _flipped(path.read_bytes()))
        return lab.verify()

    def edit_lock(lab: Lab) -> Found:
        lock: Any = json.loads(json.dumps(lab.read().lock))
        lock["train"]["params"]["params.yaml"]["train"]["learning_rate"] = 1e-3
        return lab.verify(lab.forge(lock=lock))

    def edit_lock_of_data(lab: Lab) -> Found:
        text = json.dumps(lab.read().lock)
        lock: Any = json.loads(text)
        named = lock["prepare"]["outs"][0]["md5"]
        return lab.verify(lab.forge(lock=json.loads(text.replace(named, "0" * 32 + ".dir"))))

    def change_data(lab: Lab) -> Found:
        _overwrite(lab.project.root / "corpus" / "text.txt", b"Something else.\n" * 400)
        shard = lab.project.dataset / "train-00000.bin"
        _overwrite(shard, _flipped(shard.read_bytes()))
        return lab.verify()

    def exchange_list(lab: Lab) -> Found:
        path = lab.store.path / "index" / "records" / lab.record
        text = path.read_bytes()
        bundles = record_bundles(lab.store, lab.record)
        _overwrite(path, text.replace(bundles[5].encode(), bundles[10].encode()))
        return lab.verify()

    return [
        Fault("a record altered where it lies", doctor_in_place, "corrupt", None, ("object",)),
        Fault("a record with a better result", doctor, "differs", 12, ("validation loss",)),
        Fault("a record with another configuration", doctor_configuration, "corrupt", None, ("learning_rate",)),
        Fault("an attestation altered where it lies", alter_attestation, "corrupt", None, ("attestation",)),
        Fault("an object removed", remove_object, "corrupt", None, ("object",)),
        Fault("an object damaged", damage_object, "corrupt", None, ("object",)),
        Fault("dvc.lock edited: a parameter", edit_lock, "corrupt", None, ("lock", "learning_rate")),
        Fault("dvc.lock edited: the hash of the data", edit_lock_of_data, "corrupt", None, ("lock", "dataset")),
        Fault("data damaged, and its source gone", change_data, "inconclusive", None, ("its sources now give",)),
        Fault("the list of bundles altered", exchange_list, "corrupt", None, ("index of record",)),
        Fault(
            "flush-to-zero switched on in the verifier",
            lambda lab: verify_elsewhere(lab, flush_to_zero=True),
            "inconclusive",
            None,
            ("no flush-to-zero",),
            needs="x86",
        ),
    ]


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _overwrite(path: Any, data: bytes) -> None:
    path.unlink()
    write_bytes(path, data)


# What must not matter


def _harmless() -> list[Fault]:
    def threads(lab: Lab) -> Found:
        run = lab.configuration.run.model_copy(update={"threads": 3})
        return Lab(lab.project, lab.configuration.model_copy(update={"run": run}), lab.record).verify()

    def recompute(lab: Lab) -> Found:
        run = lab.configuration.run.model_copy(update={"recompute": 1})
        return Lab(lab.project, lab.configuration.model_copy(update={"run": run}), lab.record).verify()

    def surroundings(lab: Lab) -> Found:
        return verify_elsewhere(lab, environment={"PYTHONHASHSEED": "99", "LC_ALL": "C", "TZ": "Asia/Tokyo"})

    def sources(lab: Lab) -> Found:
        return verify_elsewhere(lab, comment_in="engine/trainer.py")

    return [
        Fault("three threads instead of one", threads, "bit-exact", harmless=True),
        Fault("a block computed twice to save memory", recompute, "bit-exact", harmless=True),
        Fault("another locale, hash seed and time zone", surroundings, "bit-exact", harmless=True),
        Fault("a comment in a source of the engine", sources, "bit-exact", None, ("engine/trainer.py",), harmless=True),
    ]


def rehashed_attestation_is_accepted(lab: Lab) -> bool:
    """What no check can find as long as attestations are not signed: one that was altered and given its new hash."""
    true = next(iter(read_attestations(lab.store, lab.record).values()))
    machine = {**true.environment, "cpu": {"flags": [], "model": "a machine that never was"}}
    try:
        write_attestation(
            lab.store, Attestation(true.record, true.activity, true.verdict, machine, true.started, true.finished)
        )
        return bool(lab.verify()["verdict"] == "bit-exact")
    except ArtifactError:
        return False
