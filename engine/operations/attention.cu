// Kernels of causal attention; the definition is in attention.py. Compiled for one padded head width DP.
//
// Legend: B rows of the batch, H heads, T tokens, TP = T padded to a multiple of TILE, D the width
// of a head, DP = D padded to a multiple of 32.
// Row planes are int8 [B*H, TP, DP], hi and then lo: tokens along the rows. Column planes are int8 [B*H, DP, TP], hi and
// then lo: tokens along the depth of a product, in the order of `slot_token`.
//
// A warp holds 16 x 64 scores as accumulators of the tensor cores. The weights made from them are the left operand of
// the next product without leaving their registers: a depth of integers may be walked in any order, so column planes
// keep tokens in the order in which registers hold them.
#include "elementary.cuh"
#include "fixed_point.cuh"
#include "random.cuh"

#define TILE 64 // queries, and keys, of a tile: part of the definition of the backward pass
#define ROW_BYTES (DP + 16)     // of a row of a row plane in shared memory; odd multiples of 16 keep banks apart
#define COLUMN_BYTES (TILE + 16)
#define ROW_TILE (TILE * ROW_BYTES)
#define COLUMN_TILE (DP * COLUMN_BYTES)
#define THREADS 128
// Blocks that should fit on a processor: narrow heads need fewer registers.
#define FORWARD_BLOCKS (DP <= 32 ? 4 : 3)
#define QUERY_BLOCKS (DP <= 32 ? 4 : 3)
#define KEY_BLOCKS (DP <= 32 ? 3 : 1)
#define WEIGHT_EXPONENT 14
#define SHARED_COLUMNS (DP <= 64) // else right operands of the second products come straight from global memory

// The token, within 32, that stands at depth `slot` of a column plane.
__device__ __forceinline__ int slot_token(int slot) {
    return (slot & 16) + ((slot & 2) << 2) + ((slot & 12) >> 1) + (slot & 1);
}

__device__ __forceinline__ int least_exponent(const int *exponents) {
    int least = ZERO_ROW;
    for (int i = 0; i < TILE; i++) least = min(least, exponents[i]);
    return least == ZERO_ROW ? 0 : least;
}

// --- quantising one head --------------------------------------------------------------------------------------------

// Exponents are usual where a product's scale may be applied as two fp32 factors, 2**(4 - s) of either token, with no
// intermediate result that is subnormal or infinite: rounding then happens in the conversion of the integer alone.
struct Quantised {
    const float *source; // [B, T, source_width]; head h starts at column source_at + h*D
    int source_width, source_at;
    int8 *rows, *columns; // planes, or null
    int *exponents;       // [B*H, TP]
    int *least;           // [B*H, TP/TILE], least exponent of a tile of tokens
    float *fold;          // [B*H, TP], 2**(least - exponent)
    int64 largest_usual;  // exponent; the least is LEAST_USUAL
};

#define LEAST_USUAL -40

__device__ __forceinline__ float usual_factor(int s) { return s == ZERO_ROW ? 0.0f : power_of_two32(4 - s); }


// A block of 256 takes TILE tokens of one head; gridDim.z tensors.
extern "C" __global__ void k_attn_quantise(Quantised q0, Quantised q1, Quantised q2, Quantised q3, int heads, int width,
                                           int tokens, int padded, int *unusual, int *flag) {
    __shared__ __align__(16) int8 tile[2][TILE][DP + 4]; // the 4 keep tokens on different banks
    __shared__ int exponents[TILE];
    Quantised q = blockIdx.z == 0 ? q0 : blockIdx.z == 1 ? q1 : blockIdx.z == 2 ? q2 : q3;
    int t0 = blockIdx.x * TILE, head = blockIdx.y, b = head / heads, h = head % heads;
    int lane = lane_of_thread();
    for (int i = threadIdx.x / WARP; i < TILE; i += blockDim.x / WARP) {
        int t = t0 + i, top = 0;
        float v[DP / 32];
        const float *x = q.source + ((int64)b * tokens + t) * q.source_width + q.source_at + h * width;
#pragma unroll
        for (int k = 0; k < DP / 32; k++) {
            int d = lane + 32 * k;
            v[k] = t < tokens && d < width ? x[d] : 0.0f;
            top = max(top, magnitude_bits(v[k]));
        }
        int s = token_exponent(warp_max(top), flag);
        Factor f = token_factor(s);
#pragma unroll
        for (int k = 0; k < DP / 32; k++) {
            int n = s == ZERO_ROW ? 0 : scaled_integer(v[k], f);
            tile[0][i][lane + 32 * k] = (int8)high_part(n);
            tile[1][i][lane + 32 * k] = (int8)low_part(n);
        }
        if (lane == 0) {
            exponents[i] = s;
            if (s != ZERO_ROW && (s < LEAST_USUAL || s > q.largest_usual)) *unusual = 1;
        }
    }
    __syncthreads();
    int64 plane = (int64)gridDim.y * padded * DP;
    if (q.rows)
        for (int i = threadIdx.x; i < 2 * TILE * DP / 4; i += blockDim.x) {
            int p = i / (TILE * DP / 4), at = i % (TILE * DP / 4), t = at / (DP / 4), word = at % (DP / 4);
            ((uint32 *)(q.rows + p * plane + ((int64)head * padded + t0) * DP))[at] = ((const uint32 *)tile[p][t])[word];
        }
    if (q.columns)
        for (int i = threadIdx.x; i < 2 * DP * (TILE / 4); i += blockDim.x) {
            int p = i / (DP * (TILE / 4)), d = i / (TILE / 4) % DP, word = i % (TILE / 4);
            int n[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int slot = 4 * word + j;
                n[j] = tile[p][(slot & 32) + slot_token(slot & 31)][d];
            }
            *(uint32 *)(q.columns + p * plane + ((int64)head * DP + d) * padded + t0 + 4 * word) =
                pack4(n[0], n[1], n[2], n[3]);
        }
    if (threadIdx.x < TILE) {
        int64 at = (int64)head * padded + t0 + threadIdx.x;
        int s = exponents[threadIdx.x];
        q.exponents[at] = s;
        if (q.fold) {
            int least = least_exponent(exponents);
            if (threadIdx.x == 0) q.least[head * (padded / TILE) + blockIdx.x] = least;
            q.fold[at] = s == ZERO_ROW || least - s < -126 ? 0.0f : power_of_two32(least - s);
        }
    }
}

// running[t] = least exponent of tokens 0..t; a warp takes a head.
extern "C" __global__ void k_attn_running_least(const int *exponents, int heads, int padded, int *running) {
    int head = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = lane_of_thread();
    if (head >= heads) return;
    int least = ZERO_ROW;
    for (int t = lane; t < padded; t += WARP) {
        int s = exponents[(int64)head * padded + t];
        for (int apart = 1; apart < WARP; apart <<= 1) {
            int other = __shfl_up_sync(ALL_LANES, s, apart);
            if (lane >= apart) s = min(s, other);
        }
        s = min(s, least);
        running[(int64)head * padded + t] = s;
        least = __shfl_sync(ALL_LANES, s, WARP - 1);
    }
}

// delta[b, h, t] = ordered sum over a head of dout*out; a warp takes a token of a head. out, dout [B, T, H*D].
extern "C" __global__ void k_attn_delta(const float *out, const float *dout, int64 count, int heads, int width,
                                        int tokens, int padded, float *delta) {
    int64 item = (int64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    int lane = lane_of_thread();
    if (item >= count) return; // item = (b*T + t)*H + h
    float sum = 0.0f;
    for (int d = lane; d < width; d += WARP) sum = sum + dout[item * width + d] * out[item * width + d];
    sum = lanes_total(sum);
    int h = (int)(item % heads), t = (int)(item / heads % tokens);
    int64 b = item / heads / tokens;
    if (lane == 0) delta[(b * heads + h) * padded + t] = sum;
}

// --- tiles ----------------------------------------------------------------------------------------------------------

// Both planes of TILE rows of a row plane into shared memory.
__device__ __forceinline__ void load_rows(uint32 to, const int8 *planes, int64 plane, int64 first) {
#pragma unroll 4
    for (int i = threadIdx.x; i < 2 * TILE * (DP / 16); i += THREADS) {
        int p = i / (TILE * (DP / 16)), row = i / (DP / 16) % TILE, chunk = i % (DP / 16);
        copy16(to + p * ROW_TILE + row * ROW_BYTES + chunk * 16, planes + p * plane + (first + row) * DP + chunk * 16, true);
    }
}

// Both planes of TILE tokens of a column plane into shared memory; `from` is the place of the tile's first token.
__device__ __forceinline__ void load_columns(uint32 to, const int8 *from, int64 plane, int padded) {
#if SHARED_COLUMNS
#pragma unroll 4
    for (int i = threadIdx.x; i < 2 * DP * (TILE / 16); i += THREADS) {
        int p = i / (DP * (TILE / 16)), d = i / (TILE / 16) % DP, chunk = i % (TILE / 16);
        copy16(to + p * COLUMN_TILE + d * COLUMN_BYTES + chunk * 16, from + p * plane + (int64)d * padded + chunk * 16, true);
    }
#endif
}

// v[n][i] = P/256 of 16 rows (from `first` on) of tile a and the 64 rows of tile b, both row tiles. Four columns of tiles
// at a time, so that few sums are in flight.
__device__ __forceinline__ void scores(uint32 a, uint32 b, int first, int (&v)[8][4]) {
    int lane = lane_of_thread();
#pragma unroll
    for (int part = 0; part < 8; part += 4) {
        int high[4][4], middle[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) high[n][i] = middle[n][i] = 0;
#pragma unroll
        for (int k = 0; k < DP / 32; k++) {
            uint32 a_high[4], a_low[4];
            uint32 at_a = a + (first + (lane & 15)) * ROW_BYTES + 32 * k + ((lane >> 4) << 4);
            load_matrices(a_high, at_a);
            load_matrices(a_low, at_a + ROW_TILE);
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                uint32 row = 8 * (part + n) + (lane & 7) + ((lane >> 4) << 3);
                uint32 at_b = b + row * ROW_BYTES + 32 * k + (((lane >> 3) & 1) << 4);
                uint32 h[4], l[4];
                load_matrices(h, at_b);
                load_matrices(l, at_b + ROW_TILE);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    uint32 b_high[2] = {h[2 * j], h[2 * j + 1]}, b_low[2] = {l[2 * j], l[2 * j + 1]};
                    mma_pair(high[n + j], middle[n + j], a_high, a_low, b_high, b_low);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) v[part + n][i] = (high[n][i] << 8) + middle[n][i];
    }
}

// What the 64 columns of a score tile bring along.
struct Column {
    int exponent;
    float factor;
};

// x[n][i] = fp32(v * 2**(8 - s - column's exponent)) * scale; s and factor (times scale) of rows g and g + 8.
__device__ __forceinline__ void scaled_scores(const int (&v)[8][4], const int (&s)[2], const float (&factor)[2],
                                              const Column *columns, float scale, bool usual, float (&x)[8][4]) {
    int lane = lane_of_thread();
    if (usual) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[n][i] = ((float)v[n][i] * factor[i >> 1]) * columns[8 * n + 2 * (lane & 3) + (i & 1)].factor;
    } else {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[n][i] = scaled_float_rare(v[n][i], 8 - s[i >> 1] - columns[8 * n + 2 * (lane & 3) + (i & 1)].exponent) * scale;
    }
}

// A warp's 16 x 64 integers as left operand: parts of the two blocks of 32 depths.
struct Left {
    uint32 high[2][4], low[2][4];
};

__device__ __forceinline__ void set_left(Left &left, const int (&q)[8][4]) {
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int *x = q[4 * k + 2 * (r >> 1)], *y = q[4 * k + 2 * (r >> 1) + 1];
            int i = 2 * (r & 1);
            split4(x[i], x[i + 1], y[i], y[i + 1], left.high[k][r], left.low[k][r]);
        }
}

// Right operand for columns 8n.. and 8(n+1).. of the head and block k of 32 depths, from a column tile.
__device__ __forceinline__ void right_operand(uint32 tile, const int8 *from, int64 plane, int padded, int n, int k,
                                              uint32 (&h)[4], uint32 (&l)[4]) {
    int lane = lane_of_thread();
#if SHARED_COLUMNS
    uint32 at = tile + (8 * n + (lane & 7) + ((lane >> 4) << 3)) * COLUMN_BYTES + 32 * k + (((lane >> 3) & 1) << 4);
    load_matrices(h, at);
    load_matrices(l, at + COLUMN_TILE);
#else
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int64 at = (int64)(8 * (n + (j >> 1)) + (lane >> 2)) * padded + 32 * k + 16 * (j & 1) + 4 * (lane & 3);
        h[j] = *(const uint32 *)(from + at);
        l[j] = *(const uint32 *)(from + plane + at);
    }
#endif
}

// sum[n][i] += fp32(product * 2**(8 - s - least)) for the warp's 16 rows; s[half] of rows g and g + 8.
__device__ __forceinline__ void add_product(const Left &left, uint32 tile, const int8 *from, int64 plane, int padded,
                                            const int (&s)[2], int least, float (&sum)[DP / 8][4]) {
    int e[2] = {8 - s[0] - least, 8 - s[1] - least};
    bool plain = is_plain(e[0]) && is_plain(e[1]);
    float factor[2] = {power_of_two32(e[0]), power_of_two32(e[1])};
#pragma unroll
    for (int n = 0; n < DP / 8; n += 2) {
        int high[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, middle[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32 h[4], l[4];
            right_operand(tile, from, plane, padded, n, k, h, l);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint32 b_high[2] = {h[2 * j], h[2 * j + 1]}, b_low[2] = {l[2 * j], l[2 * j + 1]};
                mma_pair(high[j], middle[j], left.high[k], left.low[k], b_high, b_low);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int v = (high[j][i] << 8) + middle[j][i];
                float y = (float)v * factor[i >> 1];
                if (!plain) y = scaled_float_rare(v, e[i >> 1]);
                sum[n + j][i] = sum[n + j][i] + y;
            }
    }
}

// keep[i*TILE + j] = 1 where dropout keeps query i0 + i and key j0 + j; `head_base` is the address of (query 0, key 0).
__device__ __forceinline__ void fill_keep(uint8 *keep, int64 head_base, int context, int i0, int j0, const Mask &mask,
                                          const StepValues *values) {
    for (int at = threadIdx.x; at < TILE * (TILE / 4 + 1); at += THREADS) {
        int i = at / (TILE / 4 + 1), group = at % (TILE / 4 + 1);
        int64 base = head_base + (int64)(i0 + i) * context + j0;
        int64 number = base / 4 + group;
        int start = (int)(4 * number - base);
        if (start >= TILE) continue;
        uint4 w = random_words4(values, mask.site, (uint64)number);
        uint32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (start + k >= 0 && start + k < TILE) keep[i * TILE + start + k] = words[k] >= mask.threshold;
    }
}

__device__ __forceinline__ int group_max(int x) {
    x = max(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return max(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ uint64 group_sum(uint64 x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// --- forward --------------------------------------------------------------------------------------------------------

struct Sizes {
    int batch, heads, width, tokens, padded, context;
    int64 first_row; // row of the whole batch at which this run starts
    float scale;
};

struct Forward {
    const int8 *q, *k, *v;                   // row planes, row planes, column planes
    const int *sq, *sk, *sv, *running;       // [B*H, TP]
    float *out, *maxima, *normalisers;       // [B, T, H*D], [B, H, T], [B, H, T]
};

// The keys after a row's query, in the tile on the diagonal.
__device__ __forceinline__ void hide_later(float (&x)[8][4], const int (&row)[2], int lane, float hidden) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[n][i] = 8 * n + 2 * (lane & 3) + (i & 1) <= row[i >> 1] ? x[n][i] : hidden;
}

// The same where rows are keys and columns are queries.
__device__ __forceinline__ void hide_earlier(float (&x)[8][4], const int (&row)[2], int lane) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[n][i] = 8 * n + 2 * (lane & 3) + (i & 1) >= row[i >> 1] ? x[n][i] : 0.0f;
}

// rint(p * 2**e) for p in [0, 1], where exponents are unusual; below 2**-2 it is 0.
__device__ __noinline__ int weight_rare(float p, int e) {
    return p > 0.0f && e >= -2 ? __float2int_rn(p * power_of_two32(e)) : 0;
}

#define FORWARD_COLUMNS (DP < 64 ? DP : 64) // of the head at a time: the accumulators of more do not fit in registers

extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS) k_attn_fwd(Forward f, Sizes z, Mask mask, const StepValues *values,
                                                                    const int *unusual, int *flag) {
    extern __shared__ __align__(128) int8 memory[];
    __shared__ Column k_columns[TILE], v_columns[TILE];
    __shared__ uint8 keep[TILE * TILE];
    uint32 q_tile = shared_address(memory), k_tile = q_tile + 2 * ROW_TILE, v_tile = k_tile + 2 * ROW_TILE;
    int i0 = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, b = head / z.heads, h = head % z.heads;
    int lane = lane_of_thread(), first = threadIdx.x / WARP * 16;
    int64 plane = (int64)z.batch * z.heads * z.padded * DP, at = (int64)head * z.padded;
    int64 head_base = ((z.first_row + b) * z.heads + h) * (int64)z.context * z.context;
    bool usual = !*unusual;
    int row[2] = {first + (lane >> 2), first + (lane >> 2) + 8}; // within the tile
    int sq[2] = {f.sq[at + i0 + row[0]], f.sq[at + i0 + row[1]]};
    float factor[2] = {usual_factor(sq[0]) * z.scale, usual_factor(sq[1]) * z.scale};
    int least[2], v[8][4];
    float x[8][4], m[2] = {-infinity(), -infinity()};
    load_rows(q_tile, f.q, plane, at + i0);

    // First pass over keys: the exact maximum of each row.
    for (int j0 = 0; j0 <= i0; j0 += TILE) {
        load_rows(k_tile, f.k, plane, at + j0);
        end_copy_group();
        if (threadIdx.x < TILE) {
            int s = f.sk[at + j0 + threadIdx.x];
            k_columns[threadIdx.x] = {s, usual_factor(s)};
        }
        wait_copy_groups<0>();
        __syncthreads();
        scores(q_tile, k_tile, first, v);
        scaled_scores(v, sq, factor, k_columns, z.scale, usual, x);
        if (j0 == i0) hide_later(x, row, lane, -infinity());
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) m[i >> 1] = x[n][i] > m[i >> 1] ? x[n][i] : m[i >> 1];
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        for (int apart = 1; apart < 4; apart <<= 1) {
            float other = __shfl_xor_sync(ALL_LANES, m[r], apart);
            m[r] = other > m[r] ? other : m[r];
        }
        if (magnitude_bits(m[r]) >= INFINITY_BITS) {
            *flag = 1;
            m[r] = 0.0f;
        }
        least[r] = f.running[at + i0 + row[r]];
        least[r] = least[r] == ZERO_ROW ? 0 : least[r];
    }

    // Second pass: weights, their sum, and their product with the values.
    float normaliser[2];
    float weight[2] = {usual ? power_of_two32(WEIGHT_EXPONENT - 4 + least[0]) : 0.0f,
                       usual ? power_of_two32(WEIGHT_EXPONENT - 4 + least[1]) : 0.0f};
    for (int d0 = 0; d0 < DP; d0 += FORWARD_COLUMNS) {
        int high[FORWARD_COLUMNS / 8][4], middle[FORWARD_COLUMNS / 8][4];
        uint64 total[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < FORWARD_COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) high[n][i] = middle[n][i] = 0;
        for (int j0 = 0; j0 <= i0; j0 += TILE) {
            const int8 *v_from = f.v + (int64)head * DP * z.padded + j0;
            load_rows(k_tile, f.k, plane, at + j0);
            load_columns(v_tile, v_from, plane, z.padded);
            end_copy_group();
            if (threadIdx.x < TILE) {
                int s = f.sk[at + j0 + threadIdx.x];
                k_columns[threadIdx.x] = {s, usual_factor(s)};
                s = f.sv[at + j0 + threadIdx.x];
                v_columns[threadIdx.x] = {s, usual_factor(s)};
            }
            if (mask.threshold) fill_keep(keep, head_base, z.context, i0, j0, mask, values);
            wait_copy_groups<0>();
            __syncthreads();
            scores(q_tile, k_tile, first, v);
            scaled_scores(v, sq, factor, k_columns, z.scale, usual, x);
            if (j0 == i0) hide_later(x, row, lane, -infinity());
#pragma unroll
            for (int n = 0; n < 8; n++) {
                uint32 sums[2] = {0, 0}; // of two numbers up to 2**30 each
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int r = i >> 1, j = 8 * n + 2 * (lane & 3) + (i & 1);
                    float difference = x[n][i] - m[r];
                    // Hidden scores are -infinity, of which exp is 0.
                    float p = exp32_of_nonpositive(difference < 0.0f ? difference : 0.0f);
                    sums[r] += (uint32)__float2int_rn(p * 1073741824.0f);
                    v[n][i] = __float2int_rn((p * weight[r]) * v_columns[j].factor);
                    x[n][i] = p;
                }
                total[0] += sums[0], total[1] += sums[1];
            }
            if (!usual)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        v[n][i] = weight_rare(x[n][i], WEIGHT_EXPONENT + least[i >> 1] -
                                                           v_columns[8 * n + 2 * (lane & 3) + (i & 1)].exponent);
            if (mask.threshold)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        v[n][i] = keep[row[i >> 1] * TILE + 8 * n + 2 * (lane & 3) + (i & 1)] ? v[n][i] : 0;
            Left left;
            set_left(left, v);
#pragma unroll
            for (int n = 0; n < FORWARD_COLUMNS / 8; n += 2)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    uint32 hi[4], lo[4];
                    if (d0 + 8 * n < DP) {
                        right_operand(v_tile, v_from, plane, z.padded, d0 / 8 + n, k, hi, lo);
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            uint32 b_high[2] = {hi[2 * j], hi[2 * j + 1]}, b_low[2] = {lo[2 * j], lo[2 * j + 1]};
                            mma_pair(high[n + j], middle[n + j], left.high[k], left.low[k], b_high, b_low);
                        }
                    }
                }
            __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            normaliser[r] = (float)((double)group_sum(total[r]) * power_of_two64(-30));
            if (i0 + row[r] >= z.tokens) continue;
            if ((lane & 3) == 0 && d0 == 0) {
                f.maxima[(int64)head * z.tokens + i0 + row[r]] = m[r];
                f.normalisers[(int64)head * z.tokens + i0 + row[r]] = normaliser[r];
            }
            float *out = f.out + (((int64)b * z.tokens + i0 + row[r]) * z.heads + h) * z.width;
            int e = 8 - WEIGHT_EXPONENT - least[r];
            float down = power_of_two32(e);
#pragma unroll
            for (int n = 0; n < FORWARD_COLUMNS / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int d = d0 + 8 * n + 2 * (lane & 3) + i;
                    int64 sum = ((int64)high[n][2 * r + i] << 8) + middle[n][2 * r + i];
                    float o = (float)sum * down;
                    if (!is_plain(e)) o = scaled_float_rare(sum, e);
                    o = o / normaliser[r];
                    if (d < z.width) out[d] = mask.threshold ? o * mask.factor : o;
                }
        }
    }
}

// --- backward -------------------------------------------------------------------------------------------------------

struct Backward {
    const int8 *q, *k, *v, *dout;                      // row planes
    const int8 *q_columns, *k_columns, *dout_columns;  // column planes
    const int *sq, *sk, *sv, *sdo;                     // [B*H, TP]
    const int *least_q, *least_k, *least_do;           // [B*H, TP/TILE]
    const float *fold_q, *fold_k, *fold_do;            // [B*H, TP]
    const float *maxima, *normalisers, *delta;         // [B, H, T], [B, H, T], [B*H, TP]
    float *dqkv;                                       // [B, T, 3*H*D]
};

__device__ __forceinline__ void store_gradient(float *dqkv, const Sizes &z, int b, int h, int part, int token,
                                               const float (&sum)[DP / 8][4]) {
    int lane = lane_of_thread();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int t = token + (lane >> 2) + 8 * r;
        if (t >= z.tokens) continue;
        float *out = dqkv + (((int64)b * z.tokens + t) * 3 + part) * z.heads * z.width + h * z.width;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int d = 8 * n + 2 * (lane & 3) + i;
                if (d < z.width) out[d] = sum[n][2 * r + i];
            }
    }
}

// The integers of a warp's 16 x 64 values under one exponent per row, as left operand; s gets the exponents.
__device__ __forceinline__ void quantise_left(const float (&x)[8][4], Left &left, int (&s)[2]) {
    int q[8][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int top = 0;
#pragma unroll
        for (int n = 0; n < 8; n++) top = max(top, max(magnitude_bits(x[n][2 * r]), magnitude_bits(x[n][2 * r + 1])));
        top = group_max(top);
        s[r] = top >= INFINITY_BITS ? 0 : exponent_for(top);
        Factor f = factor_of(s[r]);
        float y[16];
#pragma unroll
        for (int n = 0; n < 16; n++) y[n] = x[n / 2][2 * r + n % 2] * f.first;
        if (f.second != 1.0f)
#pragma unroll
            for (int n = 0; n < 16; n++) y[n] = y[n] * f.second;
#pragma unroll
        for (int n = 0; n < 16; n++) q[n / 2][2 * r + n % 2] = __float2int_rn(y[n]);
    }
    set_left(left, q);
}

// x times what dropout makes of it; rows are keys, columns are queries.
__device__ __forceinline__ void drop_keys(float (&x)[8][4], const uint8 *keep, const int (&row)[2], int lane, float factor) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[n][i] = x[n][i] * (keep[(8 * n + 2 * (lane & 3) + (i & 1)) * TILE + row[i >> 1]] ? factor : 0.0f);
}

// What a row of queries brings to the backward pass; absent queries have inverse 0, so all that follows from them is 0.
struct Query {
    float m, inverse, delta, fold_q, fold_do;
};

__device__ __forceinline__ Query query_at(const Backward &f, const Sizes &z, int head, int t) {
    int64 at = (int64)head * z.padded + t, stored = (int64)head * z.tokens + t;
    Query q = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (t < z.tokens) {
        q.m = f.maxima[stored];
        q.inverse = 1.0f / f.normalisers[stored];
        q.delta = f.delta[at];
        q.fold_q = f.fold_q[at];
        q.fold_do = f.fold_do[at];
    }
    return q;
}

// dq of TILE queries: over key tiles, ascending.
extern "C" __global__ void __launch_bounds__(THREADS, QUERY_BLOCKS) k_attn_bwd_queries(Backward f, Sizes z, Mask mask,
                                                                            const StepValues *values, const int *unusual,
                                                                            int *flag) {
    extern __shared__ __align__(128) int8 memory[];
    __shared__ Column k_columns[TILE], v_columns[TILE];
    __shared__ float fold[TILE];
    __shared__ uint8 keep[TILE * TILE];
    uint32 q_tile = shared_address(memory), do_tile = q_tile + 2 * ROW_TILE, k_tile = do_tile + 2 * ROW_TILE;
    uint32 v_tile = k_tile + 2 * ROW_TILE, column_tile = v_tile + 2 * ROW_TILE;
    int i0 = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, b = head / z.heads, h = head % z.heads;
    int lane = lane_of_thread(), first = threadIdx.x / WARP * 16;
    int64 plane = (int64)z.batch * z.heads * z.padded * DP, at = (int64)head * z.padded;
    int64 head_base = ((z.first_row + b) * z.heads + h) * (int64)z.context * z.context;
    bool usual = !*unusual;
    int row[2] = {first + (lane >> 2), first + (lane >> 2) + 8}; // within the tile
    int sq[2] = {f.sq[at + i0 + row[0]], f.sq[at + i0 + row[1]]}, sdo[2] = {f.sdo[at + i0 + row[0]], f.sdo[at + i0 + row[1]]};
    float q_factor[2] = {usual_factor(sq[0]) * z.scale, usual_factor(sq[1]) * z.scale};
    float do_factor[2] = {usual_factor(sdo[0]), usual_factor(sdo[1])};
    Query query[2] = {query_at(f, z, head, i0 + row[0]), query_at(f, z, head, i0 + row[1])};
    float sum[DP / 8][4];
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
    load_rows(q_tile, f.q, plane, at + i0);
    load_rows(do_tile, f.dout, plane, at + i0);
    for (int j0 = 0; j0 <= i0; j0 += TILE) {
        const int8 *from = f.k_columns + (int64)head * DP * z.padded + j0;
        load_rows(k_tile, f.k, plane, at + j0);
        load_rows(v_tile, f.v, plane, at + j0);
        load_columns(column_tile, from, plane, z.padded);
        end_copy_group();
        if (threadIdx.x < TILE) {
            int s = f.sk[at + j0 + threadIdx.x];
            k_columns[threadIdx.x] = {s, usual_factor(s)};
            s = f.sv[at + j0 + threadIdx.x];
            v_columns[threadIdx.x] = {s, usual_factor(s)};
            fold[threadIdx.x] = f.fold_k[at + j0 + threadIdx.x];
        }
        if (mask.threshold) fill_keep(keep, head_base, z.context, i0, j0, mask, values);
        wait_copy_groups<0>();
        __syncthreads();
        int v[8][4], top[2] = {0, 0};
        float x[8][4], g[8][4];
        scores(q_tile, k_tile, first, v);
        scaled_scores(v, sq, q_factor, k_columns, z.scale, usual, x);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float difference = x[n][i] - query[i >> 1].m;
                x[n][i] = exp32_of_nonpositive(difference < 0.0f ? difference : 0.0f) * query[i >> 1].inverse;
            }
        scores(do_tile, v_tile, first, v);
        scaled_scores(v, sdo, do_factor, v_columns, 1.0f, usual, g);
        if (mask.threshold)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    g[n][i] = g[n][i] *
                              (keep[row[i >> 1] * TILE + 8 * n + 2 * (lane & 3) + (i & 1)] ? mask.factor : 0.0f);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = x[n][i] * (g[n][i] - query[i >> 1].delta) * z.scale;
        if (j0 == i0) hide_later(x, row, lane, 0.0f);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                top[i >> 1] = max(top[i >> 1], magnitude_bits(x[n][i]));
                x[n][i] = x[n][i] * fold[8 * n + 2 * (lane & 3) + (i & 1)];
            }
        if (max(top[0], top[1]) >= INFINITY_BITS) *flag = 1;
        Left left;
        int s[2];
        quantise_left(x, left, s);
        add_product(left, column_tile, from, plane, z.padded, s, f.least_k[head * (z.padded / TILE) + j0 / TILE], sum);
        __syncthreads();
    }
    store_gradient(f.dqkv, z, b, h, 0, i0 + first, sum);
}

// dk and dv of TILE keys: over query tiles, ascending. Rows of the warp's tiles are keys, columns are queries.
extern "C" __global__ void __launch_bounds__(THREADS, KEY_BLOCKS) k_attn_bwd_keys(Backward f, Sizes z, Mask mask,
                                                                      const StepValues *values, const int *unusual,
                                                                      int *flag) {
    extern __shared__ __align__(128) int8 memory[];
    __shared__ Column q_scales[TILE], do_scales[TILE];
    __shared__ Query queries[TILE];
    __shared__ uint8 keep[TILE * TILE];
    uint32 k_tile = shared_address(memory), v_tile = k_tile + 2 * ROW_TILE, q_tile = v_tile + 2 * ROW_TILE;
    uint32 do_tile = q_tile + 2 * ROW_TILE, q_columns = do_tile + 2 * ROW_TILE, do_columns = q_columns + 2 * COLUMN_TILE;
    int j0 = blockIdx.x * TILE, head = blockIdx.y, b = head / z.heads, h = head % z.heads;
    int lane = lane_of_thread(), first = threadIdx.x / WARP * 16;
    int64 plane = (int64)z.batch * z.heads * z.padded * DP, at = (int64)head * z.padded;
    int64 head_base = ((z.first_row + b) * z.heads + h) * (int64)z.context * z.context;
    bool usual = !*unusual;
    int row[2] = {first + (lane >> 2), first + (lane >> 2) + 8}; // within the tile
    int sk[2] = {f.sk[at + j0 + row[0]], f.sk[at + j0 + row[1]]}, sv[2] = {f.sv[at + j0 + row[0]], f.sv[at + j0 + row[1]]};
    float k_factor[2] = {usual_factor(sk[0]) * z.scale, usual_factor(sk[1]) * z.scale};
    float v_factor[2] = {usual_factor(sv[0]), usual_factor(sv[1])};
    float dk[DP / 8][4], dv[DP / 8][4];
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) dk[n][i] = dv[n][i] = 0.0f;
    load_rows(k_tile, f.k, plane, at + j0);
    load_rows(v_tile, f.v, plane, at + j0);
    for (int i0 = j0; i0 < z.tokens; i0 += TILE) {
        const int8 *q_from = f.q_columns + (int64)head * DP * z.padded + i0;
        const int8 *do_from = f.dout_columns + (int64)head * DP * z.padded + i0;
        load_rows(q_tile, f.q, plane, at + i0);
        load_rows(do_tile, f.dout, plane, at + i0);
        load_columns(q_columns, q_from, plane, z.padded);
        load_columns(do_columns, do_from, plane, z.padded);
        end_copy_group();
        if (threadIdx.x < TILE) {
            int s = f.sq[at + i0 + threadIdx.x];
            q_scales[threadIdx.x] = {s, usual_factor(s)};
            s = f.sdo[at + i0 + threadIdx.x];
            do_scales[threadIdx.x] = {s, usual_factor(s)};
            queries[threadIdx.x] = query_at(f, z, head, i0 + threadIdx.x);
        }
        if (mask.threshold) fill_keep(keep, head_base, z.context, i0, j0, mask, values);
        wait_copy_groups<0>();
        __syncthreads();
        int v[8][4], top = 0, s[2], tile = head * (z.padded / TILE) + i0 / TILE;
        float a[8][4], x[8][4];
        Left left;
        scores(k_tile, q_tile, first, v);
        scaled_scores(v, sk, k_factor, q_scales, z.scale, usual, a);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int c = 8 * n + 2 * (lane & 3) + (i & 1);
                float difference = a[n][i] - queries[c].m;
                a[n][i] = exp32_of_nonpositive(difference < 0.0f ? difference : 0.0f) * queries[c].inverse;
            }
        if (j0 == i0) hide_earlier(a, row, lane);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = a[n][i];
        if (mask.threshold) drop_keys(x, keep, row, lane, mask.factor);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = x[n][i] * queries[8 * n + 2 * (lane & 3) + (i & 1)].fold_do;
        quantise_left(x, left, s);
        add_product(left, do_columns, do_from, plane, z.padded, s, f.least_do[tile], dv);
        scores(v_tile, do_tile, first, v);
        scaled_scores(v, sv, v_factor, do_scales, 1.0f, usual, x);
        if (mask.threshold) drop_keys(x, keep, row, lane, mask.factor);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int c = 8 * n + 2 * (lane & 3) + (i & 1);
                x[n][i] = a[n][i] * (x[n][i] - queries[c].delta) * z.scale;
            }
        if (j0 == i0) hide_earlier(x, row, lane);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                top = max(top, magnitude_bits(x[n][i]));
                x[n][i] = x[n][i] * queries[8 * n + 2 * (lane & 3) + (i & 1)].fold_q;
            }
        if (top >= INFINITY_BITS) *flag = 1;
        quantise_left(x, left, s);
        add_product(left, q_columns, q_from, plane, z.padded, s, f.least_q[tile], dk);
        __syncthreads();
    }
    store_gradient(f.dqkv, z, b, h, 1, j0 + first, dk);
    store_gradient(f.dqkv, z, b, h, 2, j0 + first, dv);
}
