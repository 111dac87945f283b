"""Whole trainings on the card end in the CPU's digests, whatever the shards, and state moves between the two."""

import numpy as np
import pytest

from engine.numerics.types import Words
from engine.spec import ModelSpec, TrainSpec
from engine.trainer import Trainer
from tests.cuda.pairs import model, train

pytestmark = pytest.mark.gpu


class RandomBatches:
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        rng = np.random.default_rng(step)
        inputs[:] = rng.integers(0, self.vocab, inputs.shape)
        targets[:] = rng.integers(0, self.vocab, targets.shape)


def trainer(spec: ModelSpec, recipe: TrainSpec, device: str, tier: str = "portable") -> Trainer:
    return Trainer(spec, recipe, tier, RandomBatches(spec.vocab), threads=2, device=device)  # type: ignore[arg-type]


def digests(spec: ModelSpec, recipe: TrainSpec, device: str, steps: int) -> list[str]:
    run = trainer(spec, recipe, device)
    run.initialise()
    found = [run.train_step().digest.hex() for _ in range(steps)]
    run.close()
    return found


CASES = {
    "micro": (model(), train()),
    "one shard": (model(), train(shards=1)),
    "eight shards": (model(), train(batch=8, shards=8)),
    "three shards": (model(), train(batch=6, shards=3)),
    "untied, no biases": (
        model(tied=False, linear_bias=False, norm_parameters=False, activation="relu"), train(batch=8, shards=4),
    ),
    "stored attention": (model(attention="stored"), train()),
    "ragged": (model(context=77, d_model=44, heads=2, hidden=90, layers=2, vocab=101), train(batch=6, shards=2)),
    "no clipping": (model(dropout=0.0), train(clip_norm=0.0, weight_decay=0.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_cpus_digests(case: str) -> None:
    spec, recipe = CASES[case]
    assert digests(spec, recipe, "cuda", 6) == digests(spec, recipe, "cpu", 6)


@pytest.mark.parametrize("tokens", [11, 22, 10**6])
def test_groups_of_shards_move_no_bit(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.backends.cuda import layout

    monkeypatch.setattr(layout, "TOKENS_AT_ONCE", tokens)
    recipe = train(batch=8, shards=8)
    assert digests(model(), recipe, "cuda", 3) == digests(model(), recipe, "cpu", 3)


def test_state_moves_between_devices() -> None:
    spec, recipe = model(), train()
    expected = digests(spec, recipe, "cpu", 6)
    state: dict[str, np.ndarray] = {}
    found = []
    for device in ("cpu", "cuda", "cpu"):
        run = trainer(spec, recipe, device)
        if state:
            run.load_state(state)
        else:
            run.initialise()
        found += [run.train_step().digest.hex() for _ in range(2)]
        state = {name: array.copy() for name, array in run.saved_state().items()}
        run.close()
    assert found == expected


def test_evaluation_and_logits_agree() -> None:
    class Windows:
        count = 5

        def fill(self, first: int, inputs: Words, targets: Words) -> None:
            for row in range(len(inputs)):
                RandomBatches(37).fill(first + row, inputs[row], targets[row])

    results = []
    for device in ("cpu", "cuda"):
        run = trainer(model(), train(), device)
        run.initialise()
        run.train_step()
        logits = run.next_logits(np.arange(7, dtype=np.int32)).copy()
        results.append((run.evaluate(Windows()), logits.tobytes()))
        run.close()
    assert results[0] == results[1]
