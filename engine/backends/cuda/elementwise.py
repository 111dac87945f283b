"""Operations that walk over elements or rows: embedding, LayerNorm, activation, residual sum, loss."""

from engine.backends.cuda.linear import TOPS_PIECE, WARP_ROWS, column_tops
from engine.backends.cuda.run import MASK, THREADS, Run, ceiling
from engine.backends.cuda.sources import Unit
from engine.backends.cuda.twin import Twin
from engine.operations.activation import Activation
from engine.operations.base import BufferType, Sizes
from engine.operations.embed import Embed
from engine.operations.layernorm import LayerNorm
from engine.operations.loss import Loss
from engine.operations.residual_add import ResidualAdd

EMBED, LAYERNORM, ACTIVATION = Unit("embed"), Unit("layernorm"), Unit("activation")
RESIDUAL, DROPOUT, LOSS = Unit("residual_add"), Unit("dropout"), Unit("loss")
ROWS_PER_BLOCK = THREADS // 32
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

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def backward_work(self, operation: Embed, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        tokens = sizes.batch * sizes.context
        return {
            "first": BufferType((shards, self.vocab), "int32"),
            "sums": BufferType((tokens, operation.width), "int64"),
        }

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
        token, position = (run.parameter_gradient(operation.parameters[r]) for r in ("token", "position"))
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
            "PPiiiPPPqP",
            grid,
            (THREADS,),
            *(*sizes, tops, sums, token, run.set_stride, flag),
        )
        context = run.sizes.context
        run.launch(
            EMBED,
            "k_embed_bwd_position",
            "iiiPPPqP",
            (*blocks(context * width), shards),
            (THREADS,),
            *(tokens, context, width, dy, tops, position, run.set_stride, flag),
        )


class LayerNormTwin(Twin[LayerNorm]):
    def zeroed(self, operation: LayerNorm, tier: str, shards: int) -> dict[str, BufferType]:
        shape = (shards, 2, operation.width)
        return {"tops": BufferType(shape, "int32"), "sums": BufferType(shape, "int64")}

    def _statistics(self, run: Run, operation: LayerNorm) -> tuple[int, int]:
        return run.tensor(operation.outputs["mean"]), run.tensor(operation.outputs["rstd"])

    def forward(self, run: Run, operation: LayerNorm) -> None:
        names = operation.parameters
        gain, bias = (run.parameter(names[r]) if names else 0 for r in ("gain", "bias"))
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
        run.launch(
            LAYERNORM,
            "k_layernorm_bwd",
            "PPPPPiiPiiP",
            (ceiling(run.tokens, ROWS_PER_BLOCK * WARP_ROWS),),
            (THREADS,),
            *(x, run.parameter(names["gain"]) if names else 0, mean, rstd, dy, run.tokens, width, dx),
            *(int(run.accumulates(operation, "x")), tokens, run.zeroed(operation, "tops") if names else 0),
        )
        if not names:
            return
        tops, sums = run.zeroed(operation, "tops"), run.zeroed(operation, "sums")
        grid = (ceiling(width, 32), ceiling(tokens, TOPS_PIECE), run.shards)
        inputs = (x, mean, rstd, dy, tokens, width)
        run.launch(LAYERNORM, "k_layernorm_bwd_sums", "PPPPiiPPP", grid, (32, 8), *inputs, tops, sums, flag)
        dgain, dbias = (run.parameter_gradient(names[r]) for r in ("gain", "bias"))
        run.launch(
            LAYERNORM,
            "k_layernorm_bwd_parameters",
            "PPiPPqP",
            (*blocks(width), run.shards),
            (THREADS,),
            *(tops, sums, width, dgain, dbias, run.set_stride, flag),
        )


class ActivationTwin(Twin[Activation]):
    def __init__(self, elements_per_token: int) -> None:
        self.width = elements_per_token

    def forward(self, run: Run, operation: Activation) -> None:
        size = run.tokens * self.width
        x, y = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["y"])
        name = f"k_{operation.function}_fwd"
        run.launch(ACTIVATION, name, "PqP", blocks(ceiling(size, 4)), (THREADS,), x, size, y)

    def backward(self, run: Run, operation: Activation) -> None:
        size = run.tokens * self.width
        x, gradient = run.tensor(operation.inputs["x"]), run.gradient(operation.inputs["x"])
        name = f"k_{operation.function}_bwd"
        run.launch(ACTIVATION, name, "PqP", blocks(ceiling(size, 4)), (THREADS,), x, size, gradient)


class ResidualTwin(Twin[ResidualAdd]):
    def __init__(self, elements_per_token: int) -> None:
        self.width = elements_per_token

    def _address(self, run: Run) -> tuple[int, int]:
        """Elements, and the first one's address in the mask."""
        return run.tokens * self.width, run.first_row * row_elements(run, self.width)

    def forward(self, run: Run, operation: ResidualAdd) -> None:
        size, base = self._address(run)
        x, y = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["y"])
        mask = run.mask(operation.probability, operation.site)
        arguments = (x, size, y, base, *mask, run.values)
        run.launch(RESIDUAL, "k_residual_add_fwd", f"PqPq{MASK}P", group_blocks(size), (THREADS,), *arguments)

    def backward(self, run: Run, operation: ResidualAdd) -> None:
        size, base = self._address(run)
        dy = run.gradient(operation.outputs["y"])
        dx, dbranch = (run.gradient(operation.inputs[r]) for r in ("x", "branch"))
        mask = run.mask(operation.probability, operation.site)
        # Where x has no gradient yet, it takes over dy's storage: nothing to add.
        dx = dx if run.accumulates(operation, "x") else 0
        arguments = (dy, size, dbranch, dx, base, *mask, run.values)
        run.launch(RESIDUAL, "k_residual_add_bwd", f"PqPPq{MASK}P", group_blocks(size), (THREADS,), *arguments)


class LossTwin(Twin[Loss]):
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def forward(self, run: Run, operation: Loss) -> None:
        outputs = [run.tensor(operation.outputs[r]) for r in ("losses", "maxima", "sums")]
        logits, targets = (run.tensor(operation.inputs[r]) for r in ("logits", "targets"))
        run.launch(
            LOSS,
            "k_loss_fwd",
            "PPiiPPP",
            (ceiling(run.tokens, ROWS_PER_BLOCK),),
            (THREADS,),
            *(logits, targets, run.tokens, self.vocab, *outputs),
        )

    def backward(self, run: Run, operation: Loss) -> None:
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
