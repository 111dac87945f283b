"""What the tier `prod` asks of the planner."""

from typing import Any

from engine.backends.cuda.layout import CudaLayout
from engine.backends.cuda.mixed.flash import Heads
from engine.backends.cuda.mixed.operations import FlashAttention
from engine.backends.cuda.mixed.products import WORKSPACE
from engine.backends.cuda.mixed.program import VOCABULARY_MULTIPLE
from engine.backends.cuda.mixed.twins import mixed_twins
from engine.backends.cuda.twin import Twin
from engine.operations.base import BufferType
from engine.program import Program

MOST_SHARDS_AT_ONCE = 64  # as k_join_gradients has room for


class MixedLayout(CudaLayout):
    """More tokens at a time than `portable`, for products that fill a card; workspaces of the libraries."""

    lingers = 0
    tokens_at_once = 32768

    def twins_of(self, program: Program) -> dict[str, Twin[Any]]:
        return mixed_twins(program)

    def shards_at_once(self, shards: int) -> int:
        return min(super().shards_at_once(shards), MOST_SHARDS_AT_ONCE)

    def lasting(self, program: Program, elements: int) -> dict[str, BufferType]:
        # Products with the padded vocabulary read some rows past the end of the weights.
        spare = VOCABULARY_MULTIPLE * program.spec.d_model
        attentions = [o for o in program.operations if isinstance(o, FlashAttention)]
        return super().lasting(program, elements) | {
            "weights16": BufferType((elements + spare,), "uint16"),
            "products": BufferType((2, WORKSPACE), "uint8"),
            "flash": BufferType((self._flash_workspace(attentions[0]),), "uint8"),
            "seeds": BufferType((1 + len(attentions) * self.train.shards,), "int64"),
        }

    def _flash_workspace(self, attention: FlashAttention) -> int:
        context, probability = self.program.spec.context, attention.probability
        heads = Heads(attention.heads, attention.width, context, probability)
        shard_rows = self.train.batch // self.train.shards
        rows = shard_rows if probability else heads.rows_at_once(shard_rows * self.shards_at_once(self.train.shards))
        return heads.workspace(rows)
