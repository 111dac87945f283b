"""A card made of host memory: kernels run in the emulator, the libraries' products and attention in NumPy.

So the whole backend of the tier prod runs without a GPU: which kernel gets which address, what lives when, what a
bundle keeps. It cannot show what only the libraries and the card do: their algorithms, streams and captured graphs.
"""

import ctypes
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends.cuda.layout import VALUES
from engine.backends.cuda.mixed.flash import OWN_KERNELS, Heads, Places
from engine.backends.cuda.mixed.hopper_activation import SUM_ROWS
from engine.backends.cuda.mixed.hopper_attention import numbers_bytes
from engine.backends.cuda.mixed.hopper_norm import Norm, Product
from engine.backends.cuda.mixed.products import E4M3, SIZES, Matrix, Products, Shape
from engine.backends.cuda.mixed.squares import add_squares
from engine.backends.cuda.mixed.weight_gradients import Gradient, Taken
from engine.backends.cuda.sources import Unit
from tests.cuda.attention_reference import attention, dropped, kept_pairs
from tests.cuda.emulation import Emulated

Array = npt.NDArray[Any]
# Structures that kernels take by value, by how launches spell them, and single arguments.
ARGUMENTS = re.compile(r"IIf|fffff|.")
UNITS: dict[tuple[str, tuple[tuple[str, int], ...]], Emulated] = {}


def emulated(unit: Unit) -> Emulated:
    """A unit's kernels, compiled once in a process."""
    key = (unit.name, tuple(sorted(unit.macros.items())))
    if key not in UNITS:
        UNITS[key] = Emulated(unit.name, unit.macros, Path(tempfile.mkdtemp(prefix="emulated")))
    return UNITS[key]


def memory(address: int, dtype: Any, count: int) -> Array:
    """A view of raw memory."""
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


class Allocation:
    def __init__(self, size: int) -> None:
        self._memory = np.empty(size + 256, np.uint8)
        self._memory.view(np.uint8)[:] = 0xA5  # nothing may count on zeros
        self._address = -(-self._memory.ctypes.data // 256) * 256

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        self._memory = np.empty(0, np.uint8)


def _copy(to: int, source: int, size: int) -> None:
    ctypes.memmove(to, source, size)


class Driver:
    """What of PyCUDA's driver the backend asks for."""

    Error = type("Error", (Exception,), {})
    MemoryError = type("MemoryError", (Error,), {})

    @staticmethod
    def mem_alloc(size: int) -> Allocation:
        return Allocation(size)

    @staticmethod
    def pagelocked_empty(shape: Any, dtype: Any) -> Array:
        return np.empty(shape, dtype)

    @staticmethod
    def memcpy_htod(to: int, array: Array) -> None:
        _copy(to, array.ctypes.data, array.nbytes)

    @staticmethod
    def memcpy_dtoh(array: Array, source: int) -> None:
        _copy(array.ctypes.data, source, array.nbytes)

    @classmethod
    def memcpy_htod_async(cls, to: int, array: Array, stream: Any) -> None:
        cls.memcpy_htod(to, array)

    @classmethod
    def memcpy_dtoh_async(cls, array: Array, source: int, stream: Any) -> None:
        cls.memcpy_dtoh(array, source)


class Card:
    name, capability, processors, shared_limit = "a card made of host memory", 90, 4, 1 << 16
    driver = Driver

    def free_memory(self) -> int:
        return 1 << 40


MAIN, SIDE = 1, 2  # streams


class Beside:
    """What the side stream has been given. It runs at once, or if `late` when the main stream waits for it: both are
    orders that a card may choose."""

    def __init__(self) -> None:
        self.late = False
        self.queue: list[Callable[[], None]] = []

    def __call__(self, stream: int, call: Callable[[], None]) -> None:
        if stream == SIDE and self.late:
            self.queue.append(call)
        else:
            call()

    def wait(self, count: int | None = None) -> None:
        """For all, or for the first `count` calls that are still to come."""
        now, self.queue = self.queue[:count], self.queue[len(self.queue[:count]) :]
        for call in now:
            call()


SIDE_WORK = Beside()


class Launcher:
    """Runs what is queued at once, or on the side stream as SIDE_WORK says."""

    def __init__(self, card: Card) -> None:
        self.card, self.current, self.streams = card, MAIN, (MAIN, SIDE)
        self.stream = SimpleNamespace(handle=MAIN)
        self.step = self._read = 0
        self._ended: list[tuple[int, int]] = []  # step and length of the queue at the end of what was queued together

    def __call__(
        self,
        unit: Unit,
        name: str,
        arguments: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *values: Any,
        shared: int = 0,
    ) -> None:
        remaining = list(values)
        packed = []
        for kind in ARGUMENTS.findall(arguments):
            taken = [remaining.pop(0) for _ in kind]
            packed.append(ctypes.create_string_buffer(struct.pack(kind, *taken)))
        assert not remaining, f"{name}: {len(remaining)} arguments more than {arguments} names"
        SIDE_WORK(self.current, lambda: emulated(unit)(name, grid, block, *packed))

    def fill(self, address: int, byte: int, size: int) -> None:
        SIDE_WORK(self.current, lambda: ctypes.memset(address, byte, size))

    @contextmanager
    def beside(self, reads_lasting: bool = False) -> Iterator[None]:
        self.current = SIDE
        yield
        self.current = MAIN
        self._ended.append((self.step, len(SIDE_WORK.queue)))
        if not reads_lasting:
            self._read = len(SIDE_WORK.queue)

    def _wait(self, count: int) -> None:
        SIDE_WORK.wait(count)
        self._ended = [(step, end - count) for step, end in self._ended if end > count]
        self._read = max(self._read - count, 0)

    def join_reads(self) -> None:
        self._wait(self._read)

    def join(self, before: int | None = None) -> None:
        self._wait(max((end for step, end in self._ended if before is None or step < before), default=0))

    def synchronise(self) -> None: ...

    def close(self) -> None: ...


class Graph:
    def __init__(self, stream: Any, record: Callable[[], None]) -> None:
        self.launch = record

    def close(self) -> None: ...


def of_e4m3(codes: Array) -> Array:
    """Sign, four bits of exponent with bias 7, three of mantissa; all ones are NaN (there is no infinity)."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -size, size))


def wide(words: Array, dtype: str) -> Array:
    if dtype == E4M3:
        return of_e4m3(words)
    if dtype == "float32":
        return words.astype(np.float64)
    if dtype == "float16":
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def narrow(x: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
        if dtype == "float32":
            return x
        if dtype == "float16":
            return x.astype(np.float16).view(np.uint16)
    words = x.view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(x), 0x7FFF, (words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def lines(address: int, rows: int, columns: int, stride: int, dtype: str) -> Array:
    """A view of a matrix in memory, as its encodings."""
    kind = {4: np.float32, 2: np.uint16, 1: np.uint8}[SIZES[dtype]]
    whole = memory(address, kind, (rows - 1) * stride + columns)
    return np.lib.stride_tricks.as_strided(whole, (rows, columns), (stride * whole.itemsize, whole.itemsize))


class FakeProducts(Products):
    """Products in float64; the algorithm is a name made of the shape that it is chosen for."""

    version = 130100

    def __init__(self, card: str, workspaces: dict[int, int]) -> None:
        self.choices: dict[str, str] = {}
        self.recorded: dict[str, str] | None = None
        self.pinned: dict[str, str] = {}
        self.ready: dict[Any, Any] = {}

    def multiply(self, stream: int, *arguments: Any, **options: Any) -> None:
        SIDE_WORK(stream, lambda: self._multiply(*arguments, **options))

    @np.errstate(all="ignore")
    def _multiply(
        self, sizes: tuple[int, int, int], a: Matrix, b: Matrix, out: Matrix, *, a_by_k: bool = False,
        b_by_n: bool = False, batches: int = 1, epilogue: str = "none", bias: int = 0, aux: int = 0, add: bool = False,
        plus: int = 0, usual: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        m, n, k = sizes
        usual_m, usual_batches = usual or (m, batches)
        strides, types = (a.stride, b.stride, out.stride), (a.dtype, out.dtype)
        shape = Shape(usual_m, n, k, a_by_k, b_by_n, strides, usual_batches, types, epilogue, bool(plus))
        if self.recorded is not None:
            self.recorded[shape.key] = self.pinned.get(shape.key) or 64 * "00"
        for batch in range(batches):
            x, y, z = (
                lines(o.address + batch * o.batch * SIZES[o.dtype], *size, o.stride, o.dtype)
                for o, size in ((a, (k, m) if a_by_k else (m, k)), (b, (n, k) if b_by_n else (k, n)), (out, (m, n)))
            )
            left, right = wide(x, a.dtype), wide(y, b.dtype)
            # Row by row, so that how many rows are taken at once moves no bit, as in a library's tile.
            if a.scales:
                left *= memory(a.scales, np.float32, m)[:, None]
                right *= memory(b.scales, np.float32, n)[:, None]
            left = left.T if a_by_k else left
            right = right.T if b_by_n else right
            result = np.stack([row @ right for row in np.ascontiguousarray(left)])
            if "bias" in epilogue:
                result = result + wide(memory(bias, np.uint16, n), out.dtype)
            if "gelu_aux" in epilogue:
                before = lines(aux, m, n, out.stride, out.dtype)
                before[:] = narrow(result, out.dtype)
                x = wide(np.ascontiguousarray(before), out.dtype)
                result = 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            added = lines(plus, m, n, out.stride, out.dtype) if plus else z
            z[:] = narrow(result + (wide(np.ascontiguousarray(added), out.dtype) if add or plus else 0), out.dtype)


class FakeWeightGradients:
    """In the place of our own kernel: products of shards in float64, added one after another in fp32 within a chain.
    Squares are added up by k_gradient_squares."""

    def __init__(self, launch: Launcher) -> None:
        self.launch = launch

    def __call__(self, gradients: Sequence[Gradient], taken: Taken) -> None:
        length = taken.chain(gradients)
        for gradient in gradients:
            SIDE_WORK(self.launch.current, partial(self._compute, gradient, taken, length))
            if gradient.squares:
                assert length == taken.usual, "only where there is one chain"
                shape = (gradient.rows, gradient.columns)
                unit = Unit("optimizer_mixed", {"HALF_BF16": int(gradient.x.dtype == "bfloat16")})
                add_squares(self.launch, unit, gradient.out, shape, gradient.squares)

    @np.errstate(all="ignore")
    def _compute(self, gradient: Gradient, taken: Taken, length: int) -> None:
        tokens, result = taken.tokens, memory(gradient.out, np.float32, gradient.rows * gradient.columns)
        result = result.reshape(gradient.rows, gradient.columns)
        goes_on = taken.adds and taken.shards < length
        sums: list[Array] = [result.copy()] if goes_on else []
        for shard in range(taken.shards):
            left, right = (
                wide(
                    np.ascontiguousarray(
                        lines(m.address + 2 * shard * tokens * m.stride, tokens, n, m.stride, m.dtype)
                    ),
                    m.dtype,
                )
                for m, n in ((gradient.dy, gradient.rows), (gradient.x, gradient.columns))
            )
            product = (left.T @ right).astype(np.float32)
            if shard % length == 0 and not goes_on:
                sums.append(product)
            else:
                sums[-1] = sums[-1] + product
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        result[:] = result + sums[0] if taken.adds and not goes_on else sums[0]


class FakeFlash:
    """Attention in float64, row by row of the batch, in cuDNN's place."""

    name = f"cuDNN 91900, {OWN_KERNELS}"

    def __init__(self, stream: int, precision: str) -> None:
        self.dtype = "float16" if precision == "fp16" else "bfloat16"

    def _backward_work(self, heads: Heads, rows: int) -> int:
        return heads.backward_workspace(rows)

    def _kept(self, heads: Heads, rows: int, places: Places) -> Iterator[Array | float]:
        """For each row what weights [heads, T, T] are multiplied by: numbers drawn by the place in a call."""
        rng = np.random.default_rng(int(memory(places.seed, np.int64, 1)[0]))
        for _ in range(rows):
            yield (rng.random((heads.heads, heads.context, heads.context)) >= heads.dropout) / (1 - heads.dropout)

    def _parts(self, heads: Heads, rows: int, places: Places) -> Iterator[tuple[int, list[Array], Array | float]]:
        t, d = heads.context, heads.d_model
        kept = self._kept(heads, rows, places) if heads.dropout else iter([1.0] * rows)
        for row in range(rows):
            qkv = wide(memory(places.qkv + 6 * t * d * row, np.uint16, 3 * t * d), self.dtype)
            parts = np.split(qkv.reshape(t, 3 * d), 3, 1)
            yield row, [x.reshape(t, heads.heads, heads.width).swapaxes(0, 1) for x in parts], next(kept)

    @np.errstate(all="ignore")  # an overflow is what some tests want, and the card does not warn of it
    def forward(self, heads: Heads, rows: int, places: Places) -> None:
        t, d, h = heads.context, heads.d_model, heads.heads
        for row, (q, k, v), kept in self._parts(heads, rows, places):
            y, stats, *_ = attention(q, k, v, v, kept)
            narrowed = narrow(y.swapaxes(0, 1), self.dtype)
            memory(places.y + 2 * t * d * row, np.uint16, t * d)[:] = narrowed.reshape(-1)
            memory(places.stats + 4 * h * t * row, np.float32, h * t)[:] = stats.reshape(-1)

    @np.errstate(all="ignore")
    def backward(self, heads: Heads, rows: int, places: Places) -> None:
        t, d = heads.context, heads.d_model
        memory(places.workspace, np.uint8, self._backward_work(heads, rows))[:] = 0xA5
        for row, (q, k, v), kept in self._parts(heads, rows, places):
            dy = wide(memory(places.dy + 2 * t * d * row, np.uint16, t * d), self.dtype)
            *_, dq, dk, dv = attention(q, k, v, dy.reshape(t, heads.heads, heads.width).swapaxes(0, 1), kept)
            dqkv = np.concatenate([x.swapaxes(0, 1).reshape(t, d) for x in (dq, dk, dv)], 1)
            memory(places.dqkv + 6 * t * d * row, np.uint16, 3 * t * d)[:] = narrow(dqkv, self.dtype).reshape(-1)


class FakeHopperAttention(FakeFlash):
    """The same in the place of our own kernels."""

    name = OWN_KERNELS

    def __init__(self, launch: Launcher, dtype: str) -> None:
        self.dtype = dtype

    def _backward_work(self, heads: Heads, rows: int) -> int:
        return numbers_bytes(heads, rows)

    def _kept(self, heads: Heads, rows: int, places: Places) -> Iterator[Array | float]:
        site, threshold, factor = places.mask
        (values,) = memory(places.values, VALUES, 1)
        key = (int(values["key"][0]), int(values["key"][1]))
        for row in range(places.first_row, places.first_row + rows):
            numbers = range(row * heads.heads, (row + 1) * heads.heads)
            yield factor * np.stack(
                [kept_pairs(key, int(values["step"]), site, threshold, n, heads.context) for n in numbers]
            )


class FakeHopperActivation:
    """In float64; sums of blocks as the kernel leaves them."""

    def __init__(self, launch: Launcher, dtype: str) -> None:
        self.dtype = dtype

    @np.errstate(all="ignore")
    def forward(
        self, sizes: tuple[int, int, int], x: int, weight: int, bias: int, before: int, after: int, relu: bool
    ) -> None:
        tokens, width, hidden = sizes
        left, right = (
            wide(np.ascontiguousarray(lines(address, n, width, width, self.dtype)), self.dtype)
            for address, n in ((x, tokens), (weight, hidden))
        )
        added = wide(memory(bias, np.uint16, hidden), self.dtype) if bias else 0
        taken_of = narrow(np.stack([row @ right.T for row in left]) + added, self.dtype)
        z = wide(taken_of, self.dtype)
        gelu = 0.5 * z * (1 + np.tanh(sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        lines(before, tokens, hidden, hidden, self.dtype)[:] = taken_of
        lines(after, tokens, hidden, hidden, self.dtype)[:] = narrow(np.maximum(z, 0) if relu else gelu, self.dtype)

    @np.errstate(all="ignore")
    def backward(
        self, sizes: tuple[int, int, int], dy: int, weight: int, before: int, dbefore: int, relu: bool, parts: int
    ) -> None:
        tokens, width, hidden = sizes
        left, right, x = (
            wide(np.ascontiguousarray(lines(address, *shape, shape[1], self.dtype)), self.dtype)
            for address, shape in ((dy, (tokens, width)), (weight, (width, hidden)), (before, (tokens, hidden)))
        )
        t = np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        slope = (1 + t) / 2 + x / 2 * (1 - t * t) * sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)
        result = np.stack([row @ right for row in left]) * ((x > 0) if relu else slope)
        lines(dbefore, tokens, hidden, hidden, self.dtype)[:] = narrow(result, self.dtype)
        if parts:
            sums = np.stack([block.sum(0) for block in result.reshape(-1, SUM_ROWS, hidden)])
            memory(parts, np.float32, sums.size)[:] = sums.reshape(-1)


class FakeHopperNorm:
    """In float64, but for what is narrowed on the way."""

    def __init__(self, launch: Launcher, dtype: str) -> None:
        self.dtype = dtype

    def _halves(self, address: int, rows: int, columns: int) -> Array:
        return wide(np.ascontiguousarray(lines(address, rows, columns, columns, self.dtype)), self.dtype)

    @np.errstate(all="ignore")
    def __call__(self, sizes: tuple[int, int], product: Product, norm: Norm) -> None:
        (tokens, width), (first, site, threshold, factor, at) = sizes, norm.dropout
        left, right = (self._halves(a, n, product.depth) for a, n in ((product.left, tokens), (product.weight, width)))
        branch = wide(narrow(np.stack([row @ right.T for row in left]), self.dtype), self.dtype)
        gain, bias, added = (
            memory(a, np.float32, width) if a else None for a in (norm.gain, norm.bias, norm.branch_bias)
        )
        branch = branch + (0 if added is None else added)
        if threshold:
            (values,) = memory(at, VALUES, 1)
            key = (int(values["key"][0]), int(values["key"][1]))
            branch = dropped(branch, (site, threshold, factor), key, int(values["step"]), first)
        lines(norm.sum, tokens, width, width, self.dtype)[:] = narrow(self._halves(norm.x, *sizes) + branch, self.dtype)
        total = self._halves(norm.sum, *sizes)
        means, rstds = total.mean(1), 1 / np.sqrt(total.var(1) + 1e-5)
        memory(norm.mean, np.float32, tokens)[:], memory(norm.rstd, np.float32, tokens)[:] = means, rstds
        normalised = (total - means[:, None]) * rstds[:, None]
        if gain is not None:
            normalised = normalised * gain + bias
        lines(norm.y, tokens, width, width, self.dtype)[:] = narrow(normalised, self.dtype)


def install(monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> None:
    """Let device cuda be this card."""
    backends = "engine.backends.cuda"
    monkeypatch.setattr(Card, "capability", capability)
    monkeypatch.setattr(f"{backends}.card.Card", Card)  # for those that import it when they need it
    monkeypatch.setattr(f"{backends}.opening.Card", Card)
    monkeypatch.setattr(f"{backends}.backend.Launcher", Launcher)
    monkeypatch.setattr(f"{backends}.backend.Graph", Graph)
    monkeypatch.setattr(f"{backends}.mixed.backend.Products", FakeProducts)
    monkeypatch.setattr(f"{backends}.mixed.backend.WeightGradients", FakeWeightGradients)
    monkeypatch.setattr(f"{backends}.mixed.backend.Flash", FakeFlash)
    monkeypatch.setattr(f"{backends}.mixed.backend.HopperAttention", FakeHopperAttention)
    monkeypatch.setattr(f"{backends}.mixed.backend.HopperActivation", FakeHopperActivation)
    monkeypatch.setattr(f"{backends}.mixed.backend.HopperNorm", FakeHopperNorm)
