"""What the tier `prod` asks of the planner."""

from typing import Any

from engine.backends.cuda.layout import PIECE, CudaLayout
from engine.backends.cuda.mixed.operations import FlashAttention
from engine.backends.cuda.mixed.parts import SUMMED, SumPlaces
from engine.backends.cuda.mixed.products import WORKSPACE
from engine.backends.cuda.mixed.program import VOCABULARY_MULTIPLE
from engine.backends.cuda.mixed.run import USUAL_TOKENS
from engine.backends.cuda.mixed.squares import SquarePlaces
from engine.backends.cuda.mixed.twins import LinearTwin, MixedTwin, launched_together, mixed_twins
from engine.backends.cuda.mixed.weight_gradients import chains_of
from engine.backends.cuda.twin import Twin
from engine.operations.base import BufferType
from engine.program import BackwardStep, Program
from engine.spec import TrainSpec

MOST_SHARDS_AT_ONCE = 64  # as k_join_gradients has room for


class MixedLayout(CudaLayout):
    """More tokens at a time than `portable`, for products that fill a card; workspaces of the libraries.

    own: whether our own kernels serve (hopper_attention.py), which need less than the libraries.
    """

    tokens_at_once = USUAL_TOKENS
    most_shards = MOST_SHARDS_AT_ONCE
    # Many enough for small models to keep every multiprocessor busy; whole groups of the step digest. Part of what the
    # gradient's norm is: its squares are added up piece by piece, too.
    piece = 1 << 12

    def __init__(self, program: Program, train: TrainSpec, tier: str, own: bool) -> None:
        self._own = own
        # With one shard alone there is nothing to join, and chains are cut from shards.
        self.own_gradients = own and train.shards > 1
        super().__init__(program, train, tier)
        tokens = train.batch // train.shards * program.spec.context
        twins = ((o, self.twins[o.name]) for o in program.operations)
        found = {o.name: twin.parts(o, tokens) for o, twin in twins if isinstance(twin, MixedTwin)}
        parts = {name: part for name, part in found.items() if part is not None}
        self.sum_places = SumPlaces(parts, self.shards_at_once(train.shards))
        shapes = self._added_on_the_way()
        names = [parameter.name for parameter in program.parameters]
        # Numbers of the optimizer's pieces whose squares are added up at the end of a step.
        self.norm_pieces = [i for i, (number, _, _) in enumerate(self.pieces()) if names[number] not in shapes]
        self.squares = SquarePlaces(shapes, len(self.norm_pieces))

    def _added_on_the_way(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of weights whose gradients' squares our own kernel adds up."""
        if not self.own_gradients:
            return {}
        usual = self.shards_within(self.train.shards, USUAL_TOKENS)
        together = launched_together(self.program, self.twins)
        found = [shapes for shapes in together if chains_of(list(shapes.values()), usual) == 1]
        return {name: shape for shapes in found for name, shape in shapes.items() if name != "embed.token"}

    def lingers(self, step: BackwardStep) -> int:
        twin = self.twins[step.operation.name]
        if not self.own_gradients:
            return 2  # gradients of shards that the library leaves to be joined are large
        return super().lingers(step) + (2 if isinstance(twin, LinearTwin) and twin.is_held else 0)

    def twins_of(self, program: Program) -> dict[str, Twin[Any]]:
        return mixed_twins(program, self.train, self._own, self.own_gradients)

    def token_gradients(self) -> dict[str, BufferType]:
        return {}

    def lasting(self, program: Program, elements: int) -> dict[str, BufferType]:
        # Products with the padded vocabulary read some rows past the end of the weights.
        spare = VOCABULARY_MULTIPLE * program.spec.d_model
        attentions = [o for o in program.operations if isinstance(o, FlashAttention)]
        at_once = self.shards_at_once(self.train.shards)
        tokens = self.train.batch // self.train.shards * program.spec.context
        shared = {}
        if program.spec.tied:
            # The head's gradient, by shard until the embedding joins them, or else by set.
            count = self.gradient_sets(self.train.shards) if self.own_gradients else at_once
            shared = {"tied": BufferType((count, program.spec.vocab, program.spec.d_model), "float32")}
        return (
            super().lasting(program, elements)
            | shared
            | {
                "token_order": BufferType((at_once * tokens,), "int32"),
                "token_spans": BufferType((at_once, program.spec.vocab, 2), "int32"),
                "parts": BufferType((self.sum_places.elements,), "float32"),
                "sum_table": BufferType((self.sum_places.rows * SUMMED.itemsize,), "uint8"),
                "weights16": BufferType((elements + spare,), "uint16"),
                "products": BufferType((1 if self.own_gradients else 2, WORKSPACE), "uint8"),
                "partial": BufferType((self.squares.elements,), "float64"),
                "norm_pieces": BufferType((len(self.norm_pieces) * PIECE.itemsize,), "uint8"),
                "seeds": BufferType((1 + len(attentions) * self.train.shards,), "int64"),
            }
        )
