"""Bundles to and from files of other programs, with the names that the configuration's model gives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from artifacts import Bundle, Store, open_run, save_bundle
from artifacts.bundle import Array
from artifacts.interchange.andrea import LACKS as ANDREA_LACKS
from artifacts.interchange.andrea import Layout, read_andrea, write_andrea
from artifacts.interchange.names import to_ours, to_theirs
from engine.program import build_program
from engine.spec import ModelSpec
from reproduce.errors import ReproduceError
from reproduce.gpt2 import gpt2_config, gpt2_names, their_names
from reproduce.kinds import require_andrea, require_safetensors
from reproduce.outputs import write_json

GPT2_LACKS = ("Adam's moments (set to zero)", "the step (set to 0)", *ANDREA_LACKS[1:])
"""What a bundle has and a file of weights has not."""

_READ = 2**20


@dataclass(frozen=True)
class Imported:
    """A bundle made of a file; `run` is what lists it, `lacks` says what the file could not tell."""

    bundle: str
    run: str
    lacks: Sequence[str]


def layout_of(model: ModelSpec) -> Layout:
    """Names and shapes of the model's parameters in the order of its program."""
    return [(parameter.name, parameter.shape) for parameter in build_program(model).parameters]


def export_gpt2(bundle: Bundle, name: str, model: ModelSpec, folder: Path) -> None:
    """Writes the weights of bundle `name` as model.safetensors with GPT-2's tensor names, and config.json, into the
    new folder `folder`, where `transformers` can load them. Raises ReproduceError for what GPT-2 cannot express."""
    from artifacts.interchange.tensor_file import write_safetensors

    names, config = gpt2_names(model), gpt2_config(model)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise ReproduceError(f"{folder} is there already: remove it or name another folder") from error
    weights = {entry.ours: _tensor(bundle, name, f"weights/{entry.ours}") for entry in names}
    write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", to_theirs(weights, names), {"bundle": name, "format": "pt"})


def import_gpt2(store: Store, path: Path, model: ModelSpec) -> Imported:
    """Takes weights with GPT-2's tensor names (a file, or the folder of one) into `store` as a bundle."""
    from artifacts.interchange.tensor_file import read_safetensors

    file = path / "model.safetensors" if path.is_dir() else path
    names = gpt2_names(model)
    what = f"safetensors file {file}"
    require_safetensors(file)
    found, _ = read_safetensors(file)
    renamed = their_names(set(found))
    if len(set(renamed.values())) != len(renamed):
        raise ReproduceError(f"{what}: holds a tensor twice, with and without the prefix transformer.")
    tensors = {renamed[name]: found[name] for name in renamed}
    head = tensors.pop("lm_head.weight", None)
    if head is not None and not np.array_equal(head, tensors.get("transformer.wte.weight", np.empty(0))):
        raise ReproduceError(f"{what}: its head is not its token embedding, so model.tied cannot hold")
    weights = to_ours(tensors, names, what)
    state = {f"weights/{name}": array for name, array in weights.items()}
    for kind in ("m", "v"):
        state |= {f"{kind}/{name}": np.zeros_like(array) for name, array in weights.items()}
    return _save(store, state, 0, "gpt2", file, GPT2_LACKS)


def export_andrea(bundle: Bundle, model: ModelSpec, path: Path) -> None:
    """Writes step, weights and moments of a bundle as an ANDREA checkpoint."""
    step = bundle.state.get("step")
    if not isinstance(step, int):
        raise ReproduceError("expected a step in the bundle's state, found none")
    write_andrea(path, step, bundle.tensors, layout_of(model))


def import_andrea(store: Store, path: Path, model: ModelSpec) -> Imported:
    """Takes an ANDREA checkpoint into `store` as a bundle."""
    layout = layout_of(model)
    require_andrea(path, sum(math.prod(shape) for _, shape in layout))
    found = read_andrea(path, layout)
    return _save(store, found.tensors, found.step, "andrea", path, ANDREA_LACKS)


def _tensor(bundle: Bundle, bundle_name: str, name: str) -> Array:
    if name not in bundle.tensors:
        raise ReproduceError(f"bundle {bundle_name} has no tensor {name}: it belongs to another model")
    return bundle.tensors[name]


def _save(store: Store, tensors: dict[str, Array], step: int, kind: str, file: Path, lacks: Sequence[str]) -> Imported:
    """The bundle says where it comes from and what it lacks, so no run takes it for one of its own."""
    source: dict[str, Any] = {"file": _hash_file(file), "kind": kind, "lacks": list(lacks)}
    with store.using():
        bundle = save_bundle(store, tensors, {"imported": source, "step": step})
        run_id = f"imported-{bundle[:16]}"
        with open_run(store, run_id) as run:
            run.record_bundle(step, bundle)
            run.set_state("complete")
    return Imported(bundle, run_id, lacks)


def _hash_file(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as file:
        while part := file.read(_READ):
            digest.update(part)
    return digest.hexdigest()
