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

// fp32((256*high + middle) * 2**e), rounded once.
__device__ __forceinline__ float combined(int high, int middle, int e) {
    return scaled_float(((int64)high << 8) + middle, e);
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
            barrier_init(empty + 8 * s, 2);
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
                    if ((threadIdx.x & 127) == 0) barrier_arrive(empty + 8 * before);
                }
                before = stage;
                if (++stage == HOPPER_STAGES) stage = 0, parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if ((threadIdx.x & 127) == 0) barrier_arrive(empty + 8 * before);
            const int *a_exponents = p.a_exponents + shard * p.rows, *b_exponents = p.b_exponents + shard * p.columns;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = m0 + (group - 1) * 64 + warp * 16 + (lane >> 2) + 8 * half;
                if (row >= p.rows) continue;
                int e = 8 - a_exponents[row];
                float *out = p.out + shard * p.out_stride + (int64)row * p.columns;
#pragma unroll
                for (int n = 0; n < 16; n++) {
                    int column = n0 + 8 * n + 2 * (lane & 3), i = 4 * n + 2 * half;
                    if (column + 1 < p.columns && p.columns % 2 == 0) {
                        int2 s = *(const int2 *)(b_exponents + column);
                        float2 y = make_float2(combined(high[i], middle[i], e - s.x),
                                               combined(high[i + 1], middle[i + 1], e - s.y));
                        if (p.bias) y.x = y.x + p.bias[column], y.y = y.y + p.bias[column + 1];
                        float2 *target = (float2 *)(out + column);
                        if (p.add) {
                            float2 old = *target;
                            y.x = old.x + y.x, y.y = old.y + y.y;
                        }
                        *target = y;
                    } else
                        for (int j = 0; j < 2; j++)
                            if (column + j < p.columns) {
                                float y = combined(high[i + j], middle[i + j], e - b_exponents[column + j]);
                                if (p.bias) y = y + p.bias[column + j];
                                out[column + j] = p.add ? out[column + j] + y : y;
                            }
                }
            }
        }
    }
}
