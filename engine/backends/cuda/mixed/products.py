"""Products of 16-bit (and E4M3) matrices by cuBLASLt, with fp32 sums; which algorithm serves is decided once and kept.

Different algorithms add in different orders, so the choice decides bits. It is made without a clock: what a bundle
says, else what was found fastest on this model of card (`chosen.json`, made by benchmarks/tune_products.py), else the
library's own first proposal. So two runs from scratch on one model of card and one library choose alike.
"""

import ctypes
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from engine.backends.cuda.errors import DeviceLost, DeviceUnavailable
from engine.backends.cuda.libraries import packaged_library
from engine.errors import StateMismatch

PACKAGE, LIBRARY = "nvidia-cublas", "libcublasLt.so.13"
CHOSEN = Path(__file__).with_name("chosen.json")
WORKSPACE = 32 << 20  # bytes; what NVIDIA recommends for Hopper

# cudaDataType_t
E4M3 = "float8_e4m3"
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14, E4M3: 28}
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, E4M3: 1}
COMPUTE_FP32 = 68
# cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t, cublasLtMatmulPreferenceAttributes_t
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS, AUX, AUX_STRIDE = 3, 4, 7, 8, 11, 12
A_SCALES, B_SCALES, A_SCALE_MODE, B_SCALE_MODE = 17, 18, 31, 32
SCALE_PER_LINE = 3  # CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
BATCHES, BATCH_STRIDE = 5, 6
LARGEST_WORKSPACE, REDUCTIONS = 1, 3
# Sums over parts of the depth go through the workspace in a fixed order, never in place.
REPEATABLE_REDUCTIONS = 2 | 4
EPILOGUES = {"none": 1, "bias": 4, "gelu_aux": 160, "gelu_aux_bias": 164}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix of `rows` lines, each `stride` elements from the next; `batch` elements between batches.

    scales: address of an fp32 factor for each line, which E4M3 numbers have.
    """

    address: int
    dtype: str
    stride: int
    batch: int = 0
    scales: int = 0


@dataclass(frozen=True)
class Shape:
    """What decides the choice of an algorithm. out [m, n] = a [m, k] * b [k, n]; `a_by_k`: a is stored as [k, m], and
    `b_by_n`: b is stored as [n, k]; `plus`: another matrix is added."""

    m: int
    n: int
    k: int
    a_by_k: bool
    b_by_n: bool
    strides: tuple[int, int, int]
    batches: int
    types: tuple[str, str]  # of a and b, and of out
    epilogue: str
    plus: bool = False

    @property
    def key(self) -> str:
        layout = ("t" if self.a_by_k else "n") + ("t" if self.b_by_n else "n")
        strides = "/".join(str(s) for s in self.strides)
        types = ">".join(self.types)
        form = f"{self.m}x{self.n}x{self.k} {layout} {strides} *{self.batches} {types} {self.epilogue}"
        return form + " plus" * self.plus


@dataclass(frozen=True)
class Described:
    """The library's handles of a product and its matrices."""

    product: Any
    a: Any
    b: Any
    out: Any


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(packaged_library(PACKAGE, LIBRARY))
    except OSError as error:
        raise DeviceUnavailable(
            f"tier prod needs NVIDIA's products {LIBRARY}, found none: {error}. "
            f"Install it with: pip install '{PACKAGE}>=13,<14'"
        ) from error


def library_version() -> int:
    function = _library().cublasLtGetVersion
    function.restype = ctypes.c_size_t
    return int(function())


def tuned(card: str) -> dict[str, str]:
    """Algorithms by shape that were measured on this model of card with this version of the library."""
    tables = json.loads(CHOSEN.read_text(encoding="utf-8"))
    return dict(tables.get(f"{card}, cublasLt {library_version()}", {}))


def _check(code: int, what: str) -> None:
    if code:
        raise DeviceLost(f"cuBLASLt failed with status {code} while {what}. What was saved before is whole")


class Products:
    """Queues products on streams. `choices` holds the algorithms in use by shape, as hexadecimal text."""

    def __init__(self, card: str, workspaces: dict[int, int]) -> None:
        """workspaces: an address of WORKSPACE bytes for each stream, so that products beside each other share none."""
        self._lt = _library()
        self._workspaces = workspaces
        self.card = card
        self.version = library_version()
        self.choices: dict[str, str] = {}
        self.recorded: dict[str, str] | None = None  # while not None: choices of the products that are queued
        self._tuned = tuned(card)
        self.pinned: dict[str, str] = {}
        self.ready: dict[Shape, tuple[Described, Algorithm]] = {}
        self._handle = ctypes.c_void_p()
        _check(self._lt.cublasLtCreate(ctypes.byref(self._handle)), "starting")
        self._preference = ctypes.c_void_p()
        _check(self._lt.cublasLtMatmulPreferenceCreate(ctypes.byref(self._preference)), "starting")
        self._prefer(LARGEST_WORKSPACE, ctypes.c_uint64(WORKSPACE))
        self._prefer(REDUCTIONS, ctypes.c_uint32(REPEATABLE_REDUCTIONS))
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def pin(self, choices: dict[str, str]) -> None:
        """Use these algorithms from now on."""
        self.pinned = dict(choices)
        self.ready.clear()
        self.choices.clear()

    def _prefer(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        code = self._lt.cublasLtMatmulPreferenceSetAttribute(
            self._preference, attribute, ctypes.byref(value), ctypes.c_size_t(size)
        )
        _check(code, "starting")

    def _layout(self, dtype: str, rows: int, columns: int, stride: int, batches: int, batch: int) -> Any:
        """The library counts by columns: a row-major matrix is its transpose there."""
        layout = ctypes.c_void_p()
        code = self._lt.cublasLtMatrixLayoutCreate(
            ctypes.byref(layout),
            TYPES[dtype],
            ctypes.c_uint64(columns),
            ctypes.c_uint64(rows),
            ctypes.c_int64(stride),
        )
        _check(code, "describing a matrix")
        if batches > 1:
            for attribute, value in ((BATCHES, ctypes.c_int32(batches)), (BATCH_STRIDE, ctypes.c_int64(batch))):
                code = self._lt.cublasLtMatrixLayoutSetAttribute(
                    layout, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                )
                _check(code, "describing a batch")
        return layout

    def _describe(self, description: Any, attribute: int, value: Any) -> None:
        code = self._lt.cublasLtMatmulDescSetAttribute(
            description, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )
        _check(code, "describing a product")

    def describe_product(
        self, shape: Shape, batch_strides: tuple[int, int, int], scales: tuple[int, int] = (0, 0)
    ) -> Described:
        """The library's description of a product. batch_strides: elements between batches of a, b and out; scales:
        addresses of those of a and b, without which it proposes nothing for E4M3 numbers."""
        description = ctypes.c_void_p()
        code = self._lt.cublasLtMatmulDescCreate(ctypes.byref(description), COMPUTE_FP32, TYPES["float32"])
        _check(code, "describing a product")
        # By columns out' [n, m] = b' * a': the library's first operand is our second.
        self._describe(description, TRANSPOSE_A, ctypes.c_int32(int(shape.b_by_n)))
        self._describe(description, TRANSPOSE_B, ctypes.c_int32(int(shape.a_by_k)))
        self._describe(description, EPILOGUE, ctypes.c_int32(EPILOGUES[shape.epilogue]))
        if shape.types[0] == E4M3:
            for mode in (A_SCALE_MODE, B_SCALE_MODE):
                self._describe(description, mode, ctypes.c_int32(SCALE_PER_LINE))
            self._place_scales(description, scales)
        if "gelu" in shape.epilogue:
            self._describe(description, AUX_STRIDE, ctypes.c_int64(shape.strides[2]))
        m, n, k = shape.m, shape.n, shape.k
        a_rows, a_columns = (k, m) if shape.a_by_k else (m, k)
        b_rows, b_columns = (n, k) if shape.b_by_n else (k, n)
        narrow, out = shape.types
        return Described(
            description,
            self._layout(narrow, a_rows, a_columns, shape.strides[0], shape.batches, batch_strides[0]),
            self._layout(narrow, b_rows, b_columns, shape.strides[1], shape.batches, batch_strides[1]),
            self._layout(out, m, n, shape.strides[2], shape.batches, batch_strides[2]),
        )

    def _place_scales(self, description: Any, scales: tuple[int, int]) -> None:
        self._describe(description, A_SCALES, ctypes.c_void_p(scales[1]))
        self._describe(description, B_SCALES, ctypes.c_void_p(scales[0]))

    def proposals(self, product: Described, count: int) -> list[Algorithm]:
        """What the library proposes, best first by its own estimate; at most 8 whatever `count` is."""
        found = (_Proposal * count)()
        returned = ctypes.c_int()
        layouts = (product.b, product.a, product.out, product.out)
        code = self._lt.cublasLtMatmulAlgoGetHeuristic(
            self._handle, product.product, *layouts, self._preference, count, found, ctypes.byref(returned)
        )
        _check(code, "looking for an algorithm")
        return [p.algorithm for p in found[: returned.value] if p.state == 0]

    def _choose(self, shape: Shape, batch_strides: tuple[int, int, int], scales: tuple[int, int]) -> Algorithm:
        text = self.pinned.get(shape.key) or self._tuned.get(shape.key)
        if text:
            try:
                algorithm = Algorithm.from_buffer_copy(bytes.fromhex(text))
            except ValueError as error:
                raise StateMismatch(f"the algorithm kept for the product {shape.key} is not 64 bytes") from error
        else:
            proposals = self.proposals(self.describe_product(shape, batch_strides, scales), 1)
            if not proposals:
                raise DeviceUnavailable(f"cuBLASLt has no algorithm for the product {shape.key}")
            algorithm = proposals[0]
        self.choices[shape.key] = bytes(algorithm).hex()
        return algorithm

    def multiply(
        self,
        stream: int,
        sizes: tuple[int, int, int],
        a: Matrix,
        b: Matrix,
        out: Matrix,
        *,
        a_by_k: bool = False,
        b_by_n: bool = False,
        batches: int = 1,
        epilogue: str = "none",
        bias: int = 0,
        aux: int = 0,
        add: bool = False,
        plus: int = 0,
        usual: tuple[int, int] | None = None,
    ) -> None:
        """out [m, n] = a * b, or += where `add`; see Shape for the forms. Sums are fp32, rounded once.

        plus: address of a matrix laid out as out, that is added where it is not 0. bias: address of [n], added to
        every row. aux: address of [m, n], where `gelu_aux...` leaves what GELU (tanh form) was taken of. usual: m and
        batches that the algorithm is chosen for, where this call's may be others: taking fewer rows or batches at once
        then moves no bit.
        """
        strides = (a.stride, b.stride, out.stride)
        shape = Shape(*sizes, a_by_k, b_by_n, strides, batches, (a.dtype, out.dtype), epilogue, bool(plus))
        chosen_for = replace(shape, m=usual[0], batches=usual[1]) if usual else shape
        if shape not in self.ready:
            batch_strides, scales = (a.batch, b.batch, out.batch), (a.scales, b.scales)
            algorithm = self._choose(chosen_for, batch_strides, scales)
            self.ready[shape] = self.describe_product(shape, batch_strides, scales), algorithm
        product, algorithm = self.ready[shape]
        if self.recorded is not None:
            self.recorded[chosen_for.key] = self.choices[chosen_for.key]
        if bias:
            self._describe(product.product, BIAS, ctypes.c_void_p(bias))
        if aux:
            self._describe(product.product, AUX, ctypes.c_void_p(aux))
        if a.scales:
            self._place_scales(product.product, (a.scales, b.scales))
        code = self._lt.cublasLtMatmul(
            self._handle,
            product.product,
            ctypes.byref(self._one),
            ctypes.c_void_p(b.address),
            product.b,
            ctypes.c_void_p(a.address),
            product.a,
            ctypes.byref(self._one if add or plus else self._zero),
            ctypes.c_void_p(plus or out.address),
            product.out,
            ctypes.c_void_p(out.address),
            product.out,
            ctypes.byref(algorithm),
            ctypes.c_void_p(self._workspaces[stream]),
            ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(stream),
        )
        _check(code, f"multiplying {shape.key}")
