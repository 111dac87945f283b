// LayerNorm of the tier prod, with the residual sum before it; formulas as in layernorm.py and residual_add.py, sums in
// fp32. A warp takes a row of WIDTH elements and keeps it in registers. Sums over tokens: each block adds the rows that
// it owns, k_combine the blocks, both in a fixed order.
#include "half.cuh"

#define EPSILON 1e-5f
#define VECTORS ((WIDTH / 8 + WARP - 1) / WARP)
#define BLOCK_WARPS 4

// Where `branch` is not null: sum = x + dropout(branch), which may take the place of branch; else sum is x.
extern "C" __global__ void __launch_bounds__(256)
k_norm_fwd(const uint16 *x, const uint16 *branch, const float *gain, const float *bias, int rows, uint16 *sum, uint16 *y,
           float *mean, float *rstd, int64 base, Mask mask, const StepValues *values) {
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = lane_of_thread();
    if (row >= rows) return;
    int64 start = (int64)row * WIDTH;
    Eight v[VECTORS];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = 8 * (lane + WARP * i);
        if (c >= WIDTH) continue;
        v[i] = load8(x + start + c);
        if (branch) {
            Eight b = load8(branch + start + c);
            drop8(b, mask, values, base + start + c);
#pragma unroll
            for (int j = 0; j < 8; j++) v[i].x[j] += b.x[j];
            uint4 words = narrowed(v[i]);
            *(uint4 *)(sum + start + c) = words;
            v[i] = widened(words); // the backward pass sees the rounded sum
        }
#pragma unroll
        for (int j = 0; j < 8; j++) total += v[i].x[j];
    }
    float m = lanes_total(total) * (1.0f / WIDTH);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (8 * (lane + WARP * i) < WIDTH)
#pragma unroll
            for (int j = 0; j < 8; j++) squares += (v[i].x[j] - m) * (v[i].x[j] - m);
    float r = rsqrtf(lanes_total(squares) * (1.0f / WIDTH) + EPSILON);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = 8 * (lane + WARP * i);
        if (c >= WIDTH) continue;
        Eight out;
#pragma unroll
        for (int j = 0; j < 8; j++) out.x[j] = (v[i].x[j] - m) * r;
        if (gain) {
            Eight g = load8(gain + c), b = load8(bias + c);
#pragma unroll
            for (int j = 0; j < 8; j++) out.x[j] = out.x[j] * g.x[j] + b.x[j];
        }
        store8(y + start + c, out);
    }
    if (lane == 0) mean[row] = m, rstd[row] = r;
}

__device__ __forceinline__ Eight gains(const float *gain, int c) {
    Eight ones = {{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}};
    return gain ? load8(gain + c) : ones;
}

__device__ __forceinline__ void load_row(const uint16 *sum, const uint16 *dy, int64 row, uint4 (&x)[VECTORS],
                                         uint4 (&g)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = 8 * (lane_of_thread() + WARP * i);
        if (c >= WIDTH) continue;
        x[i] = *(const uint4 *)(sum + row * WIDTH + c);
        g[i] = *(const uint4 *)(dy + row * WIDTH + c);
    }
}

// dx = LayerNorm's gradient (+ dsum where not null); dbranch (where not null, else it is dx) = dx through dropout.
// partial [shards, blocks, 3, WIDTH]: sums of dy*normalised, dy and dbranch. Grid: blocks of `block_rows`, shards.
extern "C" __global__ void __launch_bounds__(BLOCK_WARPS *WARP, VECTORS <= 3 ? 2 : 1)
k_norm_bwd(const uint16 *sum, const float *mean, const float *rstd, const float *gain, const uint16 *dy,
           const uint16 *dsum, uint16 *dx, uint16 *dbranch, int tokens, int block_rows, int64 base, Mask mask, const StepValues *values,
           float *partial) {
    __shared__ float columns[3][WIDTH];
    int warp = threadIdx.x / WARP, lane = lane_of_thread();
    Eight sums[3][VECTORS];
#pragma unroll
    for (int k = 0; k < 3; k++)
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) sums[k][i].x[j] = 0.0f;
    int first = blockIdx.x * block_rows, last = min(first + block_rows, tokens);
    // A row's numbers as they came, which takes half the registers, and those of the next row on their way.
    uint4 x[VECTORS], g[VECTORS], next_x[VECTORS], next_g[VECTORS];
    if (first + warp < last) load_row(sum, dy, (int64)blockIdx.y * tokens + first + warp, next_x, next_g);
    for (int t = first + warp; t < last; t += BLOCK_WARPS) {
        int64 row = (int64)blockIdx.y * tokens + t, start = row * WIDTH;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) x[i] = next_x[i], g[i] = next_g[i];
        if (t + BLOCK_WARPS < last) load_row(sum, dy, row + BLOCK_WARPS, next_x, next_g);
        float m = mean[row], r = rstd[row], a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = 8 * (lane + WARP * i);
            if (c >= WIDTH) continue;
            Eight n = widened(x[i]), d = widened(g[i]), w = gains(gain, c);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                n.x[j] = (n.x[j] - m) * r;
                sums[0][i].x[j] += d.x[j] * n.x[j];
                sums[1][i].x[j] += d.x[j];
                a += d.x[j] * w.x[j];
                b += d.x[j] * w.x[j] * n.x[j];
            }
        }
        for (int apart = 16; apart > 0; apart >>= 1) {
            a += __shfl_xor_sync(ALL_LANES, a, apart);
            b += __shfl_xor_sync(ALL_LANES, b, apart);
        }
        a *= 1.0f / WIDTH;
        b *= 1.0f / WIDTH;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = 8 * (lane + WARP * i);
            if (c >= WIDTH) continue;
            Eight n = widened(x[i]), d = widened(g[i]), w = gains(gain, c);
#pragma unroll
            for (int j = 0; j < 8; j++) d.x[j] = r * (d.x[j] * w.x[j] - a - (n.x[j] - m) * r * b);
            if (dsum) {
                Eight s = load8(dsum + start + c);
#pragma unroll
                for (int j = 0; j < 8; j++) d.x[j] += s.x[j];
            }
            store8(dx + start + c, d);
            if (dbranch) {
                drop8(d, mask, values, base + start + c);
                store8(dbranch + start + c, d);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) sums[2][i].x[j] += d.x[j];
        }
    }
    for (int w = 0; w < BLOCK_WARPS; w++) {
        if (w == warp)
#pragma unroll
            for (int k = 0; k < 3; k++)
#pragma unroll
                for (int i = 0; i < VECTORS; i++) {
                    int c = 8 * (lane + WARP * i);
                    if (c >= WIDTH) continue;
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        columns[k][c + j] = w ? columns[k][c + j] + sums[k][i].x[j] : sums[k][i].x[j];
                }
        __syncthreads();
    }
    partial += ((int64)blockIdx.y * gridDim.x + blockIdx.x) * 3 * WIDTH;
    for (int c = threadIdx.x; c < 3 * WIDTH; c += blockDim.x) partial[c] = columns[c / WIDTH][c % WIDTH];
}
