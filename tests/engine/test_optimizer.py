"""AdamW, clipping and the gradient norm: bit for bit their definitions, and against float64 over twenty steps."""

from typing import Any

import numpy as np
import pytest

from engine.optimizer import clip_factor
from engine.reference.optimizer import AdamW, clipped
from engine.schedule import step_values
from engine.trainer import Trainer
from tests.engine import exact
from tests.engine.bench import normals, same_bits
from tests.engine.bounds import U
from tests.engine.training import make_trainer

STEPS = 20


def plant(trainer: Trainer, step: int, scale: float = 1.0) -> dict[str, Any]:
    """Random gradients in set 0; the unused places between parameters stay zero."""
    views = trainer.backend.parameter_gradients[0]
    for number, (name, g) in enumerate(views.items()):
        g[:] = normals(100 * step + number, *g.shape, scale=scale * 4.0 ** (number % 5 - 2))
        if name == "embed.token":
            g[0] = 0  # a token that never comes up
    return views


@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_twenty_steps_against_an_independent_implementation(clip_norm: float, scale: float) -> None:
    recipe = {"steps": STEPS, "clip_norm": clip_norm, "decayed": ["matrix", "embedding"], "warmup_steps": 5}
    trainer = make_trainer(train=recipe)
    backend, train = trainer.backend, trainer.train
    start = {name: w.astype(np.float64) for name, w in backend.parameters.items()}
    zeros = {name: np.zeros_like(w) for name, w in start.items()}
    reference = {
        name: AdamW(w, zeros[name], zeros[name], train.beta1, train.beta2, train.epsilon) for name, w in start.items()
    }
    triples = {n: [w.copy(), np.zeros_like(w), np.zeros_like(w)] for n, w in backend.parameters.items()}
    for step in range(STEPS):
        gradients = plant(trainer, step, scale)
        norm = backend.gradient_norm(0)
        same_bits(np.array(norm), np.array(exact.gradient_norm(backend.gradients[0])))
        values = step_values(train, step)
        assert backend.update(0, norm, values) == []
        scaled = clipped({n: g.astype(np.float64) for n, g in gradients.items()}, clip_norm)
        clip = clip_factor(norm, clip_norm)
        for number, parameter in enumerate(trainer.program.parameters):
            name, decayed = parameter.name, parameter.kind in train.decayed
            reference[name].update(scaled[name], float(values.learning_rate), train.weight_decay if decayed else 0.0)
            w, m, v = triples[name]
            triples[name] = list(
                exact.adamw(
                    w,
                    gradients[name],
                    m,
                    v,
                    clip,
                    train.beta1,
                    train.beta2,
                    values.correction1,
                    values.correction2,
                    train.epsilon,
                    values.learning_rate,
                    values.decay if decayed else np.float32(1),
                )
            )
            for kind, wanted in zip(("weights", "m", "v"), triples[name], strict=True):
                same_bits(backend.views(backend.flat[kind])[name], wanted)
            words = [exact.digest_words(x) for x in triples[name]]
            assert backend.sums[number].tolist() == [list(pair) for pair in words]
    # Per step: two roundings of w, and about ten of an update, which is at most 10 rates in size.
    rates = sum(float(step_values(train, step).learning_rate) for step in range(STEPS))
    for name, w in backend.parameters.items():
        bound = STEPS * 2 * U * (np.max(np.abs(start[name])) + 10 * rates) + 20 * U * 10 * rates
        assert np.max(np.abs(w - reference[name].w)) <= bound
        assert np.max(np.abs(w - start[name])) > 100 * bound  # or the comparison would say little


def test_nothing_but_decay_where_gradient_and_moments_are_zero() -> None:
    """The new weight is fp32(w*c), c = fp32(1 - rate*decay), bit for bit; undecayed kinds stay as they are."""
    trainer = make_trainer(train={"weight_decay": 0.37})
    backend = trainer.backend
    backend.parameters["embed.position"][0, :3] = (-0.0, 0.0, 2.0**-149)
    before = {name: w.copy() for name, w in backend.parameters.items()}
    values = step_values(trainer.train, 1)
    c = np.float32(1.0 - float(values.learning_rate) * 0.37)
    assert values.decay == c < 1
    assert backend.update(0, 0.0, values) == []
    for parameter in trainer.program.parameters:
        w = before[parameter.name]
        wanted = w * c if parameter.kind in trainer.train.decayed else w
        same_bits(backend.parameters[parameter.name], wanted)
        for kind in ("m", "v"):
            assert not backend.views(backend.flat[kind])[parameter.name].any()


def test_decay_acts_on_the_kinds_named() -> None:
    for kinds in ([], ["bias"], ["norm", "embedding"], ["matrix", "embedding", "bias", "norm"]):
        trainer = make_trainer(train={"decayed": kinds})
        before = {name: w.copy() for name, w in trainer.backend.parameters.items()}
        trainer.backend.update(0, 0.0, step_values(trainer.train, 1))
        for parameter in trainer.program.parameters:
            moved = not np.array_equal(trainer.backend.parameters[parameter.name], before[parameter.name])
            assert moved == (parameter.kind in kinds)


def test_clip_factor() -> None:
    assert clip_factor(5.0, 0.0) == 1 and clip_factor(5.0, 5.0) == 1 and clip_factor(0.0, 1.0) == 1
    assert clip_factor(5.0, 2.0) == np.float32(0.4)


@pytest.mark.parametrize("size", [1, 31, 33, 4095, 4096, 4097, 3 * 4096 + 5, 40 * 4096 + 1])
def test_gradient_norm_at_any_size(size: int) -> None:
    """Chunks of 4096 whatever the threads; beside NumPy's own sum to 1e-14."""
    heads = {"vocab": max(1, size // 12), "layers": 1}
    trainers = [make_trainer(heads, threads=threads) for threads in (1, 3)]
    norms = []
    for trainer in trainers:
        flat = trainer.backend.gradients[0]
        flat[:] = normals(size, flat.size)
        norms.append(trainer.backend.gradient_norm(0))
        trainer.close()
    assert norms[0] == norms[1] == exact.gradient_norm(flat)
    assert norms[0] == pytest.approx(float(np.linalg.norm(flat.astype(np.float64))), rel=1e-14)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_move_bits(threads: int) -> None:
    """With a parameter of several pieces of 65,536 elements."""
    results = []
    for count in (1, threads):
        trainer = make_trainer({"vocab": 12_000}, threads=count)
        plant(trainer, 0)
        trainer.backend.update(0, trainer.backend.gradient_norm(0), step_values(trainer.train, 0))
        results.append((trainer.backend.sums.copy(), trainer.backend.flat["weights"].copy()))
        trainer.close()
    same_bits(results[1][0], results[0][0])
    same_bits(results[1][1], results[0][1])


@pytest.mark.parametrize(
    ("into", "value"),
    [
        ("gradient", 1e25),  # its square is past fp32: v would be infinite, and the weight frozen for good
        ("gradient", np.nan),
        ("weights", np.inf),
        ("m", np.nan),
        ("v", np.inf),
        ("m", 3e38),
    ],
)
def test_an_update_to_what_is_not_finite_changes_nothing(into: str, value: float) -> None:
    trainer = make_trainer(train={"clip_norm": 0.0, "learning_rate": 10.0})
    backend = trainer.backend
    plant(trainer, 0)
    arrays = backend.gradients[0] if into == "gradient" else backend.flat[into]
    backend.views(arrays)["block1.mlp_up.weight"][-1, -1] = value
    before = {name: x.copy() for name, x in backend.flat.items()}
    assert backend.update(0, 1.0, step_values(trainer.train, 0)) == ["block1.mlp_up.weight"]
    for name, x in backend.flat.items():
        same_bits(x, before[name])
