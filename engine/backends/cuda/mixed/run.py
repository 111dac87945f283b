"""What an operation's `prod` half sees while it runs: the libraries and the weights in 16 bits beside all the rest."""

from typing import TYPE_CHECKING

from engine.backends.cuda.mixed.flash import Flash
from engine.backends.cuda.mixed.hopper_attention import HopperAttention
from engine.backends.cuda.mixed.hopper_norm import Product
from engine.backends.cuda.mixed.parts import SumPlaces
from engine.backends.cuda.mixed.products import Matrix, Products
from engine.backends.cuda.mixed.squares import SquarePlaces
from engine.backends.cuda.mixed.weight_gradients import Gradient
from engine.backends.cuda.run import Run
from engine.backends.cuda.sources import Unit
from engine.operations.base import Operation, Sizes
from engine.spec import HALF_DTYPES

USUAL_TOKENS = 16384  # taken at once: enough for products that fill a card

if TYPE_CHECKING:
    from engine.backends.cuda.mixed.backend import MixedBackend


class MixedRun(Run):
    """A program of the tier `prod` bound to sizes on the card."""

    def __init__(self, backend: "MixedBackend", sizes: Sizes, shards: int) -> None:
        super().__init__(backend, sizes, shards)
        self.products: Products = backend.products
        self.weight_gradients = backend.weight_gradients
        self.squares: SquarePlaces = backend.squares
        self.held: list[Gradient] = []  # that wait to be computed together with the next
        self.norm = backend.norm
        self.left: dict[str, Product] = {}  # by what each makes: it is left to the LayerNorm that follows
        self.attention: Flash | HopperAttention = backend.attention
        self.activation = backend.activation
        self.half = HALF_DTYPES[backend.precision]
        self.usual_shards = backend.layout.shards_within(backend.train.shards, USUAL_TOKENS)
        self.all_shards = backend.train.shards
        self.shard_rows = backend.train.batch // backend.train.shards
        self.sum_places: SumPlaces = backend.sum_places
        self.all_parts = backend.address("parts")
        self.sum_table = backend.address("sum_table")
        self._weights16 = backend.address("weights16")
        self._seeds = backend.address("seeds")
        self._head_gradient = backend.head_gradient

    def backward(self) -> None:
        super().backward()
        self.left.clear()  # what ran again has left some that nothing took

    def weight16(self, parameter: str) -> int:
        return self._weights16 + 2 * self._backend.plan.places[parameter]

    def unit(self, name: str, **macros: int) -> Unit:
        return Unit(f"{name}_mixed", {"HALF_BF16": int(self.half == "bfloat16"), **macros})

    @property
    def gradients(self) -> int:
        """The set of gradients of parameters that is filled now."""
        return self._backend.address(f"gradients{self.gradient_set}")

    @property
    def joins_later(self) -> bool:
        """Whether gradients of some groups of shards are joined after they were computed: the second group adds its own
        to the first's, which leaves nothing to join of two (CudaBackend._queue_gradients)."""
        return self.all_shards > 2 * self.shards

    def weight_squares(self, parameter: str) -> int:
        """Where the squares of a weight's gradient are added up as it is computed (the last group's stay); 0 if they
        are not."""
        place = self.squares.places.get(parameter)
        return 0 if place is None or self.joins_later else self._backend.address("partial") + 8 * place

    def parts(self, operation: Operation) -> int:
        """Where an operation leaves parts of its sums over tokens; 0 if nobody wants them."""
        place = self.sum_places.places.get(operation.name)
        return 0 if place is None else self.all_parts + 4 * place

    def seeds(self, number: int) -> int:
        """int64 [shards of the whole batch] of the number-th attention; before all of them stands a zero."""
        return self._seeds + 8 * (1 + number * self.all_shards)

    @property
    def tied(self) -> int:
        """fp32: the head's gradient of a weight that is also the token embedding; by shard, [shards, vocab, d], or the
        current set of [gradient sets, vocab, d] where our own kernel joins shards."""
        return self._head_gradient(self.gradient_set if self.weight_gradients else 0)

    @property
    def token_places(self) -> tuple[int, int]:
        """int32 [shards, tokens] and [shards, vocab, 2]: order and spans of k_embed_places."""
        return self._backend.address("token_order"), self._backend.address("token_spans")

    @property
    def zero(self) -> int:
        return self._seeds

    def narrow(self, address: int, stride: int, batch: int = 0) -> Matrix:
        return Matrix(address, self.half, stride, batch)

    def wide(self, address: int, stride: int, batch: int = 0) -> Matrix:
        return Matrix(address, "float32", stride, batch)

    def multiply(
        self,
        sizes: tuple[int, int, int],
        a: Matrix,
        b: Matrix,
        out: Matrix,
        *,
        a_by_k: bool = False,
        b_by_n: bool = False,
        by_shard: bool = False,
        epilogue: str = "none",
        bias: int = 0,
        aux: int = 0,
        add: bool = False,
        plus: int = 0,
    ) -> None:
        """Products.multiply on the stream that is current. While training, the algorithm is the one for the usual
        number of shards at once, whatever is taken now; a product with batches has one for each shard."""
        usual = None
        if self.training:
            usual = (sizes[0], self.usual_shards) if by_shard else (sizes[0] * self.usual_shards // self.shards, 1)
        self.products.multiply(
            self.launch.current,
            sizes,
            a,
            b,
            out,
            a_by_k=a_by_k,
            b_by_n=b_by_n,
            batches=self.shards if by_shard else 1,
            epilogue=epilogue,
            bias=bias,
            aux=aux,
            add=add,
            plus=plus,
            usual=usual,
        )


def mixed(run: Run) -> MixedRun:
    if not isinstance(run, MixedRun):
        raise AssertionError("an operation of the tier prod outside of it")
    return run
