// Sums of columns over tokens for the tier prod: bias gradients, and the second half of every sum over blocks.
#include "half.cuh"

#define SUM_ROWS 128

// partial [shards, blocks, width] = sums over the SUM_ROWS rows of a block. x [shards, tokens, width]; width % 8 == 0.
// A block has 8 warps; a lane takes eight columns. Grid: 256 columns, blocks, shards.
extern "C" __global__ void k_column_sums(const uint16 *x, int tokens, int width, float *partial) {
    int c = blockIdx.x * 256 + 8 * lane_of_thread();
    Eight sums = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
    if (c < width) {
        int first = blockIdx.y * SUM_ROWS, last = min(first + SUM_ROWS, tokens);
        const uint16 *rows = x + (int64)blockIdx.z * tokens * width + c;
#pragma unroll 4
        for (int t = first + threadIdx.x / WARP; t < last; t += 8) {
            Eight v = load8(rows + (int64)t * width);
#pragma unroll
            for (int j = 0; j < 8; j++) sums.x[j] += v.x[j];
        }
    }
    put_column_sums(sums, blockIdx.x * 256, width, partial + ((int64)blockIdx.z * gridDim.y + blockIdx.y) * width);
}

// Up to 128 columns of parts [shards, blocks, stride] and where their sum goes, both in elements. All whole in groups of
// four.
struct Summed {
    int64 parts, out;
    int blocks, stride, columns, unused;
};

#define MOST_SHARDS_AT_ONCE 64
#define BLOCK_SHARDS 4
#define PARTS 4

// A block takes a row of the table: out (+)= parts summed over blocks, then joined by the tree over shards (a power of
// two). Of 32 x PARTS x BLOCK_SHARDS threads each adds four columns of every PARTS-th block of a shard.
extern "C" __global__ void __launch_bounds__(32 * PARTS * BLOCK_SHARDS, 2)
k_combine(const float *parts, const Summed *table, int shards, float *out, int add) {
    __shared__ float4 sums[BLOCK_SHARDS][PARTS][32];
    __shared__ float4 totals[MOST_SHARDS_AT_ONCE][32];
    Summed row = table[blockIdx.x];
    int lane = threadIdx.x, part = threadIdx.y;
    bool inside = 4 * lane < row.columns;
    for (int first = 0; first < shards; first += BLOCK_SHARDS) {
        int shard = first + threadIdx.z;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (shard < shards && inside) {
            const float *columns = parts + row.parts + (int64)shard * row.blocks * row.stride + 4 * lane;
#pragma unroll 8
            for (int b = part; b < row.blocks; b += PARTS) sum = sum + __ldcs((const float4 *)(columns + (int64)b * row.stride));
        }
        sums[threadIdx.z][part][lane] = sum;
        __syncthreads();
        if (part == 0 && shard < shards) {
            float4 total = sums[threadIdx.z][0][lane];
#pragma unroll
            for (int p = 1; p < PARTS; p++) total = total + sums[threadIdx.z][p][lane];
            totals[shard][lane] = total;
        }
        __syncthreads();
    }
    if (part || threadIdx.z || !inside) return;
    for (int n = shards / 2; n > 0; n /= 2)
        for (int s = 0; s < n; s++) totals[s][lane] = totals[2 * s][lane] + totals[2 * s + 1][lane];
    float4 *place = (float4 *)(out + row.out + 4 * lane);
    *place = add ? *place + totals[0][lane] : totals[0][lane];
}
