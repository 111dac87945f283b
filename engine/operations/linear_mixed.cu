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

// Where an output is not null: out_k [width] of each shard = partial [shards, blocks, kinds, width] summed over blocks.
extern "C" __global__ void k_combine(const float *partial, int blocks, int kinds, int width, float *out0, float *out1,
                                     float *out2, int64 set_stride) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= kinds * width) return;
    int kind = c / width;
    float *out = kind == 0 ? out0 : kind == 1 ? out1 : out2;
    if (!out) return;
    partial += (int64)blockIdx.y * blocks * kinds * width + c;
    float sum = 0.0f;
#pragma unroll 8
    for (int b = 0; b < blocks; b++) sum += partial[(int64)b * kinds * width];
    out[blockIdx.y * set_stride + c % width] = sum;
}
