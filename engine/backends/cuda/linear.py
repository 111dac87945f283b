"""Linear layers on the card: operands quantised to int8 planes once, products on integer tensor cores."""

from engine.backends.cuda.neighbours import STEP, Neighbours, planes
from engine.backends.cuda.products import Epilogue, debug_product, linear_unit, multiply
from engine.backends.cuda.quantising import (
    Columns,
    Operand,
    Source,
    planes_of_tensor,
    quantise_columns,
    quantise_rows,
    row_work,
)
from engine.backends.cuda.run import THREADS, MaskArguments, Run, ceiling, join_shards, padded
from engine.backends.cuda.twin import Twin
from engine.operations.activation import Activation
from engine.operations.base import BufferType, Sizes
from engine.operations.linear import Linear
from engine.operations.loss import Loss
from engine.operations.residual_add import ResidualAdd


class LinearTwin(Twin[Linear]):
    joins_reads = True  # a gradient that the linear layer before reads is added to after this one

    def __init__(self, neighbours: Neighbours, tied: bool) -> None:
        self.before = neighbours.before
        self.after = neighbours.after
        self.tied = tied  # whether the embedding adds to the gradient of the same weight

    def derived(self, operation: Linear, tier: str) -> dict[str, BufferType]:
        if tier == "debug":
            return {}
        return {
            "rows": planes(operation.wide, operation.deep),
            "row_exponents": BufferType((operation.wide,), "int32"),
            "columns": planes(operation.deep, operation.wide),
            "column_exponents": BufferType((operation.deep,), "int32"),
        }

    def zeroed(self, operation: Linear, tier: str, shards: int) -> dict[str, BufferType]:
        if tier == "debug":
            return {}
        return {
            "weight_tops": BufferType((operation.deep,), "int32"),
            "x_tops": BufferType((shards, operation.deep), "int32"),
            "dy_tops": BufferType((shards, operation.wide), "int32"),
            "dy_totals": BufferType((shards, operation.wide), "int64"),
        }

    def forward_work(self, operation: Linear, sizes: Sizes, tier: str) -> dict[str, BufferType]:
        if tier == "debug" or self.before:
            return {}
        return row_work(sizes.batch * sizes.context, operation.deep)

    def backward_work(self, operation: Linear, sizes: Sizes, tier: str, shards: int) -> dict[str, BufferType]:
        tokens = sizes.batch * sizes.context
        wide, deep = operation.wide, operation.deep
        # Gradients of the weight by shard, until they are joined.
        partials = {} if self.tied else {"partials": BufferType((shards, wide, deep), "float32")}
        if tier == "debug":
            return partials | {"bias_partials": BufferType((shards, wide), "float32")}
        rows = {} if isinstance(self.after, Activation | Loss) else row_work(tokens, wide)
        return rows | partials | {
            "dy": planes(wide, tokens // shards, shards),
            "dy_exponents": BufferType((shards, wide), "int32"),
            "x": planes(deep, tokens // shards, shards),
            "x_exponents": BufferType((shards, deep), "int32"),
        }  # fmt: skip

    def _weight_rows(self, run: Run, operation: Linear) -> Operand:
        places = (run.derived(operation, "rows"), run.derived(operation, "row_exponents"))
        return Operand(*places, operation.wide, operation.deep)

    def _weight_columns(self, run: Run, operation: Linear) -> Operand:
        places = (run.derived(operation, "columns"), run.derived(operation, "column_exponents"))
        return Operand(*places, operation.deep, operation.wide)

    def forward(self, run: Run, operation: Linear) -> None:
        x, y = run.tensor(operation.inputs["x"]), run.tensor(operation.outputs["y"])
        bias = run.parameter(operation.parameters["bias"]) if "bias" in operation.parameters else 0
        if run.tier == "debug":
            weight, deep = run.parameter(operation.parameters["weight"]), operation.deep
            debug_product(run, (x, deep, 1), (weight, deep, 1), (run.tokens, operation.wide, deep), y, bias)
            return
        if self.before:
            rows = planes_of_tensor(x, run.tokens, operation.deep)
        else:
            rows = Operand(
                run.work(operation, "rows"), run.work(operation, "row_exponents"), run.tokens, operation.deep
            )
            # The backward pass quantises x by columns: their largest magnitudes are found on the way.
            quantise_rows(run, Source(x), rows, run.flag(operation), *column_tops_of(run, operation))
        epilogue = Epilogue(bias=bias)
        if isinstance(self.after, ResidualAdd):
            base, mask = masked(run, self.after, operation.wide)
            epilogue = Epilogue(bias, run.tensor(self.after.inputs["x"]), run.values, base, mask)
        multiply(run, rows, self._weight_rows(run, operation), y, epilogue)

    def _x(self, run: Run, operation: Linear) -> Source:
        """x as the backward pass reads it again."""
        before = self.before
        if before is None:
            return Source(run.tensor(operation.inputs["x"]))
        x = run.tensor(before.inputs["x"])
        if isinstance(before, Activation):
            return Source(x, before.function)
        statistics = [run.tensor(before.outputs[r]) for r in ("mean", "rstd")]
        parameters = [run.parameter(before.parameters[r]) if before.parameters else 0 for r in ("gain", "bias")]
        return Source(x, "normalised", (statistics[0], statistics[1], parameters[0], parameters[1]))

    def _dy(self, run: Run, operation: Linear) -> Source:
        if isinstance(self.after, Loss):
            return logits_gradient(run, self.after)
        if not isinstance(self.after, ResidualAdd):
            return Source(run.gradient(operation.outputs["y"]))
        dy, (base, mask) = run.gradient(self.after.outputs["y"]), masked(run, self.after, operation.wide)
        return Source(dy, "masked", values=run.values, base=base, mask=mask) if mask[1] else Source(dy)

    def backward(self, run: Run, operation: Linear) -> None:
        dx, add = run.gradient(operation.inputs["x"]), run.accumulates(operation, "x")
        if run.tier == "debug":
            self._backward_debug(run, operation, dx, add)
            return
        wide, deep, flag, shards = operation.wide, operation.deep, run.flag(operation), run.shards
        dy, dy_tops = self._dy(run, operation), run.zeroed(operation, "dy_tops")
        maker = self.after if isinstance(self.after, Activation | Loss) else operation
        rows = Operand(run.work(maker, "rows"), run.work(maker, "row_exponents"), run.tokens, wide)
        if maker is operation:
            quantise_rows(run, dy, rows, flag, dy_tops, shards)
        left, right = (
            Operand(
                run.work(operation, role),
                run.work(operation, f"{role}_exponents"),
                width,
                run.shard_tokens,
                2 * width * padded(run.shard_tokens, STEP),
            )
            for role, width in (("dy", wide), ("x", deep))
        )
        bias = operation.parameters.get("bias")
        totals = run.zeroed(operation, "dy_totals") if bias else 0
        x = Columns(self._x(run, operation), right, run.zeroed(operation, "x_tops"))
        made_rows = run.launch.mark()
        multiply(run, rows, self._weight_columns(run, operation), dx, Epilogue(add=add))
        # Nothing on the way back needs the weight's gradient: it is computed beside what follows, dx first.
        with run.launch.beside(after=made_rows, reads_lasting=True):
            quantise_columns(run, Columns(dy, left, dy_tops, totals), x, shards, flag)
            run.launch.reads_end()
            partials = self._partials(run, operation)
            multiply(run, left, right, partials, Epilogue(), shards=shards, out_stride=wide * deep)
            self._join(run, operation, partials)
            if bias:
                run.launch(
                    linear_unit(run),
                    "k_linear_bias_gradient",
                    "PPiiPi",
                    (ceiling(wide, THREADS),),
                    (THREADS,),
                    *(totals, left.exponents, wide, shards, run.parameter_gradient(bias), int(run.adds)),
                )

    def _partials(self, run: Run, operation: Linear) -> int:
        return run.token_gradients if self.tied else run.work(operation, "partials")

    def _join(self, run: Run, operation: Linear, partials: int) -> None:
        if not self.tied:  # else the embedding's backward pass does
            join_shards(run, partials, operation.wide * operation.deep, operation.parameters["weight"])

    def _backward_debug(self, run: Run, operation: Linear, dx: int, add: bool) -> None:
        x, dy = run.tensor(operation.inputs["x"]), run.gradient(operation.outputs["y"])
        weight = run.parameter(operation.parameters["weight"])
        wide, deep, tokens = operation.wide, operation.deep, run.shard_tokens
        debug_product(run, (dy, wide, 1), (weight, 1, deep), (run.tokens, deep, wide), dx, 0, add=add)
        shard, sizes, partials = (
            (tokens * wide, tokens * deep, wide * deep),
            (wide, deep, tokens),
            self._partials(run, operation),
        )
        debug_product(run, (dy, 1, wide), (x, 1, deep), sizes, partials, 0, shards=run.shards, shard=shard)
        self._join(run, operation, partials)
        if "bias" in operation.parameters:
            partials = run.work(operation, "bias_partials")
            run.launch(
                linear_unit(run),
                "k_debug_bias_gradient",
                "PiiP",
                (ceiling(wide, THREADS), run.shards),
                (THREADS,),
                *(dy, tokens, wide, partials),
            )
            join_shards(run, partials, wide, operation.parameters["bias"])


def logits_gradient(run: Run, loss: Loss) -> Source:
    """The gradient of the logits, from the logits."""
    maxima, sums = (run.tensor(loss.outputs[r]) for r in ("maxima", "sums"))
    logits, targets = (run.tensor(loss.inputs[r]) for r in ("logits", "targets"))
    return Source(logits, "logits", (maxima, sums, 0, 0), targets, mask=(0, 0, float(run.loss_scale)))


def column_tops_of(run: Run, operation: Linear) -> tuple[int, int]:
    """Where x's column maxima go, and the shards they are kept for: nowhere outside training."""
    return (run.zeroed(operation, "x_tops"), run.shards) if run.training else (0, 1)


def masked(run: Run, residual: ResidualAdd, width: int) -> tuple[int, MaskArguments]:
    """Address of this run's first element in the mask of a residual sum, and the mask."""
    return run.first_row * run.sizes.context * width, run.mask(residual.probability, residual.site)
