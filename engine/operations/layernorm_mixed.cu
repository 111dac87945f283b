// LayerNorm of the tier prod, with the residual sum before it; formulas as in layernorm.py and residual_add.py, sums in
// fp32. Sums over tokens: each block adds the rows that it owns, k_combine the blocks, both in a fixed order. Compiled
// with SUMS where somebody wants them, and with NORMALISED where the backward pass finds normalised rows: the result y
// is these where there are no parameters.
#include "half_rows.cuh"

#define EPSILON 1e-5f
#define VECTORS ((WIDTH / 8 + WARP - 1) / WARP)
// In the backward pass a block takes several rows at once.
#define ROWS_AT_ONCE (ROW_THREADS < 8 * WARP ? 8 * WARP / ROW_THREADS : 1)
#define BACKWARD_THREADS (ROWS_AT_ONCE * ROW_THREADS)
// Threads that a multiprocessor has registers for.
#define PROCESSOR_THREADS (SUMS ? (OWN > 8 ? 512 : 768) : (OWN > 12 ? 768 : 1024))
#define BACKWARD_BLOCKS (PROCESSOR_THREADS / BACKWARD_THREADS > 0 ? PROCESSOR_THREADS / BACKWARD_THREADS : 1)

// A warp takes a row of WIDTH elements and keeps it in registers. Where `branch` is not null: sum = x + dropout(branch),
// which may take the place of branch; else sum is x.
extern "C" __global__ void __launch_bounds__(256, VECTORS == 1 ? 8 : VECTORS == 2 ? 5 : VECTORS <= 4 ? 4 : 1)
k_norm_fwd(const uint16 *x, const uint16 *branch, const float *gain, const float *bias, int rows, uint16 *sum, uint16 *y,
           float *mean, float *rstd, int64 base, Mask mask, const StepValues *values) {
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = lane_of_thread();
    if (row >= rows) return;
    row = rows - 1 - row; // the last tokens first: the product before has left them in the cache
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

// A row as one thread of the backward pass sees it.
struct Row {
    OwnWords x, dy, dsum;
    float mean, rstd;

    __device__ __forceinline__ float normalised(float x) const { return NORMALISED ? x : (x - mean) * rstd; }
};

// Sums of a and b over the threads of a row. All threads of a block call it together; `turn` counts the calls.
__device__ __forceinline__ void row_totals(float &a, float &b, int turn) {
    for (int apart = 16; apart > 0; apart >>= 1) {
        a += __shfl_xor_sync(ALL_LANES, a, apart);
        b += __shfl_xor_sync(ALL_LANES, b, apart);
    }
#if ROW_WARPS > 1
    // Two places by turns: who writes again has waited for those who read.
    __shared__ float warps[2][ROWS_AT_ONCE * ROW_WARPS][2];
    int warp = threadIdx.x / WARP;
    if (lane_of_thread() == 0) warps[turn & 1][warp][0] = a, warps[turn & 1][warp][1] = b;
    __syncthreads();
    const float(*mine)[2] = &warps[turn & 1][warp / ROW_WARPS * ROW_WARPS];
    a = b = 0.0f;
#pragma unroll
    for (int w = 0; w < ROW_WARPS; w++) a += mine[w][0], b += mine[w][1];
#endif
}

// x: normalised rows where NORMALISED, else what was normalised.
// dx = LayerNorm's gradient (+ dsum where not null); dbranch (where not null, else it is dx) = dx through dropout.
// partial [shards, blocks, 3, WIDTH]: sums of dy*normalised, dy and dbranch.
// Grid: blocks of `block_rows`, shards. A block has BACKWARD_THREADS.
extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS)
k_norm_bwd(const uint16 *x, const float *mean, const float *rstd, const float *gain, const uint16 *dy,
           const uint16 *dsum, uint16 *dx, uint16 *dbranch, int tokens, int block_rows, int64 base, Mask mask,
           const StepValues *values, float *partial) {
    int line = threadIdx.x / ROW_THREADS;
    bool inside = column_of(PIECES - 1) < WIDTH;
    Own w = gain && inside ? load_own(gain) : filled(1.0f);
#if SUMS
    Own sums[3] = {filled(0.0f), filled(0.0f), filled(0.0f)};
#endif
    int first = blockIdx.x * block_rows, last = min(first + block_rows, tokens);
    int64 shard = (int64)blockIdx.y * tokens;
    // The next row is on its way while this one is computed.
    Row next;
    auto fetch = [&](int t) {
        if (!inside || t >= last) return;
        int64 at = (shard + t) * WIDTH;
        next.x = load_own(x + at);
        next.dy = load_own(dy + at);
        if (dsum) next.dsum = load_own(dsum + at);
        if (!NORMALISED) next.mean = mean[shard + t];
        next.rstd = rstd[shard + t];
    };
    fetch(first + line);
    for (int from = first, turn = 0; from < last; from += ROWS_AT_ONCE, turn++) {
        int t = from + line;
        bool mine = inside && t < last;
        Row row = next;
        fetch(t + ROWS_AT_ONCE);
        float a = 0.0f, b = 0.0f;
        if (mine) {
            Own n = widened(row.x), d = widened(row.dy);
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                float normalised = row.normalised(n.x[j]);
#if SUMS
                sums[0].x[j] += d.x[j] * normalised;
                sums[1].x[j] += d.x[j];
#endif
                a += d.x[j] * w.x[j];
                b += d.x[j] * w.x[j] * normalised;
            }
        }
        row_totals(a, b, turn);
        if (!mine) continue;
        a *= 1.0f / WIDTH;
        b *= 1.0f / WIDTH;
        Own n = widened(row.x), d = widened(row.dy);
#pragma unroll
        for (int j = 0; j < OWN; j++)
            d.x[j] = row.rstd * (d.x[j] * w.x[j] - a - row.normalised(n.x[j]) * b);
        if (dsum) {
            Own s = widened(row.dsum);
#pragma unroll
            for (int j = 0; j < OWN; j++) d.x[j] += s.x[j];
        }
        int64 at = (shard + t) * WIDTH;
        store_own(dx + at, narrowed(d));
        if (dbranch) {
            drop_own(d, mask, values, base + at);
            store_own(dbranch + at, narrowed(d));
        }
#if SUMS
#pragma unroll
        for (int j = 0; j < OWN; j++) sums[2].x[j] += d.x[j];
#endif
    }
#if SUMS
    partial += ((int64)blockIdx.y * gridDim.x + blockIdx.x) * 3 * WIDTH;
#if ROWS_AT_ONCE == 1
    if (inside)
        for (int k = 0; k < 3; k++) store_own(partial + k * WIDTH, sums[k]);
#else
    __shared__ __align__(16) float columns[ROWS_AT_ONCE][3][WIDTH];
    if (inside)
        for (int k = 0; k < 3; k++) store_own(columns[line][k], sums[k]);
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * WIDTH; i += blockDim.x) {
        float total = 0.0f;
#pragma unroll
        for (int l = 0; l < ROWS_AT_ONCE; l++) total += columns[l][i / WIDTH][i % WIDTH];
        partial[i] = total;
    }
#endif
#endif
}
