// Sums of columns over tokens for the tier prod: bias gradients, and the second half of every sum over blocks.
#include "half.cuh"

#define SUM_ROWS 128

// partial [shards, blocks, width] = sums over the SUM_ROWS rows of a block. x [shards, tokens, width]; width % 8 == 0.
// A block has 8 warps; a lane takes eight columns. Grid: 256 columns, blocks, shards.
extern "C" __global__ void k_column_sums(const uint16 *x, int tokens, int width, float *partial) {
    __shared__ float columns[8][256];
    int warp = threadIdx.x / WARP, lane = lane_of_thread(), c = blockIdx.x * 256 + 8 * lane;
    float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (c < width) {
        int first = blockIdx.y * SUM_ROWS, last = min(first + SUM_ROWS, tokens);
        const uint16 *rows = x + (int64)blockIdx.z * tokens * width + c;
#pragma unroll 4
        for (int t = first + warp; t < last; t += 8) {
            Eight v = load8(rows + (int64)t * width);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += v.x[j];
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) columns[warp][8 * lane + j] = sums[j];
    __syncthreads();
    int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += columns[w][threadIdx.x];
    partial[((int64)blockIdx.z * gridDim.y + blockIdx.y) * width + column] = sum;
}

// Where an output is not null: out_k [width] = partial [shards, blocks, kinds, width] summed over blocks, then joined by
// the tree over shards (a power of two, at most 64). A block of 32 columns by 8 takes every eighth block.
extern "C" __global__ void k_combine(const float *partial, int shards, int blocks, int kinds, int width, float *out0,
                                     float *out1, float *out2) {
    __shared__ float parts[8][32];
    int columns = kinds * width, c = blockIdx.x * 32 + threadIdx.x;
    float pending[7];
    int depth = 0;
    for (int s = 0; s < shards; s++) {
        float sum = 0.0f;
        if (c < columns) {
            const float *column = partial + (int64)s * blocks * columns + c;
#pragma unroll 4
            for (int b = threadIdx.y; b < blocks; b += 8) sum += column[(int64)b * columns];
        }
        parts[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        float x = 0.0f;
        for (int y = 0; y < 8; y++) x += parts[y][threadIdx.x];
        __syncthreads();
        for (int n = s; n & 1; n >>= 1) x = pending[--depth] + x;
        pending[depth++] = x;
    }
    if (c >= columns || threadIdx.y) return;
    int kind = c / width;
    float *out = kind == 0 ? out0 : kind == 1 ? out1 : out2;
    if (out) out[c % width] = pending[0];
}
