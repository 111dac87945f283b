"""Whole trainings on the card end in the CPU's digests, whatever the shards, and state moves between the two."""

import numpy as np
import pytest

from engine.backends.cuda.layout import CudaLayout
from engine.errors import NonFinite
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


@pytest.mark.parametrize("attention", ["stored", "tiled"])
def test_recomputed_blocks_move_no_bit(attention: str) -> None:
    spec, recipe = model(layers=3, attention=attention), train(batch=8, shards=4)
    found = []
    for recompute in (0, 2, 3):
        run = Trainer(
            spec, recipe, "portable", RandomBatches(spec.vocab), threads=2, device="cuda", recompute=recompute
        )
        run.initialise()
        found.append([run.train_step().digest.hex() for _ in range(3)])
        run.close()
    assert found[0] == found[1] == found[2] == digests(spec, recipe, "cpu", 3)


def test_nothing_is_allocated_from_the_second_step_on() -> None:
    run = trainer(model(), train(), "cuda")
    run.initialise()
    run.train_step()
    card = run.backend.card  # type: ignore[attr-defined]
    before = card.free_memory()
    for _ in range(20):
        run.train_step()
    run.saved_state()
    assert card.free_memory() == before
    run.close()


def test_debug_tier_repeats_itself_and_learns_the_same() -> None:
    runs = []
    for tier in ("debug", "debug", "portable"):
        run = trainer(model(), train(), "cuda", tier)
        run.initialise()
        runs.append([run.train_step() for _ in range(4)])
        run.close()
    assert [r.digest for r in runs[0]] == [r.digest for r in runs[1]]
    assert [r.digest for r in runs[0]] != [r.digest for r in runs[2]]
    assert np.allclose([r.loss for r in runs[0]], [r.loss for r in runs[2]], rtol=1e-3)


def test_a_non_finite_step_changes_nothing_and_is_named_as_on_the_cpu() -> None:
    messages = []
    for device in ("cpu", "cuda"):
        run = trainer(model(), train(learning_rate=1e38, final_learning_rate=1e38, weight_decay=0.0), device)
        run.initialise()
        before = {name: array.copy() for name, array in run.state().items()}
        with pytest.raises(NonFinite) as caught:
            for _ in range(3):
                before = {name: array.copy() for name, array in run.state().items()}
                run.train_step()
        messages.append(str(caught.value))
        after = run.state()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        run.close()
    assert messages[0] == messages[1]


def test_of_several_shards_the_first_is_named_as_on_the_cpu() -> None:
    """The second shard meets an infinity in an earlier operation than the first does."""

    class TwoTokens:
        def fill(self, step: int, inputs: Words, targets: Words) -> None:
            inputs[:] = targets[:] = 1
            inputs[len(inputs) // 2 :] = 2

    messages = []
    for device in ("cpu", "cuda"):
        run = Trainer(model(), train(), "portable", TwoTokens(), threads=2, device=device)  # type: ignore[arg-type]
        run.initialise()
        state = {name: array.copy() for name, array in run.state().items()}
        state["weights/embed.token"][2] = np.linspace(-1e30, 1e30, 12)
        state["weights/norm.gain"][:] = 3e38
        run.load_state(state)
        with pytest.raises(NonFinite) as caught:
            run.train_step()
        messages.append(str(caught.value))
        run.close()
    assert messages[0] == messages[1]
    assert "norm1" not in messages[0]


@pytest.mark.parametrize("width", [96, 128, 256])
def test_wide_heads_give_the_cpus_digests(width: int) -> None:
    spec, recipe = model(d_model=2 * width, heads=2, hidden=64), train(batch=2)
    assert digests(spec, recipe, "cuda", 2) == digests(spec, recipe, "cpu", 2)


@pytest.mark.parametrize("tokens", [11, 22, 10**6])
def test_groups_of_shards_move_no_bit(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaLayout, "tokens_at_once", tokens)
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
