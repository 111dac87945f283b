"""Blocks that are computed again: the same bits, less memory, and only for numbers of blocks that exist."""

from typing import Any

import pytest

from engine.errors import SpecError
from engine.numerics.types import Words
from engine.program import build_program
from engine.self_test import MODEL, TRAIN
from engine.spec import ModelSpec
from engine.trainer import Trainer


class Counting:
    """Tokens that count up."""

    def fill(self, step: int, inputs: Words, targets: Words) -> None:
        for row in range(len(inputs)):
            for place in range(inputs.shape[1]):
                inputs[row, place] = (step + 3 * row + place) % MODEL.vocab
                targets[row, place] = (step + 3 * row + place + 1) % MODEL.vocab


def model_spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**MODEL.model_dump() | changes)


@pytest.mark.parametrize("attention", ["stored", "tiled"])
def test_recomputation_moves_no_bit_and_saves_memory(attention: str) -> None:
    model = model_spec(layers=3, dropout=0.1, attention=attention)
    digests, sizes = [], []
    for recompute in range(4):
        trainer = Trainer(model, TRAIN, "portable", Counting(), threads=1, recompute=recompute)
        trainer.initialise()
        trainer.train_step()
        digests.append(trainer.train_step().digest)
        sizes.append(trainer.plan.arena_bytes)
        trainer.close()
    assert len(set(digests)) == 1
    assert sizes[0] > sizes[1] > sizes[2]
    # The last block's backward half comes at once, so there is nothing to gain from computing it again.
    assert sizes[2] == sizes[3]


@pytest.mark.parametrize("recompute", [-1, 4])
def test_only_blocks_that_exist_can_be_recomputed(recompute: int) -> None:
    with pytest.raises(SpecError, match="0 to 3"):
        build_program(model_spec(layers=3), recompute)
