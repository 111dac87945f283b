"""The precision fp8: forward products of the blocks' linear layers on E4M3 numbers. An experiment.

Micikevicius et al. 2022 (FP8 formats for deep learning). Every token of the left operand and every row of the weight
has an fp32 scale of its own, its largest magnitude over 448, so that how many tokens are taken at once moves no bit.
Everything else is as in bf16: what is stored, the way back, attention, the head.
"""

from dataclasses import dataclass

from engine.backends.cuda.mixed.products import E4M3, Matrix
from engine.backends.cuda.mixed.run import MixedRun
from engine.backends.cuda.run import THREADS, ceiling
from engine.operations.base import BufferType, Operation

ROWS_OF_A_BLOCK = THREADS // 32


def quantise_rows(run: MixedRun, x: int, rows: int, width: int, out: int, scales: int) -> None:
    """x [rows, width] of 16 bits to out [rows, width] uint8 and scales [rows] fp32."""
    grid = (ceiling(rows, ROWS_OF_A_BLOCK),)
    run.launch(run.unit("linear_fp8"), "k_rows_to_e4m3", "PiiPP", grid, (THREADS,), x, rows, width, out, scales)


@dataclass(frozen=True)
class EightBitProduct:
    """out [tokens, wide] = x [tokens, deep] times the weight [wide, deep] transposed, plus the bias.

    weight, bias: names of parameters. role: tells the products of one operation apart.
    """

    role: str
    weight: str
    bias: str | None
    wide: int
    deep: int

    def derived(self) -> dict[str, BufferType]:
        return self._operand("weight", self.wide)

    def forward_work(self, tokens: int) -> dict[str, BufferType]:
        return self._operand("x", tokens)

    def _operand(self, name: str, rows: int) -> dict[str, BufferType]:
        return {
            f"{self.role}_{name}8": BufferType((rows, self.deep), "uint8"),
            f"{self.role}_{name}8_scales": BufferType((rows,), "float32"),
        }

    def prepare(self, run: MixedRun, operation: Operation) -> None:
        out, scales = (run.derived(operation, role) for role in self.derived())
        quantise_rows(run, run.weight16(self.weight), self.wide, self.deep, out, scales)

    def forward(self, run: MixedRun, operation: Operation, x: int, out: int) -> None:
        weight, weight_scales = (run.derived(operation, role) for role in self.derived())
        rows, scales = (run.work(operation, role) for role in self.forward_work(run.tokens))
        quantise_rows(run, x, run.tokens, self.deep, rows, scales)
        run.multiply(
            (run.tokens, self.wide, self.deep),
            Matrix(rows, E4M3, self.deep, scales=scales),
            Matrix(weight, E4M3, self.deep, scales=weight_scales),
            run.narrow(out, self.wide),
            b_by_n=True,
            epilogue="bias" if self.bias else "none",
            bias=run.weight16(self.bias) if self.bias else 0,
        )
