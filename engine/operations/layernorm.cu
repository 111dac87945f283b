// Kernels of LayerNorm; see layernorm.py. A warp takes a row, lane j its elements j, j+32, ... in that order.
#include "sums.cuh"

extern "C" __global__ void k_layernorm_fwd(const float *x, const float *gain, const float *bias, int rows, int width,
                                           float *y, float *mean, float *rstd, int *flag) {
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = lane_of_thread();
    if (row >= rows) return;
    x += (int64)row * width, y += (int64)row * width;
    float sum = 0.0f;
    for (int c = lane; c < width; c += WARP) sum = sum + x[c];
    float m = lanes_total(sum) / (float)width;
    sum = 0.0f;
    for (int c = lane; c < width; c += WARP) {
        float e = x[c] - m;
        sum = sum + e * e;
    }
    float variance = lanes_total(sum) / (float)width;
    if (magnitude_bits(variance) >= INFINITY_BITS) *flag = 1; // the row would come out as zeros
    float r = 1.0f / sqrtf(variance + 1e-5f);
    if (lane == 0) mean[row] = m, rstd[row] = r;
    for (int c = lane; c < width; c += WARP) {
        float n = (x[c] - m) * r;
        y[c] = gain ? n * gain[c] + bias[c] : n;
    }
}

#define WARP_ROWS 2 // rows of the backward pass that each warp takes

// dx from dy, added where `add`. With `tops` (zeros at first, or null: no parameters) also the largest magnitudes of
// dy*n (row 0) and dy (row 1) for each column of each shard of shard_rows rows: tops [shards, 2, width].
extern "C" __global__ void k_layernorm_bwd(const float *x, const float *gain, const float *mean, const float *rstd,
                                           const float *dy, int rows, int width, float *dx, int add, int shard_rows,
                                           int *tops) {
    int lane = lane_of_thread(), block_rows = blockDim.x / WARP * WARP_ROWS, first = blockIdx.x * block_rows;
    for (int r = threadIdx.x / WARP; r < block_rows && first + r < rows; r += blockDim.x / WARP) {
        int row = first + r;
        const float *x_row = x + (int64)row * width, *dy_row = dy + (int64)row * width;
        float *dx_row = dx + (int64)row * width;
        float m = mean[row], r_row = rstd[row], sum = 0.0f, sum_n = 0.0f;
        for (int c = lane; c < width; c += WARP) {
            float g = gain ? dy_row[c] * gain[c] : dy_row[c];
            sum = sum + g;
            sum_n = sum_n + g * ((x_row[c] - m) * r_row);
        }
        float average = lanes_total(sum) / (float)width;
        float average_n = lanes_total(sum_n) / (float)width;
        for (int c = lane; c < width; c += WARP) {
            float g = gain ? dy_row[c] * gain[c] : dy_row[c];
            float d = r_row * ((g - average) - (x_row[c] - m) * r_row * average_n);
            dx_row[c] = add ? dx_row[c] + d : d;
        }
    }
    if (!tops) return;
    int left = min(block_rows, rows - first);
    while (left > 0) {
        int shard = first / shard_rows, count = min(left, shard_rows - first % shard_rows);
        int *gain_tops = tops + shard * 2 * width, *bias_tops = gain_tops + width;
        for (int c = threadIdx.x; c < width; c += blockDim.x) {
            int gain_top = 0, bias_top = 0;
#pragma unroll 4
            for (int i = 0; i < count; i++) {
                int row = first + i;
                float d = dy[(int64)row * width + c];
                gain_top = max(gain_top, magnitude_bits(d * ((x[(int64)row * width + c] - mean[row]) * rstd[row])));
                bias_top = max(bias_top, magnitude_bits(d));
            }
            atomicMax(&gain_tops[c], gain_top);
            atomicMax(&bias_tops[c], bias_top);
        }
        first += count, left -= count;
    }
}

// Where either magnitude of a column is not finite, both count as zero and the flag is set.
__device__ __forceinline__ void finite_tops(const int *tops, int width, int c, int *flag, int &gain, int &bias) {
    gain = tops[c], bias = tops[width + c];
    if (gain >= INFINITY_BITS || bias >= INFINITY_BITS) {
        *flag = 1;
        gain = bias = 0;
    }
}

// Sums over tokens of the integers of dy*n and dy: sums [shards, 2, width], zeros at first.
// Block (32, 8): 32 columns, 8 tokens at a time; gridDim.y pieces of the tokens.
extern "C" __global__ void k_layernorm_bwd_sums(const float *x, const float *mean, const float *rstd, const float *dy,
                                                int tokens, int width, const int *tops, uint64 *sums, int *flag) {
    __shared__ int64 parts[2][8][32];
    int c = blockIdx.x * 32 + threadIdx.x, z = blockIdx.z;
    int64 gain = 0, bias = 0;
    if (c < width) {
        int top_gain, top_bias;
        finite_tops(tops + z * 2 * width, width, c, flag, top_gain, top_bias);
        Factor f_gain = factor_of(sum_exponent(top_gain)), f_bias = factor_of(sum_exponent(top_bias));
        for (int t = blockIdx.y * 8 + threadIdx.y; t < tokens; t += 8 * gridDim.y) {
            int64 row = (int64)z * tokens + t;
            float d = dy[row * width + c];
            gain += scaled_integer(d * ((x[row * width + c] - mean[row]) * rstd[row]), f_gain);
            bias += scaled_integer(d, f_bias);
        }
    }
    parts[0][threadIdx.y][threadIdx.x] = gain;
    parts[1][threadIdx.y][threadIdx.x] = bias;
    __syncthreads();
    if (threadIdx.y < 2 && c < width) {
        int64 sum = 0;
        for (int y = 0; y < 8; y++) sum += parts[threadIdx.y][y][threadIdx.x];
        atomicAdd(&sums[(z * 2 + threadIdx.y) * width + c], (uint64)sum);
    }
}

// dgain and dbias [width] in gradient set z += the sums.
extern "C" __global__ void k_layernorm_bwd_parameters(const int *tops, const int64 *sums, int width, float *dgain,
                                                      float *dbias, int64 stride, int *flag) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, z = blockIdx.y;
    if (c >= width) return;
    int top_gain, top_bias;
    finite_tops(tops + z * 2 * width, width, c, flag, top_gain, top_bias);
    sums += z * 2 * width;
    dgain[z * stride + c] += float_of_sum(sums[c], sum_exponent(top_gain));
    dbias[z * stride + c] += float_of_sum(sums[width + c], sum_exponent(top_bias));
}
