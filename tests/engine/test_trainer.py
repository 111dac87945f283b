"""Properties of whole training steps: shards, threads, causality, resuming, and what happens to NaN."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from engine.digest import content_hashes
from engine.errors import NonFinite, SpecError, StateMismatch, TokenError
from engine.trainer import Trainer
from tests.engine.bench import Array, normals, same_bits
from tests.engine.exact_training import tree_sum
from tests.engine.training import Tokens, Windows, digests, make_trainer


def batch_of(trainer: Trainer, step: int = 0) -> tuple[Array, Array]:
    shape = (trainer.train.batch, trainer.model.context)
    ids, targets = np.empty(shape, np.int32), np.empty(shape, np.int32)
    trainer.batches.fill(step, ids, targets)
    return ids, targets


def shard_gradients(trainer: Trainer, shard: int, times: int = 1) -> dict[str, Array]:
    """Gradients of one logical shard alone, its forward and backward run `times` without zeroing between."""
    backend = trainer.backend
    rows = trainer.train.batch // trainer.train.shards
    ids, targets = batch_of(trainer)
    frame = backend.frame(rows, trainer.model.context)
    backend.prepare(frame)
    frame.training, frame.step, frame.first_row, frame.set = True, 0, shard * rows, 0
    backend.gradients[0][:] = 0
    for _ in range(times):
        frame.tensor("ids")[:] = ids[shard * rows : (shard + 1) * rows]
        frame.tensor("targets")[:] = targets[shard * rows : (shard + 1) * rows]
        frame.forward()
        frame.backward()
    frame.training = False
    return {name: g.copy() for name, g in backend.parameter_gradients[0].items()}


# --- gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 6, 7, 8])
def test_accumulation_is_a_binary_tree_over_shards(shards: int) -> None:
    trainer = make_trainer(train={"batch": 2 * shards, "shards": shards})
    expected = tree_sum([shard_gradients(trainer, shard) for shard in range(shards)])
    held, _ = trainer.backend.run_shards(0, *batch_of(trainer))
    for name, g in trainer.backend.parameter_gradients[held].items():
        same_bits(g, expected[name])


def test_shards_change_the_last_bits_and_only_those() -> None:
    results = []
    for shards in (1, 2, 4):
        trainer = make_trainer(train={"batch": 4, "shards": shards})
        held, total = trainer.backend.run_shards(0, *batch_of(trainer))
        results.append((trainer.backend.gradients[held].copy(), total))
    for flat, total in results[1:]:
        assert total == results[0][1]  # the same rows, the same masks: each loss is the same number
        assert not np.array_equal(flat, results[0][0])
        assert np.linalg.norm(flat - results[0][0]) < 1e-3 * np.linalg.norm(flat)


@pytest.mark.parametrize("tied", [True, False])
def test_backward_twice_doubles_the_buffers(tied: bool) -> None:
    trainer = make_trainer({"tied": tied})
    once, twice = (shard_gradients(trainer, 1, times) for times in (1, 2))
    for name, g in once.items():
        if tied and name == "embed.token":  # ((h + e) + h) + e: four parts in order, not two sums
            np.testing.assert_allclose(twice[name], 2 * g, rtol=1e-6, atol=1e-7 * np.max(np.abs(g)))
        else:
            same_bits(twice[name], g + g)
        assert np.any(g)


def test_a_tied_head_sums_both_contributions() -> None:
    tied, untied = make_trainer({"tied": True}), make_trainer({"tied": False})
    for name, w in untied.backend.parameters.items():
        w[:] = tied.backend.parameters["embed.token" if name == "head.weight" else name]
    untied.backend.weights_changed()
    whole, parts = shard_gradients(tied, 0), shard_gradients(untied, 0)
    head, embedding = parts.pop("head.weight"), parts["embed.token"]
    assert np.any(head) and np.any(embedding)
    same_bits(whole["embed.token"], head + embedding)
    for name in parts.keys() - {"embed.token"}:
        same_bits(whole[name], parts[name])


# --- what must not move a bit -----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_move_bits(threads: int) -> None:
    changes = {"context": 70, "d_model": 40, "heads": 2}
    one, many = make_trainer(changes), make_trainer(changes, threads=threads)
    assert digests(one, 3) == digests(many, 3)
    many.close()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_stored_and_tiled_attention_give_the_same_bits(dropout: float) -> None:
    runs = [
        digests(make_trainer({"attention": kind, "context": 70, "dropout": dropout}), 3) for kind in ("stored", "tiled")
    ]
    assert runs[0] == runs[1]


def test_what_the_digest_depends_on() -> None:
    """Weights, moments and loss of every parameter, so any change of the run shows."""
    base = digests(make_trainer(), 2)
    assert base == digests(make_trainer(), 2)
    for model, train in (
        ({"dropout": 0.2}, {}),
        ({"activation": "relu"}, {}),
        ({}, {"seed": 18}),
        ({}, {"learning_rate": 0.0101}),
        ({}, {"clip_norm": 0.5}),
        ({}, {"beta2": 0.98}),
        ({}, {"shards": 2}),
    ):
        other = digests(make_trainer(model, train), 2)
        assert other[0] != base[0] and other[1] != base[1]


# One head and many, ragged tokens, across the attention tile of 64.
CAUSAL = [{}, {"context": 70, "heads": 1, "vocab": 40}, {"context": 33, "norm_parameters": False, "tied": False}]


@pytest.mark.parametrize("changes", CAUSAL)
def test_editing_the_last_token_moves_no_earlier_logit(changes: dict[str, Any]) -> None:
    trainer = make_trainer(changes, {"batch": 4, "shards": 1})
    ids, _ = batch_of(trainer)
    before = trainer.backend.logits(ids).copy()
    for place in (trainer.model.context - 1, trainer.model.context // 2):
        edited = ids.copy()
        edited[:, place:] = (edited[:, place:] + 1) % trainer.model.vocab
        after = trainer.backend.logits(edited)
        same_bits(after[:, :place], before[:, :place])
        assert not np.array_equal(after[:, place], before[:, place])


@pytest.mark.parametrize("changes", CAUSAL)
def test_another_batch_around_a_row_moves_no_logit(changes: dict[str, Any]) -> None:
    trainer = make_trainer(changes, {"batch": 4, "shards": 1})
    ids, _ = batch_of(trainer)
    together = trainer.backend.logits(ids).copy()
    for order in ([2, 0, 3, 1], [3, 3, 3, 3]):
        same_bits(trainer.backend.logits(ids[order]), together[order])
    for row in range(4):
        same_bits(trainer.backend.logits(ids[row : row + 1])[0], together[row])
        same_bits(trainer.backend.logits(ids[row : row + 2])[0], together[row])


@pytest.mark.parametrize("changes", CAUSAL)
def test_logits_while_sampling_are_those_of_the_training_pass(changes: dict[str, Any]) -> None:
    """At every length, so however the row is padded; the training pass is one with dropout 0."""
    trainer = make_trainer(changes | {"dropout": 0.0}, {"batch": 4, "shards": 1})
    ids, targets = batch_of(trainer)
    frame = trainer.backend.frame(4, trainer.model.context)
    trainer.backend.prepare(frame)
    frame.training = True
    frame.tensor("ids")[:], frame.tensor("targets")[:] = ids, targets
    frame.forward()
    frame.training = False
    training = frame.tensor(trainer.program.logits).copy()
    for length in range(1, trainer.model.context + 1):
        same_bits(trainer.next_logits(ids[2, :length]), training[2, length - 1])


def test_evaluation_is_one_number_however_it_is_cut() -> None:
    """Sums of integers: 7 windows by rows of 1, 2 or 4, and 1 or 3 threads; dropout does not act."""
    results = set()
    for shards, threads in ((4, 1), (2, 1), (1, 3)):
        trainer = make_trainer({"dropout": 0.5}, {"batch": 4, "shards": shards}, threads=threads)
        windows = Windows(Tokens(trainer.model, 7), 7)
        results.add(trainer.evaluate(windows))
        ids, targets = windows.rows[:, :-1], windows.rows[:, 1:]
        losses = [trainer.backend.losses(ids[i : i + 1], targets[i : i + 1]) for i in range(7)]
        results.add(sum(losses) * 2.0**-30 / ids.size)
        trainer.close()
    assert len(results) == 1


def test_evaluation_and_sampling_do_not_move_training() -> None:
    quiet, busy = make_trainer(), make_trainer()
    for _ in range(3):
        busy.evaluate(Windows(Tokens(busy.model, 5), 5))
        busy.next_logits(np.zeros(4, np.int32))
        assert digests(busy, 1) == digests(quiet, 1)
        busy.saved_state()


# --- debug tier -------------------------------------------------------------------------------------------


def test_debug_is_repeatable_and_close_to_portable() -> None:
    def run(tier: str) -> tuple[list[bytes], list[float]]:
        trainer = make_trainer(tier=tier)
        results = [trainer.train_step() for _ in range(4)]
        return [r.digest for r in results], [float(r.loss) for r in results]

    first, again, portable = run("debug"), run("debug"), run("portable")
    assert first == again
    assert first[0] != portable[0]
    np.testing.assert_allclose(first[1], portable[1], rtol=2e-3)


# --- state ------------------------------------------------------------------------------------------------


def test_a_state_taken_up_continues_bit_for_bit() -> None:
    """Through copies, at every step, into a fresh trainer and into one that was elsewhere."""
    straight = make_trainer()
    wanted = digests(straight, 6)
    for cut in range(7):
        first = make_trainer()
        digests(first, cut)
        state = {name: x.copy() for name, x in first.state().items()}
        for other in (make_trainer(), first):
            if other is first and cut < 6:
                digests(other, 1)
            other.load_state(state)
            assert other.step == cut
            assert digests(other, 6 - cut) == wanted[cut:]
            for name, x in straight.state().items():
                same_bits(other.state()[name], x)


def test_a_saved_state_stays_while_training_goes_on() -> None:
    trainer = make_trainer()
    digests(trainer, 2)
    saved = trainer.saved_state()
    before = {name: x.copy() for name, x in saved.items()}
    live = trainer.state()
    assert saved.keys() == live.keys()
    digests(trainer, 2)
    for name, x in saved.items():
        same_bits(x, before[name])
    assert not np.array_equal(live["weights/embed.token"], saved["weights/embed.token"])


def test_the_state_holds_every_step_and_nothing_else() -> None:
    trainer = make_trainer()
    results = [trainer.train_step() for _ in range(3)]
    state = trainer.state()
    names = [p.name for p in trainer.program.parameters]
    assert state.keys() == {f"{kind}/{n}" for kind in ("weights", "m", "v") for n in names} | {
        "history/loss",
        "history/digest",
    }
    assert state["history/loss"].tolist() == [r.loss for r in results]
    assert [bytes(row) for row in state["history/digest"]] == [r.digest for r in results]


def test_in_the_tier_debug_the_state_holds_the_content_of_every_tensor_after_every_step() -> None:
    """And the digest of a step is over these hashes, its number and its loss."""
    trainer = make_trainer(tier="debug", threads=2)
    expected, results = [], []
    for _ in range(3):
        results.append(trainer.train_step())
        now = {name: x for name, x in trainer.state().items() if not name.startswith("history/")}
        expected.append([blake3(now[name].tobytes()).digest() for name in sorted(now)])
    found = trainer.state()["history/tensors"]
    assert found.dtype == np.uint8
    assert [[bytes(row) for row in rows] for rows in found] == expected
    for step, (result, hashes) in enumerate(zip(results, expected, strict=True), 1):
        head = b"samebits step digest of contents 1\n" + step.to_bytes(8, "little") + result.loss.tobytes()
        assert result.digest == blake3(head + b"".join(hashes)).digest()


def test_content_hashes_do_not_depend_on_threads_or_memory_order() -> None:
    """Large enough for several threads; a transposed view is hashed in the order of its elements."""
    x = normals(1, 600, 700)
    expected = [blake3(a.tobytes()).digest() for a in (x, x.T)]
    for threads in (1, 3):
        assert [bytes(row) for row in content_hashes({"a": x, "b": x.T}, threads)] == expected


def test_a_debug_run_goes_on_with_its_history() -> None:
    straight, first, second = (make_trainer(tier="debug") for _ in range(3))
    digests(straight, 5)
    digests(first, 2)
    second.load_state(first.state())
    digests(second, 3)
    assert straight.state().keys() == second.state().keys()
    for name, x in straight.state().items():
        same_bits(second.state()[name], x)
    with pytest.raises(StateMismatch, match=r"missing.*history/tensors"):
        second.load_state(make_trainer().state())


def _without(name: str) -> Callable[[dict[str, Array]], None]:
    def spoil(state: dict[str, Array]) -> None:
        del state[name]

    return spoil


def _with(name: str, value: Any) -> Callable[[dict[str, Array]], None]:
    return lambda state: state.update({name: value(state.get(name))})


BAD_STATES: dict[str, tuple[Callable[[dict[str, Array]], None], str]] = {
    "a weight missing": (_without("weights/block1.mlp_up.weight"), "missing.*mlp_up.weight"),
    "a moment missing": (_without("v/norm.gain"), "missing.*v/norm.gain"),
    "losses missing": (_without("history/loss"), "missing.*history/loss"),
    "digests missing": (_without("history/digest"), "missing.*history/digest"),
    "an array too many": (_with("weights/block2.norm1.gain", lambda _: normals(1, 12)), "not expected.*block2"),
    "the wrong shape": (_with("m/embed.token", lambda x: x[:-1]), r"m/embed.token.*\[13, 12\].*\[12, 12\]"),
    "transposed": (_with("weights/block0.mlp_up.weight", lambda x: x.T.copy()), r"\[20, 12\].*\[12, 20\]"),
    "the wrong dtype": (_with("v/norm.bias", lambda x: x.astype(np.float64)), "float32.*float64"),
    "fewer digests than losses": (_with("history/digest", lambda x: x[:-1]), r"history/digest.*\[2, 32\].*\[1, 32\]"),
    "more steps than the run has": (_with("history/loss", lambda _: normals(1, 7)), "step 7.*train.steps=6"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_that_does_not_fit_changes_nothing(case: str) -> None:
    spoil, message = BAD_STATES[case]
    source, trainer = make_trainer(), make_trainer(train={"seed": 18})
    digests(source, 2)
    digests(trainer, 3)
    state = {name: x.copy() for name, x in source.state().items()}
    spoil(state)
    before = {name: x.copy() for name, x in trainer.state().items()}
    with pytest.raises(StateMismatch, match=message) as error:
        trainer.load_state(state)
    assert error.value.exit_code == 4
    assert trainer.step == 3
    for name, x in trainer.state().items():
        same_bits(x, before[name])


# --- what is not finite -----------------------------------------------------------------------------------


def planted(trainer: Trainer, kind: str, name: str, at: int, value: float) -> dict[str, Array]:
    """Plants a value and returns copies of all state arrays as they are then."""
    trainer.backend.views(trainer.backend.flat[kind])[name].reshape(-1)[at] = value
    trainer.backend.weights_changed()
    return {n: x.copy() for n, x in trainer.state().items()}


@pytest.mark.parametrize(("value", "tied"), [(np.nan, True), (np.nan, False), (np.inf, True), (-np.inf, False)])
def test_one_bad_number_anywhere_stops_the_step(value: float, tied: bool) -> None:
    """In any weight or moment: the error names step and place, and the state is as it was, bit for bit."""
    trainer = make_trainer(
        {"tied": tied, "vocab": 200, "layers": 1}, {"shards": 2}
    )  # most tokens do not come up in a batch
    digests(trainer, 2)
    good = {name: x.copy() for name, x in trainer.state().items()}
    for kind in ("weights", "m", "v"):
        for parameter in trainer.program.parameters:
            for at in (0, -1):
                trainer.load_state(good)
                before = planted(trainer, kind, parameter.name, at, value)
                with pytest.raises(NonFinite, match=r"^step 3: .*(entered|optimizer|gradient)") as error:
                    trainer.train_step()
                assert error.value.exit_code == 7
                if kind != "weights":
                    assert parameter.name in str(error.value)
                assert trainer.step == 2
                for name, x in trainer.state().items():
                    same_bits(x, before[name])
    trainer.load_state(good)
    trainer.train_step()  # and a good state goes on


@pytest.mark.parametrize("name", ["block0.norm1.gain", "block1.attn_qkv.weight", "block1.mlp_up.bias"])
def test_the_operation_is_named(name: str) -> None:
    trainer = make_trainer()
    bad = planted(trainer, "weights", name, 0, np.nan)
    # A NaN is met where it is next quantised or summed.
    expected = {"block0.norm1.gain": "block0.attn_qkv", "block1.attn_qkv.weight": "block1.attn_qkv"}
    for _ in range(2):  # also when asked again
        with pytest.raises(NonFinite, match=f"entered {expected.get(name, 'block1.mlp_down')}"):
            trainer.train_step()
    for other, x in trainer.state().items():
        same_bits(x, bad[other])
    with pytest.raises(NonFinite, match="step 1"):
        trainer.next_logits(np.zeros(3, np.int32))
    with pytest.raises(NonFinite, match="step 1"):
        trainer.evaluate(Windows(Tokens(trainer.model, 3), 3))


def test_a_bad_gradient_is_named_where_backward_met_it_first() -> None:
    """The forward pass is sound; in the backward pass the first to meet it is the last operation of the program."""
    trainer = make_trainer(train={"clip_norm": 0.0})
    backend = trainer.backend
    frame = backend.frame(2, trainer.model.context)
    frame.loss_scale = np.float32(np.inf)
    with pytest.raises(NonFinite, match="entered head"):
        trainer.train_step()


@pytest.mark.parametrize("rate", [1e10, 1e25, 3e38])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_huge_rate_stops_before_anything_is_lost(rate: float, clip_norm: float) -> None:
    trainer = make_trainer(train={"learning_rate": rate, "clip_norm": clip_norm, "steps": 20})
    before: dict[str, Array] = {}
    with pytest.raises(NonFinite, match=r"step \d+.*learning_rate"):
        for _ in range(20):
            before = {name: x.copy() for name, x in trainer.state().items()}
            trainer.train_step()
    for name, x in trainer.state().items():
        same_bits(x, before[name])
        assert np.isfinite(x).all()


# --- tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 13, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_a_token_outside_the_vocabulary_is_refused(token: int, where: str) -> None:
    trainer = make_trainer()
    before = {name: x.copy() for name, x in trainer.state().items()}
    tokens = trainer.batches
    assert isinstance(tokens, Tokens)
    tokens.tokens[0, -1, 0 if where == "inputs" else -1] = token
    tokens.tokens[-1, -1, 0 if where == "inputs" else -1] = token
    with pytest.raises(TokenError, match=r"model.vocab=13.*0 to 12, found -?\d+"):
        trainer.train_step()
    with pytest.raises(TokenError):
        trainer.evaluate(Windows(tokens, 6))
    for name, x in trainer.state().items():
        same_bits(x, before[name])
    with pytest.raises(TokenError):
        trainer.next_logits(np.array([1, token], np.int32))


def test_evaluation_without_text_is_refused() -> None:
    trainer = make_trainer()
    with pytest.raises(SpecError, match="held-out"):
        trainer.evaluate(Windows(Tokens(trainer.model, 3), 0))
