// Kernels of LayerNorm; see layernorm.py. A warp takes a row, lane j its elements j, j+32, ... in that order.
#include "fixed_point.cuh"
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

#ifdef VECTORS // groups of 128 columns: rows that fit into a warp's registers

#define HELD (4 * VECTORS) // values of a row that a lane holds
#define QUANTISED_ROWS 4   // that each warp takes
#define ROWS_AT_ONCE (VECTORS <= 2 ? 4 : VECTORS <= 3 ? 2 : 1) // of them: as many as registers hold

// LayerNorm straight to the planes of the linear layer that follows, for a width that is a multiple of 4 and at most
// 128*VECTORS. tops [shards, width] (zeros at first, or null): largest magnitudes of the columns of each shard of
// shard_rows rows. `flag` is LayerNorm's, `linear_flag` that of the linear layer.
extern "C" __global__ void __launch_bounds__(256) k_layernorm_quantise(const float *x, const float *gain, const float *bias,
                                                                       int rows, int width, int padded, int8 *planes,
                                                                       int *exponents, float *mean, float *rstd,
                                                                       int shard_rows, int *tops, int *flag, int *linear_flag) {
    __shared__ int block_tops[128 * VECTORS];
    int lane = lane_of_thread(), warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int first = blockIdx.x * warps * QUANTISED_ROWS, last = min(first + warps * QUANTISED_ROWS, rows);
    bool one_shard = tops && first / shard_rows == (last - 1) / shard_rows;
    int top[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) top[i] = 0;
    for (int start = first + warp; start < last; start += ROWS_AT_ONCE * warps) {
        float m[ROWS_AT_ONCE], r[ROWS_AT_ONCE];
        float4 v[ROWS_AT_ONCE][VECTORS]; // the row again, as planes want it
        {
            float e[ROWS_AT_ONCE][HELD], sum[ROWS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                const float *source = x + (int64)(start + i * warps) * width;
#pragma unroll
                for (int k = 0; k < HELD; k++)
                    e[i][k] = start + i * warps < last && lane + WARP * k < width ? source[lane + WARP * k] : 0.0f;
#pragma unroll
                for (int k = 0; k < VECTORS; k++) {
                    v[i][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (start + i * warps < last && 4 * (lane + WARP * k) < width) v[i][k] = *(const float4 *)(source + 4 * (lane + WARP * k));
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                sum[i] = 0.0f;
#pragma unroll
                for (int k = 0; k < HELD; k++)
                    if (lane + WARP * k < width) sum[i] = sum[i] + e[i][k];
            }
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                m[i] = lanes_total(sum[i]) / (float)width;
                sum[i] = 0.0f;
#pragma unroll
                for (int k = 0; k < HELD; k++)
                    if (lane + WARP * k < width) {
                        float d = e[i][k] - m[i];
                        sum[i] = sum[i] + d * d;
                    }
            }
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                float variance = lanes_total(sum[i]) / (float)width;
                if (magnitude_bits(variance) >= INFINITY_BITS) *flag = 1; // the row would come out as zeros
                r[i] = 1.0f / sqrtf(variance + 1e-5f);
            }
        }
        int row_top[ROWS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) row_top[i] = 0;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            int c = 4 * (lane + WARP * k);
            if (c >= width) continue;
            float4 g = make_float4(1.0f, 1.0f, 1.0f, 1.0f), b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (gain) g = *(const float4 *)(gain + c), b = *(const float4 *)(bias + c);
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                int row = start + i * warps;
                if (row >= last) continue;
                float4 &y = v[i][k];
                y = make_float4((y.x - m[i]) * r[i], (y.y - m[i]) * r[i], (y.z - m[i]) * r[i], (y.w - m[i]) * r[i]);
                if (gain) y = make_float4(y.x * g.x + b.x, y.y * g.y + b.y, y.z * g.z + b.z, y.w * g.w + b.w);
                int magnitude[4] = {magnitude_bits(y.x), magnitude_bits(y.y), magnitude_bits(y.z), magnitude_bits(y.w)};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    row_top[i] = max(row_top[i], magnitude[j]);
                    if (one_shard) top[4 * k + j] = max(top[4 * k + j], magnitude[j]);
                    else if (tops) atomicMax(&tops[(int64)(row / shard_rows) * width + c + j], magnitude[j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            int row = start + i * warps;
            if (row >= last) break;
            int s = row_exponent(warp_max(row_top[i]), linear_flag);
            if (lane == 0) mean[row] = m[i], rstd[row] = r[i], exponents[row] = s;
            Factor f = factor_of(s);
            uint32 *hi = (uint32 *)(planes + (int64)row * padded), *lo = (uint32 *)(planes + (int64)(rows + row) * padded);
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
                split4(scaled_integer(v[i][k].x, f), scaled_integer(v[i][k].y, f), scaled_integer(v[i][k].z, f),
                       scaled_integer(v[i][k].w, f), hi[lane + WARP * k], lo[lane + WARP * k]);
        }
    }
    if (!one_shard) return;
    for (int c = threadIdx.x; c < 128 * VECTORS; c += blockDim.x) block_tops[c] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HELD; i++) atomicMax(&block_tops[(i / 4 * WARP + lane) * 4 + i % 4], top[i]);
    __syncthreads();
    tops += (int64)(first / shard_rows) * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) // reading first, if only an older number, spares most of the rest
        if (block_tops[c] > tops[c]) atomicMax(&tops[c], block_tops[c]);
}

#define BACKWARD_ROWS 4 // that each warp takes
#define BACKWARD_WARPS (VECTORS <= 3 ? 8 : 4)

// dx from dy, as k_layernorm_bwd, with each row read once.
extern "C" __global__ void __launch_bounds__(WARP * BACKWARD_WARPS, VECTORS <= 3 ? 2 : VECTORS <= 6 ? 3 : 2) k_layernorm_bwd_held(const float *x, const float *gain, const float *mean,
                                                                       const float *rstd, const float *dy, int rows,
                                                                       int width, float *dx, int add, int shard_rows,
                                                                       int *tops) {
    __shared__ int block_tops[2][128 * VECTORS];
    int lane = lane_of_thread(), warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int first = blockIdx.x * warps * BACKWARD_ROWS, last = min(first + warps * BACKWARD_ROWS, rows);
    bool one_shard = tops && first / shard_rows == (last - 1) / shard_rows;
    int gain_top[HELD], bias_top[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) gain_top[k] = bias_top[k] = 0;
    for (int start = first + warp; start < last; start += ROWS_AT_ONCE * warps) {
        float n[ROWS_AT_ONCE][HELD], d[ROWS_AT_ONCE][HELD], m[ROWS_AT_ONCE], r[ROWS_AT_ONCE];
        float sum[ROWS_AT_ONCE], sum_n[ROWS_AT_ONCE];
        // All loads are under way before the first is waited for; what is absent is 0 and changes nothing.
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            int row = start + i * warps;
            bool present = row < last;
            const float *x_row = x + (int64)row * width, *dy_row = dy + (int64)row * width;
            m[i] = present ? mean[row] : 0.0f, r[i] = present ? rstd[row] : 0.0f;
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                bool inside = present && lane + WARP * k < width;
                n[i][k] = inside ? x_row[lane + WARP * k] : 0.0f;
                d[i][k] = inside ? dy_row[lane + WARP * k] : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            int row = start + i * warps;
#pragma unroll
            for (int k = 0; k < HELD; k++)
                if (lane + WARP * k < width) {
                    n[i][k] = (n[i][k] - m[i]) * r[i];
                    gain_top[k] = max(gain_top[k], magnitude_bits(d[i][k] * n[i][k]));
                    bias_top[k] = max(bias_top[k], magnitude_bits(d[i][k]));
                }
            if (tops && !one_shard && row < last) {
                int *row_tops = tops + (int64)(row / shard_rows) * 2 * width;
#pragma unroll
                for (int k = 0; k < HELD; k++)
                    if (lane + WARP * k < width) {
                        atomicMax(&row_tops[lane + WARP * k], magnitude_bits(d[i][k] * n[i][k]));
                        atomicMax(&row_tops[width + lane + WARP * k], magnitude_bits(d[i][k]));
                    }
            }
        }
        if (gain)
#pragma unroll
            for (int k = 0; k < HELD; k++)
                if (lane + WARP * k < width) {
                    float g = gain[lane + WARP * k];
#pragma unroll
                    for (int i = 0; i < ROWS_AT_ONCE; i++) d[i][k] = d[i][k] * g;
                }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            sum[i] = sum_n[i] = 0.0f;
#pragma unroll
            for (int k = 0; k < HELD; k++)
                if (lane + WARP * k < width) {
                    sum[i] = sum[i] + d[i][k];
                    sum_n[i] = sum_n[i] + d[i][k] * n[i][k];
                }
        }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            float average = lanes_total(sum[i]) / (float)width, average_n = lanes_total(sum_n[i]) / (float)width;
#pragma unroll
            for (int k = 0; k < HELD; k++) d[i][k] = r[i] * ((d[i][k] - average) - n[i][k] * average_n);
        }
        if (add) {
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++)
#pragma unroll
                for (int k = 0; k < HELD; k++)
                    if (start + i * warps < last && lane + WARP * k < width)
                        n[i][k] = dx[(int64)(start + i * warps) * width + lane + WARP * k];
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++)
#pragma unroll
                for (int k = 0; k < HELD; k++) d[i][k] = n[i][k] + d[i][k];
        }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++)
#pragma unroll
            for (int k = 0; k < HELD; k++)
                if (start + i * warps < last && lane + WARP * k < width)
                    dx[(int64)(start + i * warps) * width + lane + WARP * k] = d[i][k];
    }
    if (!one_shard) return;
    for (int c = threadIdx.x; c < 128 * VECTORS; c += blockDim.x) block_tops[0][c] = block_tops[1][c] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        atomicMax(&block_tops[0][lane + WARP * k], gain_top[k]);
        atomicMax(&block_tops[1][lane + WARP * k], bias_top[k]);
    }
    __syncthreads();
    int *shard_tops = tops + (int64)(first / shard_rows) * 2 * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        for (int i = 0; i < 2; i++) // reading first, if only an older number, spares most of the rest
            if (block_tops[i][c] > shard_tops[i * width + c]) atomicMax(&shard_tops[i * width + c], block_tops[i][c]);
}

#endif

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

// dgain and dbias [width] (+)= the tree over the shards' sums.
extern "C" __global__ void k_layernorm_bwd_parameters(const int *tops, const int64 *sums, int width, int shards, float *dgain,
                                                      float *dbias, int add, int *flag) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= width) return;
    auto leaf = [&](int z, bool of_gain) {
        int top_gain, top_bias;
        finite_tops(tops + z * 2 * width, width, c, flag, top_gain, top_bias);
        return float_of_sum(sums[(z * 2 + !of_gain) * width + c], sum_exponent(of_gain ? top_gain : top_bias));
    };
    float gain = shard_tree(shards, [&](int z) { return leaf(z, true); });
    float bias = shard_tree(shards, [&](int z) { return leaf(z, false); });
    dgain[c] = add ? dgain[c] + gain : gain;
    dbias[c] = add ? dbias[c] + bias : bias;
}
