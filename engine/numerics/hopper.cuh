// The fixed-point product on Hopper's warpgroup instructions (compute capability 9.0 alone); included by linear.cu.
//
// One warp copies tiles with the bulk copy engine, two warpgroups multiply: each holds 64 x 128 results, as two sets of
// int32 sums. Blocks stay and take tile after tile, so that copies run ahead while results are written.
#pragma once
#include "epilogue.cuh"
#include "fixed_point.cuh"
#include "asynchronous.cuh"

#define HOPPER_ROWS 128
#define HOPPER_COLUMNS 128
#define HOPPER_STEP 128 // depth of a stage in bytes: the width of the copy engine's swizzle
#define HOPPER_STAGES 3
#define HOPPER_PLANE (128 * HOPPER_STEP)
#define HOPPER_STAGE (4 * HOPPER_PLANE)

// Both planes of 128 rows, HOPPER_STEP bytes deep, to shared memory; rows outside the matrix become zeros.
__device__ __forceinline__ void copy_tile(uint32 to, const TensorMap *map, int depth, int row, int shard, uint32 barrier) {
    copy_box(to, map, depth, row, 0, shard, barrier);
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
    uint32 tiles_m = (p.rows + HOPPER_ROWS - 1) / HOPPER_ROWS, tiles_n = (p.columns + HOPPER_COLUMNS - 1) / HOPPER_COLUMNS;
    uint32 rest = index, shorter = min(tiles_m, tiles_n);
    shard = rest / (tiles_m * tiles_n);
    rest -= shard * tiles_m * tiles_n;
    uint32 slow = rest / shorter, fast = rest - slow * shorter;
    bool down = tiles_m <= tiles_n;
    m0 = (down ? fast : slow) * HOPPER_ROWS;
    n0 = (down ? slow : fast) * HOPPER_COLUMNS;
}

// Exponents of one operand are usual within these bounds, and those of a pair if their sum is within PAIR bounds: the
// scale may then be applied as two fp32 factors, and nothing but the conversion of the integer rounds.
#define LEAST_EXPONENT -60
#define MOST_EXPONENT 100
#define LEAST_PAIR -60
#define MOST_PAIR 134

// What a warpgroup knows of a tile's columns while it writes results: thread i of it looks after column i.
struct __align__(16) ColumnSide {
    float factors[HOPPER_COLUMNS], bias[HOPPER_COLUMNS];
    int least[4], most[4]; // exponents, by warp
};

// A warp's 16 rows of 32 columns on their way from the registers of a product to whole lines of the result. The rows'
// distance keeps both the writing and the reading off each other's banks.
#define PART_COLUMNS 32
struct Part {
    float x[16][PART_COLUMNS + 8];
};

// Loaded before the products of a tile are under way, needed after them.
struct TileNumbers {
    int s_column, s_row[4]; // exponents of the thread's column, and of rows lane/8 + 4r of its warp
    float bias;
};

__device__ __forceinline__ TileNumbers tile_numbers(const HopperProduct &p, int warp_row, int column, int shard) {
    const int *a_exponents = p.a_exponents + shard * p.rows, *b_exponents = p.b_exponents + shard * p.columns;
    TileNumbers t = {0, {0, 0, 0, 0}, 0.0f};
    if (column < p.columns) {
        t.s_column = b_exponents[column];
        if (p.epilogue.bias) t.bias = p.epilogue.bias[column];
    }
    int row = warp_row + lane_of_thread() / 8;
#pragma unroll
    for (int r = 0; r < 4; r++)
        if (row + 4 * r < p.rows) t.s_row[r] = a_exponents[row + 4 * r];
    return t;
}

// fp32(256*high + middle), rounded once. A conversion of 64 bits takes eight times as long as one of 32, so up to some
// depths two exact ones and a fused multiplication stand for it: |high| <= 127*127 and |middle| <= 2*127*128 for each unit
// of depth, and both (or high + middle/256 alone) stay below 2**24.
#define SHALLOW 512
#define MEDIUM 1024

template <int DEPTH> __device__ __forceinline__ float joined(int held_high, int held_middle) {
    int high, middle; // the compiler must not do this for all parts ahead of the loop over them: registers are scarce
    asm volatile("mov.b32 %0, %1;" : "=r"(high) : "r"(held_high));
    asm volatile("mov.b32 %0, %1;" : "=r"(middle) : "r"(held_middle));
    if (DEPTH == SHALLOW) return __fmaf_rn((float)high, 256.0f, (float)middle);
    if (DEPTH == MEDIUM) return __fmaf_rn((float)(high + (middle >> 8)), 256.0f, (float)(middle & 255));
    return (float)(((int64)high << 8) + middle);
}

// Part number PART of the warp's results, not scaled yet. Of each 8 columns a thread holds 2t and 2t + 1, t = lane % 4,
// in rows g = lane / 4 and g + 8.
template <int PART, int DEPTH> __device__ __forceinline__ void stage_part(Part &part, const int (&high)[64], const int (&middle)[64]) {
    int lane = lane_of_thread();
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = 16 * PART + 4 * n + 2 * half;
            *(float2 *)&part.x[lane / 4 + 8 * half][8 * n + 2 * (lane & 3)] =
                make_float2(joined<DEPTH>(high[i], middle[i]), joined<DEPTH>(high[i + 1], middle[i + 1]));
        }
}

template <int DEPTH>
__device__ __forceinline__ void stage_part(Part &part, int number, const int (&high)[64], const int (&middle)[64]) {
    if (number < 2) {
        if (number == 0) stage_part<0, DEPTH>(part, high, middle);
        else stage_part<1, DEPTH>(part, high, middle);
    } else {
        if (number == 2) stage_part<2, DEPTH>(part, high, middle);
        else stage_part<3, DEPTH>(part, high, middle);
    }
}

// One bit for each element of four rows of four columns: whether dropout keeps it.
__device__ __forceinline__ uint32 kept_bits(const Epilogue &e, int64 at, int64 row_stride) {
    uint32 bits = 0;
#pragma unroll 1
    for (int r = 0; r < 4; r++) {
        uint4 w = random_words4(e.values, e.mask.site, (uint64)(e.base + at + r * row_stride) / 4);
        uint32 four = (w.x >= e.mask.threshold) | (w.y >= e.mask.threshold) << 1 | (w.z >= e.mask.threshold) << 2 |
                      (w.w >= e.mask.threshold) << 3;
        bits |= four << (4 * r);
    }
    return bits;
}

// A warp's 16 rows where exponents are usual and columns a multiple of four. The code runs once for each tile, and most of
// what a small product takes would be the fetching of it: parts share it, but for what names registers.
template <bool RESIDUAL>
__device__ __forceinline__ void write_usual(const HopperProduct &p, const ColumnSide &side, Part &part, const TileNumbers &t,
                                            int warp_row, int n0, float *out, const int (&high)[64], const int (&middle)[64]) {
    const Epilogue &e = p.epilogue;
    int row = warp_row + lane_of_thread() / 8, inside = 4 * (lane_of_thread() & 7);
    int64 at = (int64)row * p.columns + n0 + inside;
    const float *other = RESIDUAL ? e.residual : out;
    bool adds = RESIDUAL || e.add;
    float row_factor[4];
#pragma unroll
    for (int r = 0; r < 4; r++) row_factor[r] = power_of_two32(4 - t.s_row[r]);
#pragma unroll 1
    for (int number = 0; number < HOPPER_COLUMNS / PART_COLUMNS && n0 + PART_COLUMNS * number < p.columns; number++) {
        int c = PART_COLUMNS * number + inside;
        bool present = n0 + c < p.columns;
        float4 old[4]; // all loads are under way before the first is waited for
#pragma unroll
        for (int r = 0; r < 4; r++) {
            old[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (adds && present && row + 4 * r < p.rows) old[r] = *(const float4 *)(other + at + (int64)(4 * r) * p.columns);
        }
        if (p.padded <= SHALLOW) stage_part<SHALLOW>(part, number, high, middle);
        else if (p.padded <= MEDIUM) stage_part<MEDIUM>(part, number, high, middle);
        else stage_part<0>(part, number, high, middle);
        __syncwarp();
        float4 factor = *(const float4 *)&side.factors[c], bias = *(const float4 *)&side.bias[c];
        bool drops = RESIDUAL && e.mask.threshold;
        uint32 kept = drops ? kept_bits(e, at, (int64)4 * p.columns) : 0;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float4 y = *(const float4 *)&part.x[lane_of_thread() / 8 + 4 * r][inside];
            // Without a bias 0 is added, which changes nothing: no result is -0.
            y.x = (y.x * row_factor[r]) * factor.x + bias.x, y.y = (y.y * row_factor[r]) * factor.y + bias.y;
            y.z = (y.z * row_factor[r]) * factor.z + bias.z, y.w = (y.w * row_factor[r]) * factor.w + bias.w;
            if (drops) {
                uint32 bits = kept >> (4 * r);
                y.x = bits & 1 ? y.x * e.mask.factor : 0.0f, y.y = bits & 2 ? y.y * e.mask.factor : 0.0f;
                y.z = bits & 4 ? y.z * e.mask.factor : 0.0f, y.w = bits & 8 ? y.w * e.mask.factor : 0.0f;
            }
            if (adds) y = make_float4(old[r].x + y.x, old[r].y + y.y, old[r].z + y.z, old[r].w + y.w);
            if (present && row + 4 * r < p.rows) *(float4 *)(out + at + (int64)(4 * r) * p.columns) = y;
        }
        __syncwarp();
        at += PART_COLUMNS;
    }
}

// The same for any exponents and columns, one by one. Kept apart from the rest: code that is seldom run must not lie
// between lines that always are.
template <bool RESIDUAL>
__device__ __forceinline__ void write_unusual(const HopperProduct &p, int warp_row, int n0, int shard, float *out,
                                              const int (&high)[64], const int (&middle)[64]) {
    int lane = lane_of_thread(), column = n0 + 2 * (lane & 3);
    const int *a_exponents = p.a_exponents + shard * p.rows, *b_exponents = p.b_exponents + shard * p.columns;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp_row + lane / 4 + 8 * half;
        if (row >= p.rows) continue;
        int64 at = (int64)row * p.columns;
        int s = a_exponents[row];
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int c = column + 8 * n + j, i = 4 * n + 2 * half + j;
                if (c >= p.columns) continue;
                int64 v = ((int64)high[i] << 8) + middle[i];
                finish<RESIDUAL>(p.epilogue, scaled_float(v, 8 - s - b_exponents[c]), at + c, c, out + at + c);
            }
    }
}

// Write (or add) a warp's results: rows warp_row..warp_row+15 of the tile at column n0. `group` 1 or 2 is the warpgroup.
template <bool RESIDUAL>
__device__ __forceinline__ void write_tile(const HopperProduct &p, ColumnSide &side, Part &part, const TileNumbers &t, int group,
                                           int warp_row, int n0, int shard, const int (&high)[64], const int (&middle)[64]) {
    int own = threadIdx.x % 128, lane = lane_of_thread();
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory"); // the tile before is written
    side.factors[own] = power_of_two32(4 - t.s_column), side.bias[own] = t.bias;
    int least = warp_min(t.s_column), most = warp_max(t.s_column);
    if (lane == 0) side.least[own / WARP] = least, side.most[own / WARP] = most;
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
    least = min(min(side.least[0], side.least[1]), min(side.least[2], side.least[3]));
    most = max(max(side.most[0], side.most[1]), max(side.most[2], side.most[3]));
    int least_row = min(min(t.s_row[0], t.s_row[1]), min(t.s_row[2], t.s_row[3]));
    int most_row = max(max(t.s_row[0], t.s_row[1]), max(t.s_row[2], t.s_row[3]));
    bool usual = p.columns % 4 == 0 && least >= LEAST_EXPONENT && most <= MOST_EXPONENT && least_row >= LEAST_EXPONENT &&
                 most_row <= MOST_EXPONENT && least + least_row >= LEAST_PAIR && most + most_row <= MOST_PAIR;
    float *out = p.out + shard * p.out_stride;
    if (__all_sync(ALL_LANES, usual)) write_usual<RESIDUAL>(p, side, part, t, warp_row, n0, out, high, middle);
    else write_unusual<RESIDUAL>(p, warp_row, n0, shard, out, high, middle);
}

template <bool RESIDUAL>
__device__ __forceinline__ void hopper_product(const TensorMap *a_map, const TensorMap *b_map, const HopperProduct &p) {
    extern __shared__ __align__(1024) int8 hopper_memory[];
    __shared__ uint64 barriers[2 * HOPPER_STAGES];
    __shared__ ColumnSide sides[2];
    __shared__ __align__(16) Part parts[8];
    uint32 memory = (shared_address(hopper_memory) + 1023) & ~1023u;
    uint32 full = shared_address(barriers), empty = full + 8 * HOPPER_STAGES;
    int tiles = ((p.rows + HOPPER_ROWS - 1) / HOPPER_ROWS) * ((p.columns + HOPPER_COLUMNS - 1) / HOPPER_COLUMNS) * p.shards;
    int steps = p.padded / HOPPER_STEP, group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(a_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(b_map) : "memory");
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
            int warp_row = m0 + (group - 1) * 64 + warp * 16;
            TileNumbers numbers = tile_numbers(p, warp_row, n0 + threadIdx.x % 128, shard);
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                barrier_wait(full + 8 * stage, parity);
                uint32 at = memory + stage * HOPPER_STAGE;
                uint64 a_high = matrix_descriptor(at + rows_at), a_low = matrix_descriptor(at + HOPPER_PLANE + rows_at);
                uint64 b_high = matrix_descriptor(at + 2 * HOPPER_PLANE), b_low = matrix_descriptor(at + 3 * HOPPER_PLANE);
                products_begin();
#pragma unroll
                for (int k = 0; k < HOPPER_STEP / 32; k++) {
                    int add = step + k > 0;
                    warpgroup_mma(high, a_high + 2 * k, b_high + 2 * k, add);
                    warpgroup_mma(middle, a_high + 2 * k, b_low + 2 * k, add);
                    warpgroup_mma(middle, a_low + 2 * k, b_high + 2 * k, 1);
                }
                products_commit();
                if (step > 0) {
                    products_wait<1>();
                    if (lane == 0) barrier_arrive(empty + 8 * before);
                }
                before = stage;
                if (++stage == HOPPER_STAGES) stage = 0, parity ^= 1;
            }
            products_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * before);
            write_tile<RESIDUAL>(p, sides[group - 1], parts[threadIdx.x / WARP - 4], numbers, group, warp_row, n0, shard, high, middle);
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
