// Kernels of the linear layers. The definition is in linear.py; how an operand is kept is in numerics/fixed_point.cuh.
//
// Legend: M rows of the result, N its columns, K the depth, P the depth padded to a multiple of STEP with zeros.
// Planes are int8 [rows, P], first hi and then lo.
#include "fixed_point.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "hopper.cuh"
#endif

#define STEP 64 // depth of one stage in shared memory, in bytes

// --- quantising -----------------------------------------------------------------------------------------------------

// Write the planes of one row with `count` threads, of which this is number `i`.
__device__ __forceinline__ void write_row(const float *x, int depth, int padded, int s, int8 *hi, int8 *lo, int i,
                                          int count) {
    Factor f = factor_of(s);
    uint32 *hi4 = (uint32 *)hi, *lo4 = (uint32 *)lo;
    bool by_four = depth % 4 == 0;
    for (int k = i; k < padded / 4; k += count) {
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (by_four) {
            if (4 * k < depth) {
                float4 four = ((const float4 *)x)[k];
                v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
            }
        } else {
            for (int j = 0; j < 4; j++)
                if (4 * k + j < depth) v[j] = x[4 * k + j];
        }
        int q[4];
        for (int j = 0; j < 4; j++) q[j] = scaled_integer(v[j], f);
        split4(q[0], q[1], q[2], q[3], hi4[k], lo4[k]);
    }
}

__device__ __forceinline__ int row_top(const float *x, int depth, int i, int count) {
    int top = 0;
    if (depth % 4 == 0) {
        for (int k = i; k < depth / 4; k += count) {
            float4 v = ((const float4 *)x)[k];
            top = max(max(max(top, magnitude_bits(v.x)), magnitude_bits(v.y)), max(magnitude_bits(v.z), magnitude_bits(v.w)));
        }
    } else {
        for (int k = i; k < depth; k += count) top = max(top, magnitude_bits(x[k]));
    }
    return top;
}

__device__ __forceinline__ void raise(int (&top)[4], const float4 &v) {
    top[0] = max(top[0], magnitude_bits(v.x)), top[1] = max(top[1], magnitude_bits(v.y));
    top[2] = max(top[2], magnitude_bits(v.z)), top[3] = max(top[3], magnitude_bits(v.w));
}

// tops[c] = max(itself, magnitudes of column c in `count` rows of x); a block's threads share the columns out.
__device__ __forceinline__ void add_column_tops(const float *x, int count, int depth, int *tops) {
    if (depth % 4 == 0)
        for (int c = 4 * threadIdx.x; c < depth; c += 4 * blockDim.x) {
            int top[4] = {0, 0, 0, 0}, r = 0;
            for (; r + 4 <= count; r += 4) { // four loads under way at once
                float4 v[4];
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] = *(const float4 *)(x + (int64)(r + i) * depth + c);
#pragma unroll
                for (int i = 0; i < 4; i++) raise(top, v[i]);
            }
            for (; r < count; r++) raise(top, *(const float4 *)(x + (int64)r * depth + c));
            for (int i = 0; i < 4; i++) atomicMax(&tops[c + i], top[i]);
        }
    else
        for (int c = threadIdx.x; c < depth; c += blockDim.x) {
            int top = 0;
            for (int r = 0; r < count; r++) top = max(top, magnitude_bits(x[(int64)r * depth + c]));
            atomicMax(&tops[c], top);
        }
}

// The same for rows first..first+count of all shards, of shard_rows rows each: tops [shards, depth].
__device__ __forceinline__ void add_column_tops(const float *x, int first, int count, int depth, int shard_rows, int *tops) {
    while (count > 0) {
        int shard = first / shard_rows, part = min(count, shard_rows - first % shard_rows);
        add_column_tops(x + (int64)first * depth, part, depth, tops + (int64)shard * depth);
        first += part, count -= part;
    }
}

#define WARP_ROWS 2 // rows that each warp quantises
#define DEEP_ROWS 4 // rows that a block quantises, where it takes all its threads for one

// x [rows, depth] to planes with one exponent per row; a warp takes a row. With `tops` (zeros at first, or null) also
// the largest magnitudes of the columns of each shard.
extern "C" __global__ void k_quantise_rows(const float *x, int rows, int depth, int padded, int8 *planes, int *exponents,
                                           int shard_rows, int *tops, int *flag) {
    int block_rows = blockDim.x / WARP * WARP_ROWS, first = blockIdx.x * block_rows;
    for (int r = threadIdx.x / WARP; r < block_rows && first + r < rows; r += blockDim.x / WARP) {
        int row = first + r;
        const float *source = x + (int64)row * depth;
        int s = row_exponent(warp_max(row_top(source, depth, lane_of_thread(), WARP)), flag);
        if (lane_of_thread() == 0) exponents[row] = s;
        int8 *hi = planes + (int64)row * padded;
        write_row(source, depth, padded, s, hi, hi + (int64)rows * padded, lane_of_thread(), WARP);
    }
    if (tops) add_column_tops(x, first, min(block_rows, rows - first), depth, shard_rows, tops);
}

// The same with all threads of a block for each row, for deep rows.
extern "C" __global__ void k_quantise_deep_rows(const float *x, int rows, int depth, int padded, int8 *planes,
                                                int *exponents, int shard_rows, int *tops, int *flag) {
    __shared__ int parts[32];
    int first = blockIdx.x * DEEP_ROWS, count = min(DEEP_ROWS, rows - first);
    for (int row = first; row < first + count; row++) {
        const float *source = x + (int64)row * depth;
        int top = warp_max(row_top(source, depth, threadIdx.x, blockDim.x));
        __syncthreads();
        if (lane_of_thread() == 0) parts[threadIdx.x / WARP] = top;
        __syncthreads();
        for (int w = 0; w < (int)(blockDim.x / WARP); w++) top = max(top, parts[w]);
        int s = row_exponent(top, flag);
        if (threadIdx.x == 0) exponents[row] = s;
        int8 *hi = planes + (int64)row * padded;
        write_row(source, depth, padded, s, hi, hi + (int64)rows * padded, threadIdx.x, blockDim.x);
    }
    if (tops) add_column_tops(x, first, count, depth, shard_rows, tops);
}

#define BLOCK_ROWS 8 // rows that k_quantise_block keeps in registers

// As k_quantise_rows, for a depth that is a multiple of 4 and at most 4096: a block of padded/4 threads reads BLOCK_ROWS
// rows once, a thread four columns of each.
extern "C" __global__ void __launch_bounds__(1024) k_quantise_block(const float *x, int rows, int depth, int padded,
                                                                    int8 *planes, int *exponents, int shard_rows,
                                                                    int *tops, int *flag) {
    __shared__ int parts[BLOCK_ROWS][32];
    __shared__ Factor factors[BLOCK_ROWS];
    int first = blockIdx.x * BLOCK_ROWS, count = min(BLOCK_ROWS, rows - first), c = 4 * threadIdx.x;
    float4 v[BLOCK_ROWS];
#pragma unroll
    for (int r = 0; r < BLOCK_ROWS; r++) {
        v[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (c < depth && r < count) v[r] = *(const float4 *)(x + (int64)(first + r) * depth + c);
    }
    int column_top[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < BLOCK_ROWS; r++) {
        int top[4] = {0, 0, 0, 0};
        raise(top, v[r]);
        for (int j = 0; j < 4; j++) column_top[j] = max(column_top[j], top[j]);
        int row_top = warp_max(max(max(top[0], top[1]), max(top[2], top[3])));
        if (lane_of_thread() == 0) parts[r][threadIdx.x / WARP] = row_top;
    }
    __syncthreads();
    if (threadIdx.x < count) {
        int top = 0;
        for (int w = 0; w < (int)(blockDim.x / WARP); w++) top = max(top, parts[threadIdx.x][w]);
        int s = row_exponent(top, flag);
        exponents[first + threadIdx.x] = s;
        factors[threadIdx.x] = factor_of(s);
    }
    __syncthreads();
    uint32 *hi = (uint32 *)planes, *lo = (uint32 *)(planes + (int64)rows * padded);
#pragma unroll
    for (int r = 0; r < BLOCK_ROWS; r++)
        if (r < count) {
            Factor f = factors[r];
            int64 at = ((int64)(first + r) * padded + c) / 4;
            split4(scaled_integer(v[r].x, f), scaled_integer(v[r].y, f), scaled_integer(v[r].z, f),
                   scaled_integer(v[r].w, f), hi[at], lo[at]);
        }
    if (!tops || c >= depth) return;
    int shard = first / shard_rows;
    if ((first + count - 1) / shard_rows == shard) {
        for (int j = 0; j < 4; j++) atomicMax(&tops[(int64)shard * depth + c + j], column_top[j]);
    } else {
#pragma unroll
        for (int r = 0; r < BLOCK_ROWS; r++)
            if (r < count) {
                int top[4] = {0, 0, 0, 0};
                raise(top, v[r]);
                for (int j = 0; j < 4; j++) atomicMax(&tops[(int64)((first + r) / shard_rows) * depth + c + j], top[j]);
            }
    }
}

// tops[z, c] = largest magnitude (its encoding) of column c of shard z; tops start as zeros.
// Block (32, 8): 32 columns, 8 tokens at a time; gridDim.y pieces of the tokens.
extern "C" __global__ void k_column_tops(const float *x, int tokens, int columns, int *tops) {
    __shared__ int parts[8][32];
    int c = blockIdx.x * 32 + threadIdx.x;
    const float *source = x + (int64)blockIdx.z * tokens * columns;
    int top = 0;
    if (c < columns)
        for (int t = blockIdx.y * 8 + threadIdx.y; t < tokens; t += 8 * gridDim.y)
            top = max(top, magnitude_bits(source[(int64)t * columns + c]));
    parts[threadIdx.y][threadIdx.x] = top;
    __syncthreads();
    if (threadIdx.y == 0 && c < columns) {
        for (int y = 1; y < 8; y++) top = max(top, parts[y][threadIdx.x]);
        atomicMax(&tops[blockIdx.z * columns + c], top);
    }
}

// Columns of x [shards, tokens, columns] as rows of planes [shards, 2, columns, padded]; exponents [shards, columns];
// totals [shards, columns] (or null) += the sums of the integers. 256 threads take 64 tokens of 64 columns.
extern "C" __global__ void k_quantise_columns(const float *x, int tokens, int columns, int padded, const int *tops,
                                              int8 *planes, int *exponents, uint64 *totals, int *flag) {
    __shared__ uint32 hi_tile[64][17], lo_tile[64][17];
    __shared__ int sums[4][64];
    int j = threadIdx.x % 64, part = threadIdx.x / 64;
    int c = blockIdx.x * 64 + j, t0 = blockIdx.y * 64, z = blockIdx.z;
    const float *source = x + (int64)z * tokens * columns;
    int s = 0;
    if (c < columns) {
        int top = tops[z * columns + c];
        s = top >= INFINITY_BITS ? 0 : exponent_for(top);
        if (blockIdx.y == 0 && part == 0) {
            exponents[z * columns + c] = s;
            if (top >= INFINITY_BITS) *flag = 1;
        }
    }
    Factor f = factor_of(s);
    int sum = 0;
    for (int word = part * 4; word < part * 4 + 4; word++) {
        int q[4];
        for (int i = 0; i < 4; i++) {
            int t = t0 + 4 * word + i;
            q[i] = c < columns && t < tokens ? scaled_integer(source[(int64)t * columns + c], f) : 0;
            sum += q[i];
        }
        split4(q[0], q[1], q[2], q[3], hi_tile[j][word], lo_tile[j][word]);
    }
    sums[part][j] = sum;
    __syncthreads();
    if (totals && part == 0 && c < columns)
        atomicAdd(&totals[z * columns + c], (uint64)(int64)(sums[0][j] + sums[1][j] + sums[2][j] + sums[3][j]));
    int8 *hi = planes + (int64)z * 2 * columns * padded;
    int8 *lo = hi + (int64)columns * padded;
    for (int i = threadIdx.x; i < 64 * 16; i += blockDim.x) {
        int row = i / 16, word = i % 16, column = blockIdx.x * 64 + row;
        if (column < columns) {
            int64 at = (int64)column * padded + t0 + 4 * word;
            *(uint32 *)(hi + at) = hi_tile[row][word];
            *(uint32 *)(lo + at) = lo_tile[row][word];
        }
    }
}

// gradient[z, c] += fp32(totals * 2**-s) in gradient set z; sets lie `stride` elements apart.
extern "C" __global__ void k_linear_bias_gradient(const int64 *totals, const int *exponents, int columns, float *gradient,
                                                  int64 stride) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns) return;
    int i = blockIdx.y * columns + c;
    gradient[blockIdx.y * stride + c] += float_of_sum(totals[i], exponents[i]);
}

// --- products -------------------------------------------------------------------------------------------------------

struct Product {
    const int8 *a, *b;             // planes of A [M, P] and of B's columns [N, P]
    const int *a_exponents, *b_exponents;
    const float *bias;             // [N] or null
    float *out;                    // [M, N]
    int64 a_stride, b_stride, out_stride; // from shard to shard, in elements
    int rows, columns, padded, add;
};

// Where chunk `chunk` of 16 bytes of row `row` lies in a tile of STEP bytes a row: the place is turned so that eight
// rows of one chunk fall on different banks.
__device__ __forceinline__ uint32 place(int row, int chunk) {
    return (uint32)(row * STEP + ((chunk ^ ((row >> 1) & 3)) << 4));
}

template <int ROWS, int THREADS>
__device__ __forceinline__ void load_plane(uint32 tile, const int8 *plane, int first, int limit, int padded, int depth) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * (STEP / 16); i += THREADS) {
        int row = i / (STEP / 16), chunk = i % (STEP / 16);
        bool present = first + row < limit;
        const int8 *from = plane + (int64)(present ? first + row : 0) * padded + depth + chunk * 16;
        copy16(tile + place(row, chunk), from, present);
    }
}

// One tile of BM x BN of the result; a warp takes WM x WN of it. WIDE sums survive a depth above 65,536.
template <int BM, int BN, int WM, int WN, bool WIDE> __device__ __forceinline__ void product_tile(const Product &p) {
    constexpr int THREADS = (BM / WM) * (BN / WN) * WARP;
    constexpr int MT = WM / 16, NT = WN / 8;
    constexpr uint32 STAGE = (BM + BN) * 2 * STEP;
    extern __shared__ __align__(128) int8 memory[];
    uint32 base = shared_address(memory);
    int tiles_n = (p.columns + BN - 1) / BN;
    int m0 = (blockIdx.x / tiles_n) * BM, n0 = (blockIdx.x % tiles_n) * BN, z = blockIdx.z;
    const int8 *a_hi = p.a + z * p.a_stride, *a_lo = a_hi + (int64)p.rows * p.padded;
    const int8 *b_hi = p.b + z * p.b_stride, *b_lo = b_hi + (int64)p.columns * p.padded;
    int warp = threadIdx.x / WARP, lane = lane_of_thread();
    int wm = (warp / (BN / WN)) * WM, wn = (warp % (BN / WN)) * WN;

    int high[MT][NT][4], middle[MT][NT][4];
    double wide[WIDE ? MT : 1][WIDE ? NT : 1][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                high[m][n][i] = middle[m][n][i] = 0;
                if (WIDE) wide[m][n][i] = 0.0;
            }

    auto load = [&](int step) {
        uint32 stage = base + (step % STAGES) * STAGE;
        load_plane<BM, THREADS>(stage, a_hi, m0, p.rows, p.padded, step * STEP);
        load_plane<BM, THREADS>(stage + BM * STEP, a_lo, m0, p.rows, p.padded, step * STEP);
        load_plane<BN, THREADS>(stage + 2 * BM * STEP, b_hi, n0, p.columns, p.padded, step * STEP);
        load_plane<BN, THREADS>(stage + (2 * BM + BN) * STEP, b_lo, n0, p.columns, p.padded, step * STEP);
    };
    int steps = p.padded / STEP;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) load(s);
        end_copy_group();
    }
    for (int step = 0; step < steps; step++) {
        wait_copy_groups<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        end_copy_group();
        uint32 at = base + (step % STAGES) * STAGE;
#pragma unroll
        for (int k = 0; k < STEP / 32; k++) {
            uint32 b_high[NT][2], b_low[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                uint32 where = place(wn + n * 8 + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)), r[4];
                load_matrices(r, at + 2 * BM * STEP + where);
                b_high[n][0] = r[0], b_high[n][1] = r[1], b_high[n + 1][0] = r[2], b_high[n + 1][1] = r[3];
                load_matrices(r, at + (2 * BM + BN) * STEP + where);
                b_low[n][0] = r[0], b_low[n][1] = r[1], b_low[n + 1][0] = r[2], b_low[n + 1][1] = r[3];
            }
#pragma unroll
            for (int m = 0; m < MT; m++) {
                uint32 where = place(wm + m * 16 + (lane & 15), 2 * k + (lane >> 4)), a_high[4], a_low[4];
                load_matrices(a_high, at + where);
                load_matrices(a_low, at + BM * STEP + where);
#pragma unroll
                for (int n = 0; n < NT; n++) mma(high[m][n], a_high, b_high[n]);
#pragma unroll
                for (int n = 0; n < NT; n++) mma(middle[m][n], a_high, b_low[n]);
#pragma unroll
                for (int n = 0; n < NT; n++) mma(middle[m][n], a_low, b_high[n]);
            }
        }
        if (WIDE && ((step + 1) % (65536 / STEP) == 0 || step + 1 == steps)) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        wide[m][n][i] += (double)(((int64)high[m][n][i] << 8) + middle[m][n][i]);
                        high[m][n][i] = middle[m][n][i] = 0;
                    }
        }
    }

    const int *a_exponents = p.a_exponents + z * p.rows, *b_exponents = p.b_exponents + z * p.columns;
    float *out = p.out + z * p.out_stride;
    int column0 = n0 + wn + 2 * (lane & 3);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = m0 + wm + m * 16 + (lane >> 2) + half * 8;
            if (row >= p.rows) continue;
            int s = a_exponents[row];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int column = column0 + n * 8 + i;
                    if (column >= p.columns) continue;
                    int e = 8 - s - b_exponents[column];
                    int64 v = ((int64)high[m][n][2 * half + i] << 8) + middle[m][n][2 * half + i];
                    float y = WIDE ? (float)(wide[m][n][2 * half + i] * power_of_two64(e)) : scaled_float(v, e);
                    float *target = out + (int64)row * p.columns + column;
                    if (p.bias) y = y + p.bias[column];
                    *target = p.add ? *target + y : y;
                }
        }
}

extern "C" __global__ void __launch_bounds__(256, 1) k_product_large(Product p) { product_tile<128, 128, 64, 32, false>(p); }
extern "C" __global__ void __launch_bounds__(128) k_product_small(Product p) { product_tile<64, 64, 32, 32, false>(p); }
extern "C" __global__ void __launch_bounds__(128) k_product_deep(Product p) { product_tile<64, 64, 32, 32, true>(p); }

// --- debug tier -----------------------------------------------------------------------------------------------------

// out[m, n] (+)= a[m, 0]*b[0, n] + a[m, 1]*b[1, n] + ..., each step rounded to fp32, in this order; then + bias[n].
// Block (16, 16). Element (m, k) of a stands at m*a_row + k*a_depth, element (k, n) of b at n*b_column + k*b_depth.
extern "C" __global__ void k_debug_product(const float *a, int64 a_row, int64 a_depth, const float *b, int64 b_column,
                                           int64 b_depth, const float *bias, float *out, int rows, int columns, int depth,
                                           int add, int64 a_shard, int64 b_shard, int64 out_shard) {
    __shared__ float a_tile[16][17], b_tile[16][17];
    int n = blockIdx.x * 16 + threadIdx.x, m = blockIdx.y * 16 + threadIdx.y;
    a += blockIdx.z * a_shard, b += blockIdx.z * b_shard, out += blockIdx.z * out_shard;
    float sum = 0.0f;
    for (int k0 = 0; k0 < depth; k0 += 16) {
        int ka = k0 + threadIdx.x, kb = k0 + threadIdx.y;
        a_tile[threadIdx.y][threadIdx.x] = m < rows && ka < depth ? a[m * a_row + ka * a_depth] : 0.0f;
        b_tile[threadIdx.y][threadIdx.x] = n < columns && kb < depth ? b[n * b_column + kb * b_depth] : 0.0f;
        __syncthreads();
        for (int k = 0; k < min(16, depth - k0); k++) sum = sum + a_tile[threadIdx.y][k] * b_tile[k][threadIdx.x];
        __syncthreads();
    }
    if (m >= rows || n >= columns) return;
    float *target = out + (int64)m * columns + n;
    if (bias) sum = sum + bias[n];
    *target = add ? *target + sum : sum;
}

// gradient[z, n] += dy[0, n] + dy[1, n] + ..., each addition in fp32 and in this order.
extern "C" __global__ void k_debug_bias_gradient(const float *dy, int tokens, int columns, float *gradient, int64 stride) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= columns) return;
    const float *source = dy + (int64)blockIdx.y * tokens * columns + n;
    float sum = gradient[blockIdx.y * stride + n];
    for (int t = 0; t < tokens; t++) sum = sum + source[(int64)t * columns];
    gradient[blockIdx.y * stride + n] = sum;
}
