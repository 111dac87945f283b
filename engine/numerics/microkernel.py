"""The inner loop of the fixed-point product, as one LLVM intrinsic.

With `q = 256*hi + lo`, the wanted sum is `P/256 = sum(hi*q' + lo*hi')` (fixed_point.py). One 32-bit word holds the pair
(hi, lo) of an element of A, another the pair (q', hi') of an element of B, so one multiply-add over pairs of 16-bit
integers gives an element's whole contribution. Every x86-64 has that instruction (`pmaddwd`; with AVX-512 VNNI LLVM
fuses it with the addition); elsewhere the same pairs are multiplied in plain vector code. All are integer arithmetic,
so all give the same bits.
"""

from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic


def _vector_lanes() -> int:
    """32-bit lanes of the widest vector that the compile target is known to have."""
    if config.CPU_NAME:
        features = set((config.CPU_FEATURES or "").split(","))
        return 16 if "+avx512bw" in features else 8 if "+avx2" in features else 4
    features_of_host = binding.get_host_cpu_features()
    if features_of_host.get("avx512bw"):
        return 16
    return 8 if features_of_host.get("avx2") else 4


IS_X86 = binding.get_default_triple().split("-")[0] in ("x86_64", "amd64", "i686")
LANES = _vector_lanes()
TILE_COLUMNS = 32
MOST_TILE_ROWS = 8  # on any machine: scratch is as large as that wants it, so that every machine plans the same
TILE_ROWS = MOST_TILE_ROWS if LANES == 16 else 2
VECTORS = TILE_COLUMNS // LANES
# |hi*q' + lo*hi'| <= 127*32639 + 128*127, so 512 terms stay below 2**31.
DEPTH_LIMIT = 512

_X86_PAIR_PRODUCT = {
    16: "llvm.x86.avx512.pmaddw.d.512",
    8: "llvm.x86.avx2.pmadd.wd",
    4: "llvm.x86.sse2.pmadd.wd",
}


def _pair_product(builder: Any, a: Any, b: Any) -> Any:
    """Per 32-bit lane: product of the low halves plus product of the high halves, both signed."""
    wide = ir.VectorType(ir.IntType(32), LANES)
    if IS_X86:
        halves = ir.VectorType(ir.IntType(16), 2 * LANES)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(wide, [halves, halves]), _X86_PAIR_PRODUCT[LANES]
        )
        return builder.call(function, [builder.bitcast(a, halves), builder.bitcast(b, halves)])
    sixteen = ir.Constant(wide, [16] * LANES)

    def low(x: Any) -> Any:
        return builder.ashr(builder.shl(x, sixteen), sixteen)

    def high(x: Any) -> Any:
        return builder.ashr(x, sixteen)

    return builder.add(builder.mul(low(a), low(b)), builder.mul(high(a), high(b)))


@intrinsic  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any, a: Any, row_stride: Any, depth_stride: Any, b: Any, depth: Any, tile: Any
) -> Any:
    """tile[i, j] = sum over k < depth of pair products of a[i*row_stride + k*depth_stride] and b[k, j].

    a, b, tile: addresses of int32 data; b is [depth, TILE_COLUMNS] and tile [TILE_ROWS, TILE_COLUMNS], both contiguous.
    depth <= DEPTH_LIMIT keeps every sum inside int32.
    """
    signature = types.void(*[types.intp] * 6)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, row_stride, depth_stride, b, depth, tile = arguments
        i32, i64 = ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(i32, LANES)
        zero = ir.Constant(vector, [0] * LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        a, b, tile = (builder.inttoptr(x, i32.as_pointer()) for x in (a, b, tile))

        def vector_at(base: Any, offset: Any) -> Any:
            return builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())

        sums = [[cgutils.alloca_once(builder, vector) for _ in range(VECTORS)] for _ in range(TILE_ROWS)]
        for row in sums:
            for cell in row:
                builder.store(zero, cell)
        with cgutils.for_range(builder, depth) as loop:
            at_b = builder.mul(loop.index, i64(TILE_COLUMNS))
            columns = []
            for v in range(VECTORS):
                loaded = builder.load(vector_at(b, builder.add(at_b, i64(v * LANES))))
                loaded.align = 4
                columns.append(loaded)
            at_a = builder.mul(loop.index, depth_stride)
            for r in range(TILE_ROWS):
                scalar = builder.load(builder.gep(a, [builder.add(at_a, builder.mul(row_stride, i64(r)))]))
                spread = builder.shuffle_vector(builder.insert_element(undefined, scalar, i32(0)), undefined, zero)
                for v in range(VECTORS):
                    product = _pair_product(builder, spread, columns[v])
                    builder.store(builder.add(builder.load(sums[r][v]), product), sums[r][v])
        for r in range(TILE_ROWS):
            for v in range(VECTORS):
                stored = builder.store(builder.load(sums[r][v]), vector_at(tile, i64(r * TILE_COLUMNS + v * LANES)))
                stored.align = 4
        return context.get_dummy_value()

    return signature, generate
