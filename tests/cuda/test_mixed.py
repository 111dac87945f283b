"""The tier prod: near the tier portable, and the same bits however it is packed, stopped or repeated.

On the card, and everywhere on a card made of host memory (fake_card.py), with smaller models.
"""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.backends.cuda.errors import DeviceUnavailable
from engine.backends.cuda.mixed import layout, twins, weight_gradients
from engine.backends.cuda.mixed import run as mixed_run
from engine.backends.cuda.mixed.backend import MixedBackend
from engine.backends.cuda.mixed.layout import MixedLayout
from engine.errors import NonFinite, SpecError, StateMismatch, TokenError
from engine.numerics.types import Array, Words
from engine.spec import ModelSpec, Precision, TrainSpec
from engine.trainer import Trainer
from tests.cuda import fake_card
from tests.cuda.emulation import COMPILER
from tests.cuda.pairs import model, train
from tests.cuda.test_trainer import RandomBatches

Specs = tuple[ModelSpec, TrainSpec]

ON_A_CARD: dict[str, Any] = {"d_model": 64, "heads": 2, "hidden": 136, "context": 48, "vocab": 101, "layers": 2}
EMULATED: dict[str, Any] = {"d_model": 16, "heads": 2, "hidden": 24, "context": 8, "vocab": 11, "layers": 2}
# Where our own kernel computes the ends of branches, with LayerNorm.
NORMS_WITH_PRODUCTS: dict[str, Any] = {"d_model": 128, "heads": 2, "hidden": 72, "context": 64}
sizes: dict[str, Any] = {}  # of the machine that the test runs on


@pytest.fixture(autouse=True, params=[pytest.param("card", marks=pytest.mark.gpu), "emulated"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    sizes.clear()
    sizes.update(ON_A_CARD if request.param == "card" else EMULATED)
    if request.param == "emulated":
        if COMPILER is None:
            pytest.skip("no C++ compiler for the emulator")
        fake_card.install(monkeypatch)
    return str(request.param)


def small(**changes: object) -> ModelSpec:
    return model(**(sizes | {"dropout": 0.0, "init_std": 0.05} | changes))


CASES: dict[str, Callable[[], Specs]] = {
    "tied": lambda: (small(), train(batch=8, shards=4)),
    "untied, no biases, relu": lambda: (
        small(tied=False, linear_bias=False, norm_parameters=False, activation="relu"), train(batch=8, shards=4),
    ),
    "one shard": lambda: (small(), train(shards=1)),
    "three shards": lambda: (small(), train(batch=6, shards=3)),
    "whole vocabulary": lambda: (small(vocab=128), train()),
    "wide": lambda: (small(d_model=520, heads=5, hidden=1032, layers=1), train()),
    "wide heads": lambda: (small(d_model=256, heads=2, layers=1), train()),
    "norms with products": lambda: (small(**NORMS_WITH_PRODUCTS), train(batch=4, shards=4)),
    "norms with products, one shard, bare": lambda: (
        small(**NORMS_WITH_PRODUCTS, tied=False, linear_bias=False, norm_parameters=False), train(batch=2, shards=1),
    ),
    "norms with products, parts of blocks": lambda: (
        small(**NORMS_WITH_PRODUCTS | {"context": 24, "hidden": 8}), train(batch=4, shards=2),
    ),
    "norms bare, biases": lambda: (small(norm_parameters=False), train(batch=4, shards=2)),
    "shards of whole blocks": lambda: (small(context=64), train(batch=4, shards=4)),
    "shards of whole blocks, no biases": lambda: (small(context=64, linear_bias=False), train(batch=4, shards=4)),
}  # fmt: skip


PLAIN_AND_DROPOUT = pytest.mark.parametrize(
    "changes", [pytest.param({}, marks=pytest.mark.slow), {"dropout": 0.1}], ids=["plain", "dropout"]
)
QUICK = (
    "tied",
    "untied, no biases, relu",
    "norms with products",
    "shards of whole blocks",
)  # the others take long in the emulator


def trainer(spec: ModelSpec, recipe: TrainSpec, precision: Precision | None = "bf16", recompute: int = 0) -> Trainer:
    run = Trainer(
        spec,
        recipe.model_copy(update={"precision": precision}),
        "prod" if precision else "portable",
        RandomBatches(spec.vocab),
        threads=2,
        device="cuda" if precision else "cpu",  # whose bits the tier portable has on every device
        recompute=recompute,
    )
    run.initialise()
    return run


def digests(run: Trainer, steps: int) -> list[str]:
    found = [run.train_step().digest.hex() for _ in range(steps)]
    run.close()
    return found


def one_step(run: Trainer) -> tuple[float, dict[str, Array]]:
    """From weights of which none are zeros or ones all over."""
    state = {name: array.copy() for name, array in run.state().items()}
    rng = np.random.default_rng(7)
    for name in sorted(state):
        if name.startswith("weights/"):
            state[name] += np.float32(0.05) * rng.standard_normal(state[name].shape).astype(np.float32)
    run.load_state(state)
    loss = float(run.train_step().loss)
    state = {name: array.copy() for name, array in run.state().items() if name.startswith("m/")}
    run.close()
    return loss, state


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_gradients_are_near_those_of_the_tier_portable(case: str, precision: Precision) -> None:
    spec, recipe = CASES[case]()
    if precision == "fp8":
        spec = spec.model_copy(update={name: -(-getattr(spec, name) // 16) * 16 for name in ("d_model", "hidden")})
        heads = next(h for h in range(spec.heads, spec.d_model) if spec.d_model % (8 * h) == 0)
        spec = spec.model_copy(update={"heads": heads})
    expected_loss, expected = one_step(trainer(spec, recipe, None))
    loss, found = one_step(trainer(spec, recipe, precision))
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-5}[precision]
    assert loss == pytest.approx(expected_loss, rel=2 * unit)
    for name, wanted in expected.items():
        # The first moment after one step is the clipped gradient times 1 - beta1.
        distance = np.linalg.norm(found[name] - wanted) / np.linalg.norm(wanted)
        # ReLU's derivative jumps where rounding moves a number across zero: how many do goes with the unit, and so the
        # square of the distance.
        assert distance < (16 * unit if spec.activation == "gelu" else 2 * unit**0.5), (name, distance)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"dropout": 0.1},
        pytest.param(NORMS_WITH_PRODUCTS | {"context": 40, "dropout": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["plain", "dropout", "norms with products in parts of blocks"],
)
def test_packing_of_shards_moves_no_bit(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, recipe = small(**changes), train(batch=16, shards=8)
    shard = 2 * spec.context
    monkeypatch.setattr(twins, "DROPOUT_TOKENS", shard)  # of the library's attention, where it serves
    found = []
    for tokens in (32768, 2 * shard, shard):
        monkeypatch.setattr(MixedLayout, "tokens_at_once", tokens)
        found.append(digests(trainer(spec, recipe), 2))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("changes", [{}, NORMS_WITH_PRODUCTS | {"dropout": 0.1}], ids=["plain", "norms with products"])
def test_packing_moves_no_bit_where_blocks_of_tokens_are_whole(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There our own products take the rows of all shards at once, with the activation's derivative, with LayerNorm."""
    spec, recipe = small(**({"context": 64} | changes)), train(batch=4, shards=4)
    found = []
    for tokens in (32768, 128, 64):
        monkeypatch.setattr(MixedLayout, "tokens_at_once", tokens)
        found.append(digests(trainer(spec, recipe), 2))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("changes", [{}, NORMS_WITH_PRODUCTS | {"context": 8}], ids=["plain", "norms with products"])
def test_packing_moves_no_bit_where_the_library_computes_attention(
    changes: dict[str, object], machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On cards that our own kernels are not for; its dropout goes by the place in a call."""
    if machine == "card":
        pytest.skip("which kernels compute attention is the card's")
    fake_card.install(monkeypatch, capability=80)
    spec, recipe = small(dropout=0.1, **changes), train(batch=8, shards=4)
    shard = 2 * spec.context
    monkeypatch.setattr(twins, "DROPOUT_TOKENS", shard)
    found = []
    for tokens in (32768, shard):
        monkeypatch.setattr(MixedLayout, "tokens_at_once", tokens)
        found.append(digests(trainer(spec, recipe), 2))
    assert found[0] == found[1]


def norm_of_a_step(run: Trainer) -> tuple[float, float]:
    """As the step says it, and of the gradients that it leaves."""
    said = float(run.train_step().gradient_norm)
    backend = run.backend
    assert isinstance(backend, MixedBackend)
    flat = np.empty(backend.plan.flat_elements, np.float32)
    backend.card.driver.memcpy_dtoh(flat, backend.address(f"gradients{backend._result_set}"))
    found = sum(float((g.astype(np.float64) ** 2).sum()) for g in backend.views(flat).values())
    run.close()
    return said, found**0.5


@pytest.mark.parametrize("tied", [False, True])
def test_the_norm_is_that_of_the_gradients(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether squares are added up as gradients are computed, or later where these are joined later."""
    monkeypatch.setattr(weight_gradients, "ENOUGH_BLOCKS", 1)  # one chain, as large weights have
    # Weights of several blocks, and parts of them.
    spec, recipe = small(tied=tied, d_model=72, heads=1, hidden=136), train(batch=16, shards=8)
    shard, norms = 2 * spec.context, []
    for module in (layout, mixed_run):
        monkeypatch.setattr(module, "USUAL_TOKENS", 4 * shard)
    for at_once, joins_later in ((4, False), (2, True)):
        monkeypatch.setattr(MixedLayout, "tokens_at_once", at_once * shard)
        run = trainer(spec, recipe)
        assert isinstance(run.backend, MixedBackend)
        weights = {p.name for p in run.program.parameters if p.kind == "matrix"}
        assert set(run.backend.squares.shapes) == weights - {"embed.token"} > {"block0.mlp_up.weight"}
        assert run.backend.run(2 * at_once, spec.context).joins_later == joins_later
        said, found = norm_of_a_step(run)
        assert said == pytest.approx(found, rel=1e-6)
        norms.append(said)
    assert norms[0] == norms[1]


def test_packing_of_shards_moves_no_bit_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, recipe = small(hidden=32), train(batch=8, shards=4)
    found = []
    for tokens in (32768, 2 * spec.context):
        monkeypatch.setattr(MixedLayout, "tokens_at_once", tokens)
        found.append(digests(trainer(spec, recipe, "fp8"), 2))
    assert found[0] == found[1] != digests(trainer(spec, recipe, "bf16"), 2)


def test_fp8_refuses_widths_that_its_products_do_not_take() -> None:
    with pytest.raises(SpecError, match=r"precision fp8 needs model\.hidden to be a multiple of 16, found 24"):
        trainer(small(hidden=24), train(), "fp8")


def test_fp8_refuses_cards_without_it(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine == "card":
        pytest.skip("the card has it")
    monkeypatch.setattr(fake_card.Card, "capability", 80)
    with pytest.raises(DeviceUnavailable, match=r"fp8 needs at least 8\.9: use bf16"):
        trainer(small(hidden=32), train(), "fp8")


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}], ids=["plain", "dropout"])
def test_when_the_side_stream_runs_moves_no_bit(machine: str, changes: dict[str, object], monkeypatch) -> None:
    """Nothing on the main stream reads or overwrites what work beside it has not finished with."""
    if machine == "card":
        pytest.skip("the card chooses when")
    for recompute in (0, 3):
        found = []
        for late in (False, True):
            monkeypatch.setattr(fake_card.SIDE_WORK, "late", late)
            run = trainer(small(layers=3, **changes), train(batch=8, shards=4), recompute=recompute)
            found.append(digests(run, 2))
            assert not fake_card.SIDE_WORK.queue
        assert found[0] == found[1]


def test_dropout_drops() -> None:
    recipe = train(batch=16, shards=8)
    assert digests(trainer(small(dropout=0.1), recipe), 1) != digests(trainer(small(), recipe), 1)


@PLAIN_AND_DROPOUT
def test_recomputed_blocks_move_no_bit(changes: dict[str, object]) -> None:
    spec, recipe = small(layers=3, **changes), train(batch=8, shards=4)
    found = [digests(trainer(spec, recipe, recompute=count), 3) for count in (0, 2, 3)]
    assert found[0] == found[1] == found[2]


def test_recomputed_blocks_move_no_bit_where_norms_are_computed_with_products() -> None:
    spec, recipe = small(layers=3, dropout=0.1, **NORMS_WITH_PRODUCTS), train(batch=4, shards=4)
    found = [digests(trainer(spec, recipe, recompute=count), 2) for count in (0, 2, 3)]
    assert found[0] == found[1] == found[2]


@PLAIN_AND_DROPOUT
def test_recomputed_blocks_move_no_bit_where_norms_have_no_parameters(changes: dict[str, object], monkeypatch) -> None:
    """There LayerNorm's way back reads what the operations after it read, too."""
    found = []
    for recompute, late in ((0, False), (0, True), (2, False), (3, True)):
        monkeypatch.setattr(fake_card.SIDE_WORK, "late", late)  # nothing on a card
        spec, recipe = small(layers=3, norm_parameters=False, **changes), train(batch=8, shards=4)
        found.append(digests(trainer(spec, recipe, recompute=recompute), 2))
    assert found.count(found[0]) == len(found)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_repeats_and_a_resume_move_no_bit(precision: Precision) -> None:
    spec, recipe = small(dropout=0.1), train(batch=8, shards=4)
    whole = digests(trainer(spec, recipe, precision), 5)
    first = trainer(spec, recipe, precision)
    begun = [first.train_step().digest.hex() for _ in range(3)]
    state = {name: array.copy() for name, array in first.saved_state().items()}
    first.close()
    second = trainer(spec, recipe, precision)
    second.load_state(state)
    assert begun + digests(second, 2) == whole


def test_an_overflow_halves_the_scale_and_is_tried_again() -> None:
    """As if it had begun with the scale that it comes to."""
    found, scale = [], 2.0**40
    for _ in range(2):
        run = trainer(small(), train(), "fp16")
        backend: Any = run.backend
        backend.scale = np.float32(scale)
        found.append(digests(run, 3))
        came_to, scale = scale, float(backend.scale)
    assert scale == came_to < 2.0**40
    assert found[0] == found[1]


def test_a_closed_run_leaves_nothing_of_the_card_to_be_collected() -> None:
    """Garbage is collected in any thread; in one without the card's context PyCUDA warns, and keeps the memory."""
    run = trainer(small(), train())
    run.train_step()
    backend: Any = run.backend
    held = [weakref.ref(array) for array in backend._host.values()]
    gc.disable()
    try:
        run.close()
        assert held and not any(array() is not None for array in held)
    finally:
        gc.enable()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del run, backend
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    assert not said


def test_what_overflows_at_every_scale_is_an_error() -> None:
    run = trainer(small(init_std=1e4), train(), "fp16")
    with pytest.raises(NonFinite):
        run.train_step()
    run.close()


def test_a_state_of_other_libraries_goes_on_only_where_its_bits_are_not_expected() -> None:
    run = trainer(small(), train())
    run.train_step()
    state = {name: array.copy() for name, array in run.state().items()}
    run.close()
    text = state["libraries/choices"].tobytes().replace(b'"attention":"', b'"attention":"another ')
    state["libraries/choices"] = np.frombuffer(text, np.uint8)
    other = trainer(small(), train())
    with pytest.raises(StateMismatch, match="attention by another"):
        other.load_state(state)
    other.load_state(state, elsewhere=True)
    other.train_step()
    other.close()


def test_evaluation_is_near_that_of_the_tier_portable() -> None:
    spec, recipe = small(), train()
    ids = np.random.default_rng(1).integers(0, spec.vocab, (2, spec.context), dtype=np.int32)
    part = ids[:1, : spec.context // 2]
    found = []
    for precision in ("bf16", None):
        run = trainer(spec, recipe, precision)
        found.append((run.backend.losses(ids, ids), run.backend.logits(part).copy()))
        run.close()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2)
    assert np.abs(found[0][1] - found[1][1]).max() < 0.05 * np.abs(found[1][1]).max()


class WatchedBatches(RandomBatches):
    """Random ones, that say which were asked for; of one step they cannot be had."""

    def __init__(self, vocab: int, missing: int | None) -> None:
        super().__init__(vocab)
        self.asked: list[int] = []
        self.missing = missing

    def __eq__(self, other: object) -> bool:
        return True  # another source is another one, whatever it says

    __hash__ = None  # type: ignore[assignment]

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        self.asked.append(step)
        inputs[:] = -1  # half done, where it fails
        if step == self.missing:
            raise OSError("cannot be read")
        super().fill(step, inputs, targets)


def test_batches_are_filled_while_the_card_computes() -> None:
    """Each once, none beyond the last step; and they are those of their steps, also for a state of before."""
    spec, recipe = small(), train(steps=5)
    expected = trainer(spec, recipe)
    expected._prepare_next = lambda: None  # type: ignore[method-assign]
    run = trainer(spec, recipe)
    run.batches = watched = WatchedBatches(spec.vocab, None)
    found = [run.train_step().digest for _ in range(2)]
    assert watched.asked == [0, 1, 2]  # the third ahead of its step; the first step has the graph recorded
    after_two = {name: array.copy() for name, array in run.state().items()}
    found += [run.train_step().digest for _ in range(3)]
    assert watched.asked == [0, 1, 2, 3, 4]
    assert found == [expected.train_step().digest for _ in range(5)]
    run.load_state(after_two)
    assert [run.train_step().digest for _ in range(3)] == found[2:]
    run.close()
    expected.close()


class WrongTokens(WatchedBatches):
    """Of one step they are no tokens of the vocabulary."""

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        super().fill(step if step != self.missing else step + 1, inputs, targets)
        if step == self.missing:
            targets[-1, -1] = self.vocab


@pytest.mark.parametrize(("source", "error"), [(WatchedBatches, OSError), (WrongTokens, TokenError)])
def test_a_batch_that_cannot_be_had_is_an_error_of_its_own_step(source: type[WatchedBatches], error: type) -> None:
    spec, recipe = small(), train(steps=5)
    run, expected = trainer(spec, recipe), trainer(spec, recipe)
    run.batches = watched = source(spec.vocab, 3)
    found = [run.train_step().digest for _ in range(3)]
    for _ in range(2):
        with pytest.raises(error, match=r"cannot be read|allows token numbers"):
            run.train_step()
    watched.missing = None
    found += [run.train_step().digest for _ in range(2)]
    assert found == [expected.train_step().digest for _ in range(5)]
    run.close()
    expected.close()


def test_a_batch_filled_ahead_is_forgotten_where_another_fill_failed_or_its_source_is_another() -> None:
    spec, recipe = small(), train(steps=5)
    run = trainer(spec, recipe)
    run.batches = watched = WatchedBatches(spec.vocab, None)
    states, digests = [], []
    for _ in range(4):
        states.append({name: array.copy() for name, array in run.state().items()})
        digests.append(run.train_step().digest)
    run.load_state(states[2])
    run.train_step()  # the fourth batch is filled ahead
    watched.missing = 1
    run.load_state(states[1])
    with pytest.raises(OSError, match="cannot be read"):
        run.train_step()
    run.load_state(states[3])
    assert run.train_step().digest == digests[3]
    run.load_state(states[2])
    run.train_step()  # the fourth batch is filled ahead
    run.batches = WatchedBatches(spec.vocab, 3)
    with pytest.raises(OSError, match="cannot be read"):
        run.train_step()
    run.close()
