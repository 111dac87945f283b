"""The `prod` half of every operation: which libraries and kernels it calls, in which order.

Each logical shard's gradient of a weight is computed alone; right after that they are joined by the tree over shards,
while they are still in the card's cache. Sums over tokens wait for the end of the backward half (parts.py).
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from engine.backends.cuda.mixed import hopper_activation
from engine.backends.cuda.mixed.eight import EightBitProduct
from engine.backends.cuda.mixed.flash import SPARE, Heads, Places
from engine.backends.cuda.mixed.hopper_attention import decision_mask, numbers_bytes
from engine.backends.cuda.mixed.hopper_norm import Norm, Product, serves_width
from engine.backends.cuda.mixed.joining import join
from engine.backends.cuda.mixed.operations import Classifier, FlashAttention, Mlp, ResidualNorm
from engine.backends.cuda.mixed.parts import Parts
from engine.backends.cuda.mixed.run import USUAL_TOKENS, MixedRun, mixed
from engine.backends.cuda.mixed.weight_gradients import Gradient, Taken
from engine.backends.cuda.run import MASK, THREADS, Run, ceiling
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.twin import Twin
from engine.operations.base import BufferType, Operation, Sizes
from engine.operations.embed import Embed
from engine.operations.layernorm import LayerNorm
from engine.operations.linear import Linear
from engine.program import Program
from engine.spec import TrainSpec

ROW_WARPS = THREADS // 32
ROW_GROUP = 8
PLACE_THREADS = 64  # few, so that all multiprocessors take part
LEAST_NORM_ROWS, MOST_NORM_ROWS = 16, 128
WARP_COLUMNS = 256  # eight for each lane
NORM_PROCESSORS = 128  # that LayerNorm's backward pass fills once while the usual number of tokens is taken
SUM_ROWS = 128  # as in linear_mixed.cu
ACTIVATION_ROWS = hopper_activation.SUM_ROWS  # as in activation_mixed.cu
CLASSIFIER_THREADS, CLASSIFIER_COLUMNS = 512, 32  # at most, and aimed at for each
LONG_CLASSIFIER_THREADS, LONG_CLASSIFIER_COLUMNS = 1024, 8
CLASSIFIER_SPARE = 2048  # bytes of shared memory that k_classifier has beside the row
LEAST_ROOM = 128 << 20  # bytes that the attention's workspace may take in any case
DROPOUT_TOKENS = 8192  # that share one seed of attention's dropout, at least one shard

Kind = TypeVar("Kind", bound=Operation)


class MixedTwin(Twin[Kind]):
    def parts(self, operation: Kind, tokens: int) -> Parts | None:
        """Sums over tokens that the backward pass leaves in parts, for shards of `tokens` tokens."""
        return None


def eights(elements: int) -> tuple[int]:
    return (ceiling(elements, 8 * THREADS),)


def norm_rows(train: TrainSpec, context: int, width: int) -> int:
    """Rows that a block of LayerNorm's backward pass sums over: a function of the configuration alone."""
    tokens = min(train.batch * context, USUAL_TOKENS)
    threads = 512 if width > WARP_COLUMNS and norm_warps(width) == 1 else 768  # PROCESSOR_THREADS
    blocks = NORM_PROCESSORS * max(threads // norm_threads(width), 1)  # BACKWARD_BLOCKS on each
    return min(max(ceiling(tokens, blocks), LEAST_NORM_ROWS), MOST_NORM_ROWS)


def norm_warps(width: int) -> int:
    """Warps that share a row in LayerNorm's backward pass, as in layernorm_mixed.cu."""
    return 1 if width % 128 == 0 and width <= 2 * WARP_COLUMNS else ceiling(width, WARP_COLUMNS)


def norm_threads(width: int) -> int:
    """BACKWARD_THREADS of layernorm_mixed.cu."""
    warps = norm_warps(width)
    return 32 * warps * max(8 // warps, 1)


def norm_sums(operation: LayerNorm | ResidualNorm) -> tuple[str | None, str | None, str | None]:
    """The parameters whose gradients are sums that LayerNorm's backward pass leaves in parts."""
    branch_bias = operation.branch_bias if isinstance(operation, ResidualNorm) else None
    return operation.parameters.get("gain"), operation.parameters.get("bias"), branch_bias


def combine(run: MixedRun) -> None:
    """Gradients of parameters that are sums over tokens, from what all operations have left."""
    if run.sum_places.rows:
        values = (run.all_parts, run.sum_table, run.shards, run.gradients, int(run.adds))
        run.launch(run.unit("linear"), "k_combine", "PPiPi", (run.sum_places.rows,), (32, 4, 4), *values)


def weight_products(run: MixedRun, gradient: Gradient, out: int) -> None:
    """out [shards, rows, columns] is a gradient by shard.

    The library is slow for a number of rows that is not whole in groups of ROW_GROUP: the rest goes alone.
    """
    tokens, columns, whole = run.shard_tokens, gradient.columns, gradient.rows // ROW_GROUP * ROW_GROUP
    dy, x = gradient.dy, gradient.x
    for first, rows in ((0, whole), (whole, gradient.rows - whole)):
        if rows:
            run.multiply(
                (rows, columns, tokens),
                run.narrow(dy.address + 2 * first, dy.stride, tokens * dy.stride),
                run.narrow(x.address, x.stride, tokens * x.stride),
                run.wide(out + 4 * first * columns, columns, gradient.rows * columns),
                a_by_k=True,
                by_shard=True,
            )


def weight_gradients(run: MixedRun, *gradients: tuple[Gradient, int]) -> None:
    """Gradients of one or two weights; beside each its shard_gradients."""
    if run.weight_gradients is not None:
        taken = Taken(run.shard_tokens, run.shards, run.usual_shards, run.adds)
        run.weight_gradients([g for g, _ in gradients], taken)
        return
    for gradient, shards in gradients:
        if run.all_shards == 1:
            weight_products(run, gradient, gradient.out)
        else:
            weight_products(run, gradient, shards)
            size = gradient.rows * gradient.columns
            join(run.launch, run.unit("optimizer"), shards, run.shards, size, gradient.out, run.adds)


def launched_together(program: Program, twins: Mapping[str, Twin[Any]]) -> Iterator[dict[str, tuple[int, int]]]:
    """Rows and columns of the weights whose gradients our own kernel computes in one launch, by parameter."""
    held: dict[str, tuple[int, int]] = {}
    for operation in (step.operation for step in program.backward):
        twin = twins[operation.name]
        if isinstance(operation, Mlp):
            down, up = (operation.parameters[role] for role in ("down", "up"))
            yield {down: (operation.width, operation.hidden), up: (operation.hidden, operation.width)}
        elif isinstance(twin, LinearTwin) and isinstance(operation, Linear):
            held[operation.parameters["weight"]] = (operation.wide, operation.deep)
            if not twin.is_held:
                yield held
                held = {}


def shard_gradients(train: TrainSpec, own: bool, shards: int, *shape: int) -> BufferType:
    """Room for a weight's gradient of each logical shard taken at once; the only one needs none, nor does our `own`
    kernel."""
    return BufferType((shards if train.shards > 1 and not own else 0, *shape), "float32")


class EmbedTwin(MixedTwin[Embed]):
    def __init__(self, tied: bool) -> None:
        """tied: whether a tied head has left its gradient by shard, to be added."""
        self.tied = self.joins = tied

    def forward(self, run: Run, operation: Embed) -> None:
        run = mixed(run)
        size, width = run.tokens * operation.width, operation.width
        token, position = (run.parameter(operation.parameters[r]) for r in ("token", "position"))
        ids, context = run.tensor(operation.inputs["ids"]), run.sizes.context
        arguments = (ids, context, token, position, size, width, run.tensor(operation.outputs["y"]))
        mask = (run.first_row * context * width, *run.mask(operation.probability, operation.site), run.values)
        form = f"PiPPqiPq{MASK}P"
        if run.training:
            with run.launch.beside():  # the backward pass wants to know where each token stands
                self._find_places(run, operation)
        run.launch(run.unit("embed"), "k_embed_fwd", form, eights(size), (THREADS,), *arguments, *mask)

    def _find_places(self, run: MixedRun, operation: Embed) -> None:
        tokens, (order, spans) = run.shard_tokens, run.token_places
        run.launch.fill(spans, 0, 8 * run.shards * operation.vocab)
        values = (run.tensor(operation.inputs["ids"]), tokens, operation.vocab, order, spans)
        grid = (ceiling(tokens, PLACE_THREADS), run.shards)
        run.launch(run.unit("embed"), "k_embed_places", "PiiPP", grid, (PLACE_THREADS,), *values)

    def backward(self, run: Run, operation: Embed) -> None:
        run = mixed(run)
        width, tokens, context = operation.width, run.shard_tokens, run.sizes.context
        token, position = (run.parameter_gradient(operation.parameters[r]) for r in ("token", "position"))
        dy = run.gradient(operation.outputs["y"])
        mask = (run.first_row * context * width, *run.mask(operation.probability, operation.site), run.values)
        unit = run.unit("embed")
        with run.launch.beside():
            run.launch(
                unit,
                "k_embed_bwd_position",
                f"iiiiPq{MASK}PPi",
                (ceiling(context * width, 8 * PLACE_THREADS),),
                (PLACE_THREADS,),
                *(run.shards, tokens, context, width, dy, *mask, position, int(run.adds)),
            )
            combine(run)  # the embedding comes last
        rare = operation.vocab >= tokens  # most ids stand in few shards, or in none
        run.launch(
            unit,
            "k_embed_bwd_token_rare" if rare else "k_embed_bwd_token",
            f"PPiiiiPq{MASK}PPPi",
            (ceiling(operation.vocab, ROW_WARPS) if rare else operation.vocab, ceiling(width, 256)),
            (THREADS if rare else 32 * min(run.shards, 8),),
            *(*run.token_places, run.shards, tokens, operation.vocab, width, dy, *mask),
            *(run.tied if self.tied else 0, token, int(run.adds)),
        )


class NormTwin(MixedTwin[Any]):
    """LayerNorm, alone or with the residual sum before it. `rows`: that a block of the backward pass sums over."""

    def __init__(self, rows: int, alone: bool) -> None:
        self.rows = rows
        self.joins_reads = alone  # adds to a gradient that the linear layer at the end of the branch beside it reads

    def parts(self, operation: Any, tokens: int) -> Parts | None:
        outputs = norm_sums(operation)
        return Parts(ceiling(tokens, self.rows), operation.width, outputs) if any(outputs) else None

    def _unit(self, run: MixedRun, operation: Any) -> Unit:
        is_bare = isinstance(operation, ResidualNorm) and operation.is_bare
        return run.unit(
            "layernorm", WIDTH=operation.width, SUMS=int(any(norm_sums(operation))), NORMALISED=int(is_bare)
        )

    def _mask(self, run: MixedRun, operation: Any) -> tuple[int, int, int, float, int]:
        base = run.first_row * run.sizes.context * operation.width
        if isinstance(operation, ResidualNorm):
            return (base, *run.mask(operation.probability, operation.site), run.values)
        return (base, *run.mask(0.0, 0), run.values)

    def _forward_with_product(self, run: MixedRun, operation: ResidualNorm, product: Product) -> None:
        """Of the branch only the operand of its last product is there."""
        assert run.norm is not None
        gain, bias = (run.parameter(operation.parameters[r]) if operation.parameters else 0 for r in ("gain", "bias"))
        norm = Norm(
            x=run.tensor(operation.inputs["x"]),
            branch_bias=run.parameter(operation.branch_bias) if operation.branch_bias else 0,
            gain=gain,
            bias=bias,
            **{role: run.tensor(operation.outputs[role]) for role in ("sum", "y", "mean", "rstd")},
            dropout=self._mask(run, operation),
        )
        run.norm((run.tokens, operation.width), product, norm)

    def _add_product(self, run: MixedRun, operation: ResidualNorm, product: Product) -> None:
        """sum = x + the product at the end of the branch, by the library."""
        width, depth = operation.width, product.depth
        bias = run.weight16(operation.branch_bias) if operation.branch_bias else 0
        run.multiply(
            (run.tokens, width, depth),
            run.narrow(product.left, depth),
            run.narrow(product.weight, depth),
            run.narrow(run.tensor(operation.outputs["sum"]), width),
            b_by_n=True,
            epilogue="bias" if bias else "none",
            bias=bias,
            plus=run.tensor(operation.inputs["x"]),
        )

    def forward(self, run: Run, operation: Any) -> None:
        run = mixed(run)
        x, branch, total = run.tensor(operation.inputs["x"]), 0, 0
        if "operand" in operation.inputs:
            product = run.left.pop(operation.inputs["branch"])
            if run.norm is not None and serves_width(operation.width):
                self._forward_with_product(run, operation, product)
                return
            self._add_product(run, operation, product)
            x = run.tensor(operation.outputs["sum"])
        elif isinstance(operation, ResidualNorm):
            branch, total = run.tensor(operation.inputs["branch"]), run.tensor(operation.outputs["sum"])
        gain, bias = (run.parameter(operation.parameters[r]) if operation.parameters else 0 for r in ("gain", "bias"))
        run.launch(
            self._unit(run, operation),
            "k_norm_fwd",
            f"PPPPiPPPPq{MASK}P",
            (ceiling(run.tokens, ROW_WARPS),),
            (THREADS,),
            *(x, branch, gain, bias, run.tokens, total),
            *(run.tensor(operation.outputs[r]) for r in ("y", "mean", "rstd")),
            *self._mask(run, operation),
        )

    def backward(self, run: Run, operation: Any) -> None:
        run = mixed(run)
        joined = isinstance(operation, ResidualNorm)
        dx = run.gradient(operation.inputs["x"])
        if joined:
            x = run.tensor(operation.outputs["y" if operation.is_bare else "sum"])
            mean = 0 if operation.is_bare else run.tensor(operation.outputs["mean"])
            # Without dropout the branch's gradient is x's and stands in the same place.
            dbranch = run.gradient(operation.inputs["branch"]) if operation.probability else 0
            dsum = run.gradient(operation.outputs["sum"]) if run.has_gradient(operation.outputs["sum"]) else 0
        else:
            x, mean, dbranch = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["mean"]), 0
            dsum = dx if run.accumulates(operation, "x") else 0
        gain = run.parameter(operation.parameters["gain"]) if operation.parameters else 0
        tokens = run.shard_tokens
        run.launch(
            self._unit(run, operation),
            "k_norm_bwd",
            f"PPPPPPPPiiq{MASK}PP",
            (ceiling(tokens, self.rows), run.shards),
            (norm_threads(operation.width),),
            *(x, mean, run.tensor(operation.outputs["rstd"]), gain),
            *(run.gradient(operation.outputs["y"]), dsum, dx, dbranch, tokens, self.rows),
            *self._mask(run, operation),
            run.parts(operation),
        )


class LinearTwin(MixedTwin[Linear]):
    """A product of its own.

    padded: columns of the result in memory, where they are more than the layer's width. sums_bias: whether the bias's
    gradient is summed here. ends_branch: whether the result is a branch of a residual sum, whose gradient stands where
    that of the sum's other part does. tied: whether its weight is the token embedding. own: whether our own kernel
    computes the weight's gradient. eight: the forward product in fp8. leaves_product: whether the residual sum that
    follows computes the forward product too.
    """

    def __init__(
        self,
        train: TrainSpec,
        padded: int,
        sums_bias: bool,
        ends_branch: bool,
        tied: bool,
        own: bool,
        eight: EightBitProduct | None,
        leaves_product: bool,
    ) -> None:
        self.train = train
        self.padded = padded
        self.sums_bias = sums_bias
        self.ends_branch = ends_branch
        self.tied = tied
        self.own = own
        self.joins = not own  # the library leaves gradients of shards, which should not wait long to be joined
        self.is_held = own and ends_branch  # for the linear layer two steps later, that of queries, keys and values
        self.eight = eight
        self.leaves_product = leaves_product

    def derived(self, operation: Linear, tier: str) -> dict[str, BufferType]:
        return self.eight.derived() if self.eight else {}

    def prepare(self, run: Run, operation: Linear) -> None:
        if self.eight:
            self.eight.prepare(mixed(run), operation)

    def forward_work(self, operation: Linear, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return self.eight.forward_work(sizes.batch * sizes.context) if self.eight else {}

    def backward_work(self, operation: Linear, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        if self.tied:
            return {}
        return {"shards": shard_gradients(self.train, self.own, shards, operation.wide, operation.deep)}

    def parts(self, operation: Linear, tokens: int) -> Parts | None:
        bias = (operation.parameters["bias"],) if self.sums_bias else ()
        return Parts(ceiling(tokens, SUM_ROWS), operation.wide, bias) if bias else None

    def forward(self, run: Run, operation: Linear) -> None:
        run = mixed(run)
        deep, bias = operation.deep, operation.parameters.get("bias")
        if self.eight:
            x, y = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["y"])
            self.eight.forward(run, operation, x, y)
            return
        if self.leaves_product:
            weight = run.weight16(operation.parameters["weight"])
            run.left[operation.outputs["y"]] = Product(run.tensor(operation.inputs["x"]), weight, deep)
            return
        run.multiply(
            (run.tokens, self.padded, deep),
            run.narrow(run.tensor(operation.inputs["x"]), deep),
            run.narrow(run.weight16(operation.parameters["weight"]), deep),
            run.narrow(run.tensor(operation.outputs["y"]), self.padded),
            b_by_n=True,
            epilogue="bias" if bias else "none",
            bias=run.weight16(bias) if bias else 0,
        )

    def backward(self, run: Run, operation: Linear) -> None:
        run = mixed(run)
        deep, wide, stride = operation.deep, operation.wide, self.padded
        x, dx = run.tensor(operation.inputs["x"]), run.gradient(operation.inputs["x"])
        dy = run.gradient(operation.outputs["y"])
        # Nothing on the way back needs the parameters' gradients: they are computed beside what follows, by our own
        # kernel two at a time: it then has enough to do, and the side stream fewer launches one after another.
        out = run.tied if self.tied else run.parameter_gradient(operation.parameters["weight"])
        squares = run.weight_squares(operation.parameters["weight"])
        gradient = Gradient(wide, deep, run.narrow(dy, stride), run.narrow(x, deep), out, squares)
        if self.is_held:
            run.held.append(gradient)
        else:
            self._weight_gradient(run, operation, gradient)
        run.multiply(
            (run.tokens, deep, stride),
            run.narrow(dy, stride),
            run.narrow(run.weight16(operation.parameters["weight"]), deep),
            run.narrow(dx, deep),
            add=run.accumulates(operation, "x"),
        )

    def _weight_gradient(self, run: MixedRun, operation: Linear, gradient: Gradient) -> None:
        """With that of the weight that has waited for it, beside what follows."""
        held, run.held = run.held, []
        with run.launch.beside(reads_lasting=not self.ends_branch and not held):
            if self.tied and not self.own:
                weight_products(run, gradient, gradient.out)
            else:
                shards = 0 if self.own else run.work(operation, "shards")
                weight_gradients(run, *((g, 0) for g in held), (gradient, shards))
            if self.sums_bias:
                grid = (ceiling(operation.wide, 256), ceiling(run.shard_tokens, SUM_ROWS), run.shards)
                arguments = (gradient.dy.address, run.shard_tokens, operation.wide, run.parts(operation))
                run.launch(run.unit("linear"), "k_column_sums", "PiiP", grid, (THREADS,), *arguments)


class MlpTwin(MixedTwin[Mlp]):
    """own, leaves_product: as LinearTwin's. eight: the forward products in fp8, first up and then down; empty
    otherwise."""

    def __init__(self, train: TrainSpec, own: bool, eight: tuple[EightBitProduct, ...], leaves_product: bool) -> None:
        self.train = train
        self.own = own
        self.joins = not own
        self.eight = eight
        self.leaves_product = leaves_product

    def derived(self, operation: Mlp, tier: str) -> dict[str, BufferType]:
        return {role: type for product in self.eight for role, type in product.derived().items()}

    def prepare(self, run: Run, operation: Mlp) -> None:
        for product in self.eight:
            product.prepare(mixed(run), operation)

    def forward_work(self, operation: Mlp, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        tokens = sizes.batch * sizes.context
        return {role: type for product in self.eight for role, type in product.forward_work(tokens).items()}

    def backward_work(self, operation: Mlp, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        tokens = sizes.batch * sizes.context
        return {
            "dbefore": BufferType((tokens, operation.hidden), "uint16"),
            "down": shard_gradients(self.train, self.own, shards, operation.width, operation.hidden),
            "up": shard_gradients(self.train, self.own, shards, operation.hidden, operation.width),
        }

    def parts(self, operation: Mlp, tokens: int) -> Parts | None:
        bias = operation.parameters.get("up_bias")
        return Parts(ceiling(tokens, ACTIVATION_ROWS), operation.hidden, (bias,)) if bias else None

    def _unit(self, run: MixedRun, operation: Mlp) -> Unit:
        return run.unit("activation", RELU=int(operation.function == "relu"))

    def _activate(self, run: MixedRun, operation: Mlp, before: int, after: int) -> None:
        size, unit = run.tokens * operation.hidden, self._unit(run, operation)
        run.launch(unit, "k_activation_fwd", "PqP", eights(size), (THREADS,), before, size, after)

    def forward(self, run: Run, operation: Mlp) -> None:
        run = mixed(run)
        width, hidden, parameters = operation.width, operation.hidden, operation.parameters
        before, after, y = (run.tensor(operation.outputs[r]) for r in ("before", "after", "y"))
        if self.eight:
            up, down = self.eight
            up.forward(run, operation, run.tensor(operation.inputs["x"]), before)
            self._activate(run, operation, before, after)
            down.forward(run, operation, after, y)
            return
        self._up(run, operation, before, after)
        if self.leaves_product:
            run.left[operation.outputs["y"]] = Product(after, run.weight16(parameters["down"]), hidden)
            return
        bias = run.weight16(parameters["down_bias"]) if "down_bias" in parameters else 0
        run.multiply(
            (run.tokens, width, hidden),
            run.narrow(after, hidden),
            run.narrow(run.weight16(parameters["down"]), hidden),
            run.narrow(y, width),
            b_by_n=True,
            epilogue="bias" if bias else "none",
            bias=bias,
        )

    def backward(self, run: Run, operation: Mlp) -> None:
        run = mixed(run)
        width, hidden, parameters = operation.width, operation.hidden, operation.parameters
        before, after = (run.tensor(operation.outputs[r]) for r in ("before", "after"))
        x, dx = run.tensor(operation.inputs["x"]), run.gradient(operation.inputs["x"])
        dy, dbefore = run.gradient(operation.outputs["y"]), run.work(operation, "dbefore")
        self._activation_gradient(run, operation, dy, before, dbefore)
        down_out, up_out = (
            (run.parameter_gradient(parameters[role]), run.weight_squares(parameters[role])) for role in ("down", "up")
        )
        down = Gradient(width, hidden, run.narrow(dy, width), run.narrow(after, hidden), *down_out)
        up = Gradient(hidden, width, run.narrow(dbefore, hidden), run.narrow(x, width), *up_out)
        with run.launch.beside(reads_lasting=True):
            weight_gradients(run, (down, run.work(operation, "down")), (up, run.work(operation, "up")))
        run.multiply(
            (run.tokens, width, hidden),
            run.narrow(dbefore, hidden),
            run.narrow(run.weight16(parameters["up"]), width),
            run.narrow(dx, width),
            add=run.accumulates(operation, "x"),
        )

    def _up(self, run: MixedRun, operation: Mlp, before: int, after: int) -> None:
        """The product that the activation is taken of, and the activation."""
        width, hidden, parameters = operation.width, operation.hidden, operation.parameters
        x, weight = run.tensor(operation.inputs["x"]), run.weight16(parameters["up"])
        bias = run.weight16(parameters["up_bias"]) if "up_bias" in parameters else 0
        gelu = operation.function == "gelu"
        if run.activation is not None:
            run.activation.forward((run.tokens, width, hidden), x, weight, bias, before, after, relu=not gelu)
            return
        run.multiply(
            (run.tokens, hidden, width),
            run.narrow(x, width),
            run.narrow(weight, width),
            run.narrow(after if gelu else before, hidden),
            b_by_n=True,
            epilogue=("gelu_aux_bias" if bias else "gelu_aux") if gelu else ("bias" if bias else "none"),
            bias=bias,
            aux=before if gelu else 0,
        )
        if not gelu:
            self._activate(run, operation, before, after)

    def _activation_gradient(self, run: MixedRun, operation: Mlp, dy: int, before: int, dbefore: int) -> None:
        """dbefore is the gradient of what the activation was taken of; beside it, parts of the bias's gradient."""
        width, hidden, parts = operation.width, operation.hidden, run.parts(operation)
        weight = run.weight16(operation.parameters["down"])
        # Our own kernel sums over rows of all shards at once.
        if run.activation is not None and run.shard_tokens % ACTIVATION_ROWS == 0:
            sizes, relu = (run.tokens, width, hidden), operation.function == "relu"
            run.activation.backward(sizes, dy, weight, before, dbefore, relu, parts)
            return
        a, b, out = run.narrow(dy, width), run.narrow(weight, hidden), run.narrow(dbefore, hidden)
        run.multiply((run.tokens, hidden, width), a, b, out)
        # The library's own product with GELU's derivative takes longer than both, and sums no bias.
        grid = (ceiling(hidden, 256), ceiling(run.shard_tokens, ACTIVATION_ROWS), run.shards)
        arguments = (before, run.shard_tokens, hidden, dbefore, parts)
        run.launch(self._unit(run, operation), "k_activation_bwd", "PiiPP", grid, (THREADS,), *arguments)


class AttentionTwin(Twin[FlashAttention]):
    """number: which attention of the program this is, for its seeds. padded: columns of the logits. own: whether our
    own kernels serve, not cuDNN.

    cuDNN's workspace of the backward pass may stand where the logits were: as long as it is no larger it costs nothing.
    """

    def __init__(self, number: int, train: TrainSpec, padded: int, own: bool) -> None:
        self.number = number
        self.train = train
        self.padded = padded
        self.own = own

    def _dropout_rows(self, context: int) -> int:
        """Rows that one seed of dropout serves: whole shards, however many of them are taken at once."""
        shard_rows, shards = self.train.batch // self.train.shards, 1
        while self.train.shards % (2 * shards) == 0 and 2 * shards * shard_rows * context <= DROPOUT_TOKENS:
            shards *= 2
        return shards * shard_rows

    def forward_work(self, operation: FlashAttention, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        return {"workspace": BufferType((0 if self.own else SPARE,), "uint8")}

    def backward_work(self, operation: FlashAttention, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        heads = Heads(operation.heads, operation.width, sizes.context, operation.probability)
        rows = self._rows(heads, sizes.batch)
        size = numbers_bytes(heads, rows) if self.own else heads.backward_workspace(rows)
        return {"workspace": BufferType((size,), "uint8")}

    def _rows(self, heads: Heads, batch: int) -> int:
        """Rows of one call."""
        if self.own:
            return batch
        if heads.dropout:
            return min(batch, self._dropout_rows(heads.context))
        return heads.rows_at_once(batch, max(LEAST_ROOM, 2 * self.padded * heads.context * batch))

    def _heads(self, run: MixedRun, operation: FlashAttention) -> Heads:
        dropout = operation.probability if run.training else 0.0
        return Heads(operation.heads, operation.width, run.sizes.context, dropout)

    def _parts(
        self, run: MixedRun, operation: FlashAttention, heads: Heads, dy: int, dqkv: int
    ) -> tuple[int, list[Places]]:
        """Rows in each part, and the addresses of the parts."""
        rows = self._rows(heads, run.sizes.batch)
        qkv, y, stats = run.tensor(operation.inputs["qkv"]), *(run.tensor(operation.outputs[r]) for r in ("y", "stats"))
        line = 2 * heads.context * heads.d_model * rows  # bytes of y in a part
        parts = []
        for part in range(run.sizes.batch // rows):
            first_row = run.first_row + part * rows
            seed = run.seeds(self.number) + 8 * (first_row // run.shard_rows)
            parts.append(
                Places(
                    qkv + 3 * line * part,
                    y + line * part,
                    stats + 4 * heads.heads * heads.context * rows * part,
                    run.work(operation, "workspace"),
                    dy + line * part,
                    dqkv + 3 * line * part,
                    seed,
                    run.zero,
                    run.values,
                    first_row,
                    decision_mask(heads.dropout, operation.site),
                )
            )
        return rows, parts

    def forward(self, run: Run, operation: FlashAttention) -> None:
        run = mixed(run)
        heads = self._heads(run, operation)
        if heads.dropout and not self.own and run.first_row == 0 and run.phase == "forward":
            shards, seeds = run.all_shards, run.seeds(self.number)
            values = (operation.site, shards, run.values, seeds)
            grid = (ceiling(shards, THREADS),)
            run.launch(run.unit("attention"), "k_attention_seeds", "IiPP", grid, (THREADS,), *values)
        rows, parts = self._parts(run, operation, heads, 0, 0)
        for places in parts:
            run.attention.forward(heads, rows, places)

    def backward(self, run: Run, operation: FlashAttention) -> None:
        run = mixed(run)
        heads = self._heads(run, operation)
        dy, dqkv = run.gradient(operation.outputs["y"]), run.gradient(operation.inputs["qkv"])
        rows, parts = self._parts(run, operation, heads, dy, dqkv)
        for places in parts:
            run.attention.backward(heads, rows, places)


class ClassifierTwin(MixedTwin[Classifier]):
    def forward(self, run: Run, operation: Classifier) -> None:
        run = mixed(run)
        scale = float(run.loss_scale) if run.training else 0.0
        shared = 2 * operation.padded
        fits = shared + CLASSIFIER_SPARE <= run.launch.card.shared_limit
        name, most, columns = "k_classifier", CLASSIFIER_THREADS, CLASSIFIER_COLUMNS
        if not fits:
            name, most, columns = "k_classifier_long", LONG_CLASSIFIER_THREADS, LONG_CLASSIFIER_COLUMNS
        run.launch(
            run.unit("loss"),
            name,
            "PPiiPfP",
            (run.tokens,),
            (min(most, 32 * ceiling(operation.padded, 32 * columns)),),
            *(run.tensor(operation.inputs["logits"]), run.tensor(operation.inputs["targets"])),
            *(operation.vocab, operation.padded, run.tensor(operation.outputs["losses"]), scale, run.values),
            shared=shared if fits else 0,
        )

    def backward(self, run: Run, operation: Classifier) -> None:
        """Done on the way forward."""


def mixed_twins(program: Program, train: TrainSpec, own: bool, own_gradients: bool) -> dict[str, Twin[Any]]:
    """The `prod` half of each operation of a mixed program, by name. own, own_gradients: as MixedLayout's."""
    summed_elsewhere = {o.branch_bias for o in program.operations if isinstance(o, ResidualNorm)}
    twins: dict[str, Twin[Any]] = {}
    attentions = 0
    (padded,) = (o.padded for o in program.operations if isinstance(o, Classifier))
    for operation in program.operations:
        twins[operation.name] = (
            AttentionTwin(attentions, train, padded, own)
            if isinstance(operation, FlashAttention)
            else _twin(program, train, operation, summed_elsewhere, own_gradients)
        )
        attentions += isinstance(operation, FlashAttention)
    return twins


def _twin(
    program: Program, train: TrainSpec, operation: Operation, summed_elsewhere: set[str | None], own_gradients: bool
) -> Twin[Any]:
    eight_bit = train.precision == "fp8"
    followed_by = {o.inputs["branch"]: o for o in program.operations if isinstance(o, ResidualNorm)}
    follower = followed_by.get(operation.outputs.get("y", ""))
    leaves_product = follower is not None and "operand" in follower.inputs
    if isinstance(operation, Embed):
        return EmbedTwin(program.spec.tied and not own_gradients)
    if isinstance(operation, LayerNorm | ResidualNorm):
        return NormTwin(norm_rows(train, program.spec.context, operation.width), isinstance(operation, LayerNorm))
    if isinstance(operation, Linear):
        width = program.tensors[operation.outputs["y"]].shape[-1]
        if not isinstance(width, int):
            raise AssertionError(f"{operation.name} has a width of {width}")
        bias = operation.parameters.get("bias")
        weight = operation.parameters["weight"]
        in_a_block = operation.name != program.operations[-2].name  # the head comes before the loss
        eight = EightBitProduct("y", weight, bias, operation.wide, operation.deep) if eight_bit and in_a_block else None
        sums_bias = bias is not None and bias not in summed_elsewhere
        tied, ends_branch = weight == "embed.token", follower is not None
        return LinearTwin(train, width, sums_bias, ends_branch, tied, own_gradients, eight, leaves_product)
    if isinstance(operation, Mlp):
        return MlpTwin(train, own_gradients, _eight_bit_mlp(operation) if eight_bit else (), leaves_product)
    if isinstance(operation, Classifier):
        return ClassifierTwin()
    raise AssertionError(f"{operation.kind} has no half in the tier prod")


def _eight_bit_mlp(mlp: Mlp) -> tuple[EightBitProduct, EightBitProduct]:
    up, down = (mlp.parameters[role] for role in ("up", "down"))
    up_bias, down_bias = (mlp.parameters.get(f"{role}_bias") for role in ("up", "down"))
    return (
        EightBitProduct("up", up, up_bias, mlp.hidden, mlp.width),
        EightBitProduct("down", down, down_bias, mlp.width, mlp.hidden),
    )
