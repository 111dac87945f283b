"""What the tier `prod` asks of the planner."""

from typing import Any

from engine.backends.cuda.layout import CudaLayout
from engine.backends.cuda.mixed.operations import FlashAttention
from engine.backends.cuda.mixed.products import WORKSPACE
from engine.backends.cuda.mixed.program import VOCABULARY_MULTIPLE
from engine.backends.cuda.mixed.run import USUAL_TOKENS
from engine.backends.cuda.mixed.twins import mixed_twins
from engine.backends.cuda.twin import Twin
from engine.operations.base import BufferType
from engine.program import Program
from engine.spec import TrainSpec

MOST_SHARDS_AT_ONCE = 64  # as k_join_gradients has room for


class MixedLayout(CudaLayout):
    """More tokens at a time than `portable`, for products that fill a card; workspaces of the libraries.

    own_attention: whether our own kernels compute attention, which need less than cuDNN.
    """

    tokens_at_once = USUAL_TOKENS
    most_shards = MOST_SHARDS_AT_ONCE
    lingers = 2  # every linear layer waits for all work beside

    def __init__(self, program: Program, train: TrainSpec, tier: str, own_attention: bool) -> None:
        self._own_attention = own_attention
        super().__init__(program, train, tier)

    def twins_of(self, program: Program) -> dict[str, Twin[Any]]:
        return mixed_twins(program, self.train, self._own_attention)

    def gradient_sets(self, shards: int) -> int:
        """One that each group of shards fills, and one for each level of the tree over groups."""
        return 1 + (shards // self.shards_at_once(shards) - 1).bit_length()

    def token_gradients(self) -> dict[str, BufferType]:
        return {}

    def lasting(self, program: Program, elements: int) -> dict[str, BufferType]:
        # Products with the padded vocabulary read some rows past the end of the weights.
        spare = VOCABULARY_MULTIPLE * program.spec.d_model
        attentions = [o for o in program.operations if isinstance(o, FlashAttention)]
        shared = {}
        if program.spec.tied:
            # The head writes it, the embedding adds to it at the other end of the backward half.
            shape = (self.shards_at_once(self.train.shards), program.spec.vocab, program.spec.d_model)
            shared = {"tied": BufferType(shape, "float32")}
        return (
            super().lasting(program, elements)
            | shared
            | {
                "weights16": BufferType((elements + spare,), "uint16"),
                "products": BufferType((2, WORKSPACE), "uint8"),
                "seeds": BufferType((1 + len(attentions) * self.train.shards,), "int64"),
            }
        )
