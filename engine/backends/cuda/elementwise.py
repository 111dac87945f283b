"""Operations that walk over elements or rows: embedding, LayerNorm, activation, residual sum, loss."""

from engine.backends.cuda.linear import column_tops_of, logits_gradient
from engine.backends.cuda.neighbours import NORM_WIDTH
from engine.backends.cuda.quantising import (
    QUANTISE,
    ROWS,
    SOURCE,
    TOPS_PIECE,
    WARP_ROWS,
    Operand,
    Source,
    column_tops,
    planes_of_tensor,
    quantise_in_blocks,
    quantise_rows,
    row_work,
)
from engine.backends.cuda.run import MASK, THREADS, Run, ceiling, join_shards
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.twin import Twin
from engine.operations.activation import Activation
from engine.operations.base import BufferType, Sizes
from engine.operations.embed import Embed
from engine.operations.layernorm import LayerNorm
from engine.operations.linear import Linear
from engine.operations.loss import Loss
from engine.operations.residual_add import ResidualAdd

EMBED, LAYERNORM, ACTIVATION = Unit("embed"), Unit("layernorm"), Unit("activation")
RESIDUAL, DROPOUT, LOSS = Unit("residual_add"), Unit("dropout"), Unit("loss")
ROWS_PER_BLOCK = THREADS // 32
QUANTISED_ROWS = 4  # as in layernorm.cu
BACKWARD_ROWS = 4
LOGIT_ROWS = 4  # as in linear_quantise.cu
VERY_LARGE = 0x7F  # a byte: four of them are more than any token's place


def blocks(elements: int) -> tuple[int]:
    return (ceiling(elements, THREADS),)


def group_blocks(elements: int) -> tuple[int]:
    """Blocks over groups of four addresses; the first and the last group may be cut."""
    return (ceiling(elements // 4 + 2, THREADS),)


def row_elements(run: Run, width: int) -> int:
    return run.sizes.context * width


def drop_out(run: Run, probability: float, site: int, x: int, width: int) -> None:
    """Put x [B, T, width] through dropout in place, where it acts."""
    if run.training and probability:
        size, base = run.tokens * width, run.first_row * row_elements(run, width)
        mask = run.mask(probability, site)
        run.launch(
            DROPOUT, "k_dropout", f"Pqq{MASK}P", group_blocks(size), (THREADS,), x, size, base, *mask, run.values
        )


class EmbedTwin(Twin[Embed]):
    joins = True  # a tied head's gradient goes to the same parameter

    def __init__(self, vocab: int, tied: bool) -> None:
        self.vocab = vocab
        self.tied = tied  # whether a head has already put its gradient where the tokens' go

    def backward_work(self, operation: Embed, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        tokens = sizes.batch * sizes.context
        work = {
            "first": BufferType((shards, self.vocab), "int32"),
            "sums": BufferType((tokens, operation.width), "int64"),
        }
        if not self.tied:
            work["gradients"] = BufferType((shards, self.vocab, operation.width), "float32")
        return work

    def zeroed(self, operation: Embed, tier: str, shards: int) -> dict[str, BufferType]:
        return {"tops": BufferType((shards, operation.width), "int32")}

    def forward(self, run: Run, operation: Embed) -> None:
        size, y = run.tokens * operation.width, run.tensor(operation.outputs["y"])
        token, position = (run.parameter(operation.parameters[r]) for r in ("token", "position"))
        run.launch(
            EMBED,
            "k_embed_fwd",
            "PiPPqiP",
            blocks(size),
            (THREADS,),
            *(run.tensor(operation.inputs["ids"]), run.sizes.context, token, position, size, operation.width, y),
        )
        drop_out(run, operation.probability, operation.site, y, operation.width)

    def backward(self, run: Run, operation: Embed) -> None:
        ids, dy = run.tensor(operation.inputs["ids"]), run.gradient(operation.outputs["y"])
        width, tokens, shards, flag = operation.width, run.shard_tokens, run.shards, run.flag(operation)
        drop_out(run, operation.probability, operation.site, dy, width)
        first, sums, tops = run.work(operation, "first"), run.work(operation, "sums"), run.zeroed(operation, "tops")
        token = operation.parameters["token"]
        gradients = run.token_gradients if self.tied else run.work(operation, "gradients")
        if not self.tied:
            run.launch.fill(gradients, 0, 4 * shards * self.vocab * width)
        run.launch.fill(first, VERY_LARGE, 4 * shards * self.vocab)
        run.launch.fill(sums, 0, 8 * run.tokens * width)
        grid = (*blocks(tokens), shards)
        run.launch(EMBED, "k_embed_first", "PiiP", grid, (THREADS,), ids, tokens, self.vocab, first)
        column_tops(run, dy, tokens, width, shards, tops)
        grid = (*blocks(tokens * width), shards)
        sizes = (ids, first, tokens, self.vocab, width)
        run.launch(EMBED, "k_embed_bwd_sums", "PPiiiPPPP", grid, (THREADS,), *sizes, dy, tops, sums, flag)
        run.launch(
            EMBED,
            "k_embed_bwd_token",
            "PPiiiPPPP",
            grid,
            (THREADS,),
            *(*sizes, tops, sums, gradients, flag),
        )
        join_shards(run, gradients, self.vocab * width, token)
        context = run.sizes.context
        run.launch(
            EMBED,
            "k_embed_bwd_position",
            "iiiiPPPiP",
            blocks(context * width),
            (THREADS,),
            *(tokens, context, width, shards, dy, tops),
            *(run.parameter_gradient(operation.parameters["position"]), int(run.adds), flag),
        )


def row_unit(width: int) -> Unit:
    """LayerNorm's kernels that hold rows of this width in registers."""
    return Unit("layernorm", {"VECTORS": ceiling(width, 128)})


def backward_warps(width: int) -> int:
    """Of a block that holds rows of this width in registers, as in layernorm.cu."""
    return 8 if width <= 3 * 128 else 4


class LayerNormTwin(Twin[LayerNorm]):
    def __init__(self, linear: Linear | None) -> None:
        self.linear = linear  # that takes the output as planes

    def zeroed(self, operation: LayerNorm, tier: str, shards: int) -> dict[str, BufferType]:
        shape = (shards, 2, operation.width)
        return {"tops": BufferType(shape, "int32"), "sums": BufferType(shape, "int64")}

    def _statistics(self, run: Run, operation: LayerNorm) -> tuple[int, int]:
        return run.tensor(operation.outputs["mean"]), run.tensor(operation.outputs["rstd"])

    def forward(self, run: Run, operation: LayerNorm) -> None:
        names = operation.parameters
        gain, bias = (run.parameter(names[r]) if names else 0 for r in ("gain", "bias"))
        if self.linear:
            rows = planes_of_tensor(run.tensor(operation.outputs["y"]), run.tokens, operation.width)
            tops, shards = column_tops_of(run, self.linear)
            run.launch(
                row_unit(operation.width),
                "k_layernorm_quantise",
                "PPPiiiPPPPiPPP",
                (ceiling(run.tokens, ROWS_PER_BLOCK * QUANTISED_ROWS),),
                (THREADS,),
                *(run.tensor(operation.inputs["x"]), gain, bias, run.tokens, operation.width, rows.padded),
                *(rows.planes, rows.exponents, *self._statistics(run, operation)),
                *(run.tokens // shards, tops, run.flag(operation), run.flag(self.linear)),
            )
            return
        run.launch(
            LAYERNORM,
            "k_layernorm_fwd",
            "PPPiiPPPP",
            (ceiling(run.tokens, ROWS_PER_BLOCK),),
            (THREADS,),
            *(run.tensor(operation.inputs["x"]), gain, bias, run.tokens, operation.width),
            *(run.tensor(operation.outputs["y"]), *self._statistics(run, operation), run.flag(operation)),
        )

    def backward(self, run: Run, operation: LayerNorm) -> None:
        names, width, tokens = operation.parameters, operation.width, run.shard_tokens
        x, dx = run.tensor(operation.inputs["x"]), run.gradient(operation.inputs["x"])
        dy, flag = run.gradient(operation.outputs["y"]), run.flag(operation)
        mean, rstd = self._statistics(run, operation)
        tops = run.zeroed(operation, "tops") if names else 0
        held = width <= NORM_WIDTH
        warps, rows = (backward_warps(width), BACKWARD_ROWS) if held else (ROWS_PER_BLOCK, WARP_ROWS)
        run.launch(
            row_unit(width) if held else LAYERNORM,
            "k_layernorm_bwd_held" if held else "k_layernorm_bwd",
            "PPPPPiiPiiP",
            (ceiling(run.tokens, warps * rows),),
            (32 * warps,),
            *(x, run.parameter(names["gain"]) if names else 0, mean, rstd, dy, run.tokens, width, dx),
            *(int(run.accumulates(operation, "x")), tokens, tops),
        )
        if not names:
            return
        # Nothing on the way back needs the parameters' gradients.
        with run.launch.beside(reads_lasting=True):
            sums = run.zeroed(operation, "sums")
            grid = (ceiling(width, 32), ceiling(tokens, TOPS_PIECE), run.shards)
            inputs = (x, mean, rstd, dy, tokens, width)
            run.launch(LAYERNORM, "k_layernorm_bwd_sums", "PPPPiiPPP", grid, (32, 8), *inputs, tops, sums, flag)
            dgain, dbias = (run.parameter_gradient(names[r]) for r in ("gain", "bias"))
            run.launch(
                LAYERNORM,
                "k_layernorm_bwd_parameters",
                "PPiiPPiP",
                (ceiling(width, 32),),
                (32,),
                *(tops, sums, width, run.shards, dgain, dbias, int(run.adds), flag),
            )


class ActivationTwin(Twin[Activation]):
    def __init__(self, elements_per_token: int, before: Linear | None, after: Linear | None) -> None:
        self.width = elements_per_token
        self.before = before  # makes x, and takes its gradient as planes
        self.after = after  # takes the output as planes

    def backward_work(self, operation: Activation, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        return row_work(sizes.batch * sizes.context, self.width) if self.before else {}

    def forward(self, run: Run, operation: Activation) -> None:
        size = run.tokens * self.width
        x, y = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["y"])
        if self.after:
            rows = planes_of_tensor(y, run.tokens, self.width)
            quantise_rows(
                run, Source(x, operation.function), rows, run.flag(self.after), *column_tops_of(run, self.after)
            )
            return
        name = f"k_{operation.function}_fwd"
        run.launch(ACTIVATION, name, "PqP", blocks(ceiling(size, 4)), (THREADS,), x, size, y)

    def backward(self, run: Run, operation: Activation) -> None:
        size = run.tokens * self.width
        x, gradient = run.tensor(operation.inputs["x"]), run.gradient(operation.inputs["x"])
        if self.before:
            places = (run.work(operation, "rows"), run.work(operation, "row_exponents"))
            rows, tops = Operand(*places, run.tokens, self.width), run.zeroed(self.before, "dy_tops")
            name, flag = f"k_{operation.function}_bwd_quantise", run.flag(self.before)
            quantise_in_blocks(run, name, "PP", (x, gradient), rows, flag, tops, run.shards)
            return
        name = f"k_{operation.function}_bwd"
        run.launch(ACTIVATION, name, "PqP", blocks(ceiling(size, 4)), (THREADS,), x, size, gradient)


class ResidualTwin(Twin[ResidualAdd]):
    def __init__(self, elements_per_token: int, linear: Linear | None) -> None:
        self.width = elements_per_token
        self.linear = linear  # that makes the branch, and does all the work here

    def _address(self, run: Run) -> tuple[int, int]:
        """Elements, and the first one's address in the mask."""
        return run.tokens * self.width, run.first_row * row_elements(run, self.width)

    def forward(self, run: Run, operation: ResidualAdd) -> None:
        if self.linear:
            return
        size, base = self._address(run)
        x, y = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["y"])
        mask = run.mask(operation.probability, operation.site)
        arguments = (x, size, y, base, *mask, run.values)
        run.launch(RESIDUAL, "k_residual_add_fwd", f"PqPq{MASK}P", group_blocks(size), (THREADS,), *arguments)

    def backward(self, run: Run, operation: ResidualAdd) -> None:
        if self.linear:
            return
        size, base = self._address(run)
        dy = run.gradient(operation.outputs["y"])
        dx, dbranch = (run.gradient(operation.inputs[r]) for r in ("x", "branch"))
        mask = run.mask(operation.probability, operation.site)
        # Where x has no gradient yet, it takes over dy's storage: nothing to add.
        dx = dx if run.accumulates(operation, "x") else 0
        arguments = (dy, size, dbranch, dx, base, *mask, run.values)
        run.launch(RESIDUAL, "k_residual_add_bwd", f"PqPPq{MASK}P", group_blocks(size), (THREADS,), *arguments)


class LossTwin(Twin[Loss]):
    def __init__(self, vocab: int, head: Linear | None) -> None:
        self.vocab = vocab
        self.head = head  # that takes the gradient of the logits as planes

    def backward_work(self, operation: Loss, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        return row_work(sizes.batch * sizes.context, self.vocab) if self.head else {}

    def _others(self, run: Run, operation: Loss) -> int:
        """Each row's largest logit but for the target's, kept after the maxima; 0 where nobody asks."""
        return run.tensor(operation.outputs["maxima"]) + 4 * run.tokens if self.head else 0

    def forward(self, run: Run, operation: Loss) -> None:
        losses, maxima, sums = (run.tensor(operation.outputs[r]) for r in ("losses", "maxima", "sums"))
        logits, targets = (run.tensor(operation.inputs[r]) for r in ("logits", "targets"))
        run.launch(
            LOSS,
            "k_loss_fwd",
            "PPiiPPPP",
            (ceiling(run.tokens, ROWS_PER_BLOCK),),
            (THREADS,),
            *(logits, targets, run.tokens, self.vocab, losses, maxima, self._others(run, operation), sums),
        )

    def backward(self, run: Run, operation: Loss) -> None:
        if self.head:
            places = (run.work(operation, "rows"), run.work(operation, "row_exponents"))
            rows = Operand(*places, run.tokens, self.vocab)
            numbers = (rows.rows, rows.depth, rows.padded, rows.planes, rows.exponents, run.shard_tokens, 1)
            run.launch(
                QUANTISE,
                "k_quantise_logits",
                f"{SOURCE}P{ROWS}",
                (ceiling(run.tokens, LOGIT_ROWS),),
                (THREADS,),
                *(*logits_gradient(run, operation).arguments, self._others(run, operation), *numbers),
                *(run.zeroed(self.head, "dy_tops"), run.flag(self.head)),
            )
            return
        maxima, sums = (run.tensor(operation.outputs[r]) for r in ("maxima", "sums"))
        logits, targets = run.gradient(operation.inputs["logits"]), run.tensor(operation.inputs["targets"])
        run.launch(
            LOSS,
            "k_loss_bwd",
            "PPiPPf",
            (run.tokens,),
            (THREADS,),
            *(logits, targets, self.vocab, maxima, sums, float(run.loss_scale)),
        )
