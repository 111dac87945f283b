// The fixed-point product on Hopper's warpgroup instructions (compute capability 9.0 alone); included by linear.cu.
//
// One warp copies tiles with the bulk copy engine, two warpgroups multiply: each holds 64 x 128 results, as two sets of
// int32 sums. Blocks stay and take tile after tile, so that copies run ahead while results are written.
#pragma once
#include "epilogue.cuh"
#include "fixed_point.cuh"

#define HOPPER_ROWS 128
#define HOPPER_COLUMNS 128
#define HOPPER_STEP 128 // depth of a stage in bytes: the width of the copy engine's swizzle
#define HOPPER_STAGES 3
#define HOPPER_PLANE (128 * HOPPER_STEP)
#define HOPPER_STAGE (4 * HOPPER_PLANE)

struct __align__(64) TensorMap {
    uint64 words[16];
};

__device__ __forceinline__ void barrier_init(uint32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(uint32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier), "r"(parity) : "memory");
}

// Both planes of 128 rows, HOPPER_STEP bytes deep, to shared memory; rows outside the matrix become zeros.
__device__ __forceinline__ void copy_tile(uint32 to, const TensorMap *map, int depth, int row, int shard, uint32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
                     "r"(to), "l"(map), "r"(depth), "r"(row), "r"(0), "r"(shard), "r"(barrier) : "memory");
}

// Descriptor of rows of 128 bytes in shared memory, swizzled over 128 bytes, 1024 bytes from 8 rows to the next 8.
__device__ __forceinline__ uint64 matrix_descriptor(uint32 address) {
    return (uint64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// d[64 x 128] (+)= a[64 x 32] * b[32 x 128]; `add` 0 starts from zero. Asynchronous.
__device__ __forceinline__ void warpgroup_mma(int (&d)[64], uint64 a, uint64 b, int add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, add;\n"
                 "}"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]),
                   "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
                   "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]),
                   "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
                   "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]),
                   "+r"(d[30]), "+r"(d[31]), "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]),
                   "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]), "+r"(d[41]),
                   "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
                   "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]),
                   "+r"(d[54]), "+r"(d[55]), "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]),
                   "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
                 : "l"(a), "l"(b), "r"(add));
}

struct HopperProduct {
    const int *a_exponents, *b_exponents;
    float *out;
    int64 out_stride;
    int rows, columns, padded, shards;
    Epilogue epilogue;
};

// The tile of the result that is number `index`: the shorter side runs fastest, so that its operand stays in the cache.
__device__ __forceinline__ void tile_place(const HopperProduct &p, int index, int &m0, int &n0, int &shard) {
    int tiles_m = (p.rows + HOPPER_ROWS - 1) / HOPPER_ROWS, tiles_n = (p.columns + HOPPER_COLUMNS - 1) / HOPPER_COLUMNS;
    shard = index / (tiles_m * tiles_n);
    index -= shard * tiles_m * tiles_n;
    bool down = tiles_m <= tiles_n;
    m0 = (down ? index % tiles_m : index / tiles_n) * HOPPER_ROWS;
    n0 = (down ? index / tiles_m : index % tiles_n) * HOPPER_COLUMNS;
}

// Exponents of one operand are usual within these bounds, and those of a pair if their sum is within PAIR bounds: the
// scale may then be applied as two fp32 factors, and nothing but the conversion of the integer rounds.
#define LEAST_EXPONENT -60
#define MOST_EXPONENT 100
#define LEAST_PAIR -60
#define MOST_PAIR 134

// What a warpgroup knows of a tile's columns while it writes results: thread i of it looks after column i.
struct ColumnSide {
    float factors[HOPPER_COLUMNS], bias[HOPPER_COLUMNS];
    int least[4], most[4]; // exponents, by warp
};

// Loaded before the products of a tile are under way, needed after them.
struct TileNumbers {
    int s_column, s_row[2]; // exponents of the thread's column, and of rows `row` and `row` + 8
    float bias;
};

__device__ __forceinline__ TileNumbers tile_numbers(const HopperProduct &p, int row, int column, int shard) {
    const int *a_exponents = p.a_exponents + shard * p.rows, *b_exponents = p.b_exponents + shard * p.columns;
    TileNumbers t = {0, {0, 0}, 0.0f};
    if (column < p.columns) {
        t.s_column = b_exponents[column];
        if (p.epilogue.bias) t.bias = p.epilogue.bias[column];
    }
    if (row < p.rows) t.s_row[0] = a_exponents[row];
    if (row + 8 < p.rows) t.s_row[1] = a_exponents[row + 8];
    return t;
}

// Up to this depth (padded) high + middle/256 stays below 2**24: |high| <= 127*127, |middle| <= 2*127*128 for each step.
#define SHALLOW_DEPTH 1024

// fp32(256*high + middle), rounded once. A conversion of 64 bits takes eight times as long as one of 32.
template <bool SHALLOW> __device__ __forceinline__ float joined(int high, int middle) {
    if (SHALLOW) return __fmaf_rn((float)(high + (middle >> 8)), 256.0f, (float)(middle & 255));
    return (float)(((int64)high << 8) + middle);
}

// One of a thread's two rows, where exponents are usual. SUM: the result is added to what stands there, or to the residual.
template <bool RESIDUAL, bool SUM, bool SHALLOW>
__device__ __forceinline__ void write_half(const HopperProduct &p, const ColumnSide &side, int s, int half, bool present, int64 at,
                                           int n0, float *out, const int (&high)[64], const int (&middle)[64]) {
    const Epilogue &e = p.epilogue;
    int column = n0 + 2 * (threadIdx.x & 3);
    float row_factor = power_of_two32(4 - s);
    const float *other = RESIDUAL ? e.residual + at : out;
    float2 old[16]; // all loads are under way before the first is waited for
    if (SUM)
#pragma unroll
        for (int n = 0; n < 16; n++) {
            old[n] = make_float2(0.0f, 0.0f);
            if (present && column + 8 * n < p.columns) old[n] = *(const float2 *)(other + column + 8 * n);
        }
    PairWords words = {};
#pragma unroll
    for (int n = 0; n < 16; n++) {
        int c = column + 8 * n, i = 4 * n + 2 * half;
        float2 factor = *(const float2 *)&side.factors[c - n0], bias = *(const float2 *)&side.bias[c - n0], y;
        // Without a bias 0 is added, which changes nothing: no result is -0.
        y.x = (joined<SHALLOW>(high[i], middle[i]) * row_factor) * factor.x + bias.x;
        y.y = (joined<SHALLOW>(high[i + 1], middle[i + 1]) * row_factor) * factor.y + bias.y;
        if (RESIDUAL && e.mask.threshold) {
            if (n % 2 == 0) words = words_of_pairs(e, at + c);
            uint2 word = n % 2 ? words.second : words.first;
            y.x = dropped(y.x, word.x, e.mask.threshold, e.mask.factor);
            y.y = dropped(y.y, word.y, e.mask.threshold, e.mask.factor);
        }
        if (SUM) y.x = old[n].x + y.x, y.y = old[n].y + y.y;
        if (present && c < p.columns) *(float2 *)(out + c) = y;
    }
}

// Write (or add) a thread's results: rows `row` and `row` + 8 of the tile at column n0, columns 8n + 2t and the next of
// each, t = lane % 4. `group` 1 or 2 is the warpgroup.
template <bool RESIDUAL>
__device__ __forceinline__ void write_tile(const HopperProduct &p, ColumnSide &side, const TileNumbers &t, int group, int row,
                                           int n0, int shard, const int (&high)[64], const int (&middle)[64]) {
    int own = threadIdx.x % 128, lane = lane_of_thread(), column = n0 + 2 * (lane & 3);
    const Epilogue &e = p.epilogue;
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory"); // the tile before is written
    side.factors[own] = power_of_two32(4 - t.s_column), side.bias[own] = t.bias;
    int least = warp_min(t.s_column), most = warp_max(t.s_column);
    if (lane == 0) side.least[own / WARP] = least, side.most[own / WARP] = most;
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
    least = min(min(side.least[0], side.least[1]), min(side.least[2], side.least[3]));
    most = max(max(side.most[0], side.most[1]), max(side.most[2], side.most[3]));
    bool usual = p.columns % 2 == 0 && least >= LEAST_EXPONENT && most <= MOST_EXPONENT;
#pragma unroll
    for (int r = 0; r < 2; r++)
        usual = usual && t.s_row[r] >= LEAST_EXPONENT && t.s_row[r] <= MOST_EXPONENT && least + t.s_row[r] >= LEAST_PAIR &&
                most + t.s_row[r] <= MOST_PAIR;
    usual = __all_sync(ALL_LANES, usual);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bool present = row + 8 * half < p.rows;
        int64 at = (int64)(row + 8 * half) * p.columns;
        float *out = p.out + shard * p.out_stride + at;
        if (usual) {
            bool shallow = p.padded <= SHALLOW_DEPTH;
            if (RESIDUAL || e.add) {
                if (shallow) write_half<RESIDUAL, true, true>(p, side, t.s_row[half], half, present, at, n0, out, high, middle);
                else write_half<RESIDUAL, true, false>(p, side, t.s_row[half], half, present, at, n0, out, high, middle);
            } else {
                if (shallow) write_half<RESIDUAL, false, true>(p, side, t.s_row[half], half, present, at, n0, out, high, middle);
                else write_half<RESIDUAL, false, false>(p, side, t.s_row[half], half, present, at, n0, out, high, middle);
            }
        } else if (present) {
            const int *b_exponents = p.b_exponents + shard * p.columns;
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int c = column + 8 * n + j, i = 4 * n + 2 * half + j;
                    if (c >= p.columns) continue;
                    int64 v = ((int64)high[i] << 8) + middle[i];
                    finish<RESIDUAL>(e, scaled_float(v, 8 - t.s_row[half] - b_exponents[c]), at + c, c, out + c);
                }
        }
    }
}

template <bool RESIDUAL>
__device__ __forceinline__ void hopper_product(const TensorMap *a_map, const TensorMap *b_map, const HopperProduct &p) {
    extern __shared__ __align__(1024) int8 hopper_memory[];
    __shared__ uint64 barriers[2 * HOPPER_STAGES];
    __shared__ ColumnSide sides[2];
    uint32 memory = (shared_address(hopper_memory) + 1023) & ~1023u;
    uint32 full = shared_address(barriers), empty = full + 8 * HOPPER_STAGES;
    int tiles = ((p.rows + HOPPER_ROWS - 1) / HOPPER_ROWS) * ((p.columns + HOPPER_COLUMNS - 1) / HOPPER_COLUMNS) * p.shards;
    int steps = p.padded / HOPPER_STEP, group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int s = 0; s < HOPPER_STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 8); // a warp of either group arrives when its part is read
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 0) return;
        int stage = 0;
        uint32 parity = 1; // the first pass over the stages finds them empty
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            int m0, n0, shard;
            tile_place(p, tile, m0, n0, shard);
            for (int step = 0; step < steps; step++) {
                barrier_wait(empty + 8 * stage, parity);
                barrier_expect(full + 8 * stage, HOPPER_STAGE);
                uint32 to = memory + stage * HOPPER_STAGE;
                copy_tile(to, a_map, step * HOPPER_STEP, m0, shard, full + 8 * stage);
                copy_tile(to + 2 * HOPPER_PLANE, b_map, step * HOPPER_STEP, n0, shard, full + 8 * stage);
                if (++stage == HOPPER_STAGES) stage = 0, parity ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        int stage = 0;
        uint32 parity = 0;
        int lane = lane_of_thread(), warp = (threadIdx.x / WARP) & 3;
        uint32 rows_at = (group - 1) * 64 * HOPPER_STEP;
        int high[64], middle[64];
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            int m0, n0, shard, before = 0;
            tile_place(p, tile, m0, n0, shard);
            int row = m0 + (group - 1) * 64 + warp * 16 + (lane >> 2);
            TileNumbers numbers = tile_numbers(p, row, n0 + threadIdx.x % 128, shard);
            for (int step = 0; step < steps; step++) {
                barrier_wait(full + 8 * stage, parity);
                uint32 at = memory + stage * HOPPER_STAGE;
                uint64 a_high = matrix_descriptor(at + rows_at), a_low = matrix_descriptor(at + HOPPER_PLANE + rows_at);
                uint64 b_high = matrix_descriptor(at + 2 * HOPPER_PLANE), b_low = matrix_descriptor(at + 3 * HOPPER_PLANE);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < HOPPER_STEP / 32; k++) {
                    int add = step + k > 0;
                    warpgroup_mma(high, a_high + 2 * k, b_high + 2 * k, add);
                    warpgroup_mma(middle, a_high + 2 * k, b_low + 2 * k, add);
                    warpgroup_mma(middle, a_low + 2 * k, b_high + 2 * k, 1);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (step > 0) {
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (lane == 0) barrier_arrive(empty + 8 * before);
                }
                before = stage;
                if (++stage == HOPPER_STAGES) stage = 0, parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane == 0) barrier_arrive(empty + 8 * before);
            write_tile<RESIDUAL>(p, sides[group - 1], numbers, group, row, n0, shard, high, middle);
        }
    }
}

#define HOPPER_PRODUCT(NAME, RESIDUAL)                                                                                 \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                               \
        NAME(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, HopperProduct p) {      \
        hopper_product<RESIDUAL>(&a_map, &b_map, p);                                                                   \
    }

HOPPER_PRODUCT(k_product_hopper, false)
HOPPER_PRODUCT(k_product_hopper_residual, true)
