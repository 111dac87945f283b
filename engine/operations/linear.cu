// Kernels of the linear layers. The definition is in linear.py; how an operand is kept is in numerics/fixed_point.cuh.
//
// Legend: M rows of the result, N its columns, K the depth, P the depth padded to a multiple of STEP with zeros.
// Planes are int8 [rows, P], first hi and then lo.
#include "epilogue.cuh"
#include "fixed_point.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "hopper.cuh"
#endif

#define STEP 64 // depth of one stage in shared memory, in bytes

// gradient[c] (+)= the tree over shards of fp32(totals * 2**-s); totals and exponents [shards, columns].
extern "C" __global__ void k_linear_bias_gradient(const int64 *totals, const int *exponents, int columns, int shards,
                                                  float *gradient, int add) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns) return;
    float sum = shard_tree(shards, [&](int z) { return float_of_sum(totals[z * columns + c], exponents[z * columns + c]); });
    gradient[c] = add ? gradient[c] + sum : sum;
}

// --- products -------------------------------------------------------------------------------------------------------

struct Product {
    const int8 *a, *b;             // planes of A [M, P] and of B's columns [N, P]
    const int *a_exponents, *b_exponents;
    float *out;                    // [M, N]
    int64 a_stride, b_stride, out_stride; // from shard to shard, in elements
    int rows, columns, padded, unused;
    Epilogue epilogue;
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
template <int BM, int BN, int WM, int WN, bool WIDE, bool RESIDUAL>
__device__ __forceinline__ void product_tile(const Product &p) {
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
                    int64 at = (int64)row * p.columns + column;
                    finish<RESIDUAL>(p.epilogue, y, at, column, out + at);
                }
        }
}

#define PRODUCT(NAME, THREADS, BLOCKS, ...)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(Product p) { product_tile<__VA_ARGS__, false>(p); } \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME##_residual(Product p) { product_tile<__VA_ARGS__, true>(p); }

PRODUCT(k_product_large, 256, 1, 128, 128, 64, 32, false)
PRODUCT(k_product_small, 128, 1, 64, 64, 32, 32, false)
PRODUCT(k_product_deep, 128, 1, 64, 64, 32, 32, true)

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

// gradient[z, n] = dy[0, n] + dy[1, n] + ..., each addition in fp32 and in this order.
extern "C" __global__ void k_debug_bias_gradient(const float *dy, int tokens, int columns, float *gradient) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= columns) return;
    const float *source = dy + (int64)blockIdx.y * tokens * columns + n;
    float sum = 0.0f;
    for (int t = 0; t < tokens; t++) sum = sum + source[(int64)t * columns];
    gradient[(int64)blockIdx.y * columns + n] = sum;
}
