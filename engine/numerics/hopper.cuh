// The fixed-point product on Hopper's warpgroup instructions (compute capability 9.0 alone); included by linear.cu.
//
// One warp copies tiles with the bulk copy engine, two warpgroups multiply: each holds 64 x 128 results, as two sets of
// int32 sums. Blocks stay and take tile after tile, so that copies run ahead while results are written.
#pragma once
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
    const float *bias;
    float *out;
    int64 out_stride;
    int rows, columns, padded, shards, add;
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

// Write (or add) a thread's results: rows `row` and `row` + 8, columns `column` + 8n and the next of each.
__device__ __forceinline__ void write_tile(const HopperProduct &p, int row, int column, int shard, const int (&high)[64],
                                           const int (&middle)[64]) {
    const int *a_exponents = p.a_exponents + shard * p.rows, *b_exponents = p.b_exponents + shard * p.columns;
    bool even = p.columns % 2 == 0;
    int s_row[2] = {row < p.rows ? a_exponents[row] : 0, row + 8 < p.rows ? a_exponents[row + 8] : 0};
    float column_factor[32];
    int least = MOST_EXPONENT, most = LEAST_EXPONENT;
    bool usual = true;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        int c = column + 8 * n;
        int2 s = make_int2(0, 0);
        if (even && c < p.columns)
            s = *(const int2 *)(b_exponents + c);
        else {
            if (c < p.columns) s.x = b_exponents[c];
            if (c + 1 < p.columns) s.y = b_exponents[c + 1];
        }
        least = min(least, min(s.x, s.y)), most = max(most, max(s.x, s.y));
        column_factor[2 * n] = power_of_two32(4 - s.x), column_factor[2 * n + 1] = power_of_two32(4 - s.y);
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        usual = usual && s_row[r] >= LEAST_EXPONENT && s_row[r] <= MOST_EXPONENT && least + s_row[r] >= LEAST_PAIR &&
                most + s_row[r] <= MOST_PAIR;
    usual = usual && least >= LEAST_EXPONENT && most <= MOST_EXPONENT;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= p.rows) continue;
        float *out = p.out + shard * p.out_stride + (int64)(row + 8 * half) * p.columns;
        float row_factor = power_of_two32(4 - s_row[half]);
        if (usual) {
#pragma unroll
            for (int n = 0; n < 16; n++) {
                int c = column + 8 * n, i = 4 * n + 2 * half;
                float2 y;
                y.x = ((float)(((int64)high[i] << 8) + middle[i]) * row_factor) * column_factor[2 * n];
                y.y = ((float)(((int64)high[i + 1] << 8) + middle[i + 1]) * row_factor) * column_factor[2 * n + 1];
                if (!even) {
                    float pair[2] = {y.x, y.y};
                    for (int j = 0; j < 2 && c + j < p.columns; j++) {
                        if (p.bias) pair[j] = pair[j] + p.bias[c + j];
                        out[c + j] = p.add ? out[c + j] + pair[j] : pair[j];
                    }
                } else if (c < p.columns) {
                    float2 *target = (float2 *)(out + c);
                    if (p.bias) {
                        float2 bias = *(const float2 *)(p.bias + c);
                        y.x = y.x + bias.x, y.y = y.y + bias.y;
                    }
                    if (p.add) {
                        float2 old = *target;
                        y.x = old.x + y.x, y.y = old.y + y.y;
                    }
                    *target = y;
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int c = column + 8 * n + j, i = 4 * n + 2 * half + j;
                    if (c >= p.columns) continue;
                    int64 v = ((int64)high[i] << 8) + middle[i];
                    float y = scaled_float(v, 8 - s_row[half] - b_exponents[c]);
                    if (p.bias) y = y + p.bias[c];
                    out[c] = p.add ? out[c] + y : y;
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    k_product_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, HopperProduct p) {
    extern __shared__ __align__(1024) int8 hopper_memory[];
    __shared__ uint64 barriers[2 * HOPPER_STAGES];
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
                copy_tile(to, &a_map, step * HOPPER_STEP, m0, shard, full + 8 * stage);
                copy_tile(to + 2 * HOPPER_PLANE, &b_map, step * HOPPER_STEP, n0, shard, full + 8 * stage);
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
            write_tile(p, m0 + (group - 1) * 64 + warp * 16 + (lane >> 2), n0 + 2 * (lane & 3), shard, high, middle);
        }
    }
}
