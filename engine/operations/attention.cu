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
//
// With WARPGROUP (compute capability 9.0, heads up to 64 wide) products are warpgroup instructions: right operands, and
// left ones that are tiles, are read from shared memory, where tiles lie as the hardware's swizzle has them.
#include "elementary.cuh"
#include "fixed_point.cuh"
#include "random.cuh"
#if WARPGROUP
#include "warpgroup.cuh"
#endif

#define TILE 64 // queries, and keys, of a tile: part of the definition of the backward pass
#define ROW_TILE (TILE * DP) // bytes of one plane of a tile in shared memory
#define COLUMN_TILE (COLUMNS ? DP * TILE : 0)
#define THREADS 128
// Of column planes in shared memory: where COLUMNS is 0, right operands of the second products come from global memory.
// Tiles of the loop in shared memory: with two, the next is copied while one is worked on.
#define NEXT_STAGE(stage) (STAGES == 2 ? (stage) ^ 1 : 0)
// Blocks that should fit on a processor: narrow heads need fewer registers.
#define FORWARD_BLOCKS (DP <= 32 ? 5 : 4)
#define QUERY_BLOCKS (DP <= 32 ? 4 : 3)
#define KEY_BLOCKS (DP <= 64 ? 2 : 1)
#define TILE_ALIGNMENT 512
#define PRODUCT_COLUMNS (WARPGROUP ? 32 : 16) // of the head, in one product of the backward pass
#define WEIGHT_EXPONENT 14

// The token, within 32, that stands at depth `slot` of a column plane.
__device__ __forceinline__ int slot_token(int slot) {
    return (slot & 16) + ((slot & 2) << 2) + ((slot & 12) >> 1) + (slot & 1);
}

// --- quantising one head --------------------------------------------------------------------------------------------

// Exponents are usual where a product's scale may be applied as two fp32 factors, 2**(4 - s) of either token, with no
// intermediate result that is subnormal or infinite: rounding then happens in the conversion of the integer alone.
struct Quantised {
    const float *source; // [B, T, source_width]; head h starts at column source_at + h*D
    int source_width, source_at;
    int8 *rows, *columns; // planes, or null
    int *exponents;       // [B*H, TP]
    int *least;           // [B*H, TP/TILE], least exponent of a tile of tokens, or null
    float *side;          // numbers that kernels want beside a tile: [B*H, TP/TILE, side_rows, TILE]
    int side_rows, factor_row, fold_row; // which rows get usual_factor and 2**(least - exponent); -1 for none
    int largest_usual;    // exponent; the least is LEAST_USUAL
};

// What the backward pass wants to know of queries beside their exponents; null where there is no backward pass.
struct QueryNumbers {
    const float *out, *maxima, *normalisers; // [B, T, H*D], [B, H, T], [B, H, T]
};

// Rows of what stands beside a tile of keys (of queries, in the pass over queries).
#define KEY_FACTOR 0
#define VALUE_FACTOR 1
#define KEY_FOLD 2
#define QUERY_FACTOR 0
#define DOUT_FACTOR 1
#define QUERY_FOLD 2
#define DOUT_FOLD 3
#define MAXIMUM 4
#define INVERSE 5 // of the normaliser; 0 for absent queries, so that all that follows from them is 0
#define DELTA 6
#define FORWARD_ROWS 2
#define KEY_ROWS 3
#define QUERY_ROWS 7

#define LEAST_USUAL -40

__device__ __forceinline__ float usual_factor(int s) { return s == ZERO_ROW ? 0.0f : power_of_two32(4 - s); }

#define TOKEN_LANES 8 // of a warp, for each token: four columns of every 32
#define STEP_TOKENS 32 // that a block of 256 takes at a time
#define STEPS_EACH (DP <= 128 ? TILE / STEP_TOKENS : 1) // whose loads are under way at once

// Columns d..d+3 of a head of `width`; what is absent is 0.
__device__ __forceinline__ float4 four_columns(const float *x, int d, int width, bool present) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!present) return v;
    if (width % 4 == 0) {
        if (d < width) v = *(const float4 *)(x + d);
    } else {
        if (d < width) v.x = x[d];
        if (d + 1 < width) v.y = x[d + 1];
        if (d + 2 < width) v.z = x[d + 2];
        if (d + 3 < width) v.w = x[d + 3];
    }
    return v;
}

__device__ __forceinline__ int most_of_token(int x) {
#pragma unroll
    for (int apart = TOKEN_LANES / 2; apart > 0; apart >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, apart));
    return x;
}

// The ordered sum over a head of a*b (see sums.py), in the first lane of a token: of the 32 lanes of the definition, lane
// 4i + j is component j of lane i here.
__device__ __forceinline__ float ordered_sum(const float4 (&a)[DP / 32], const float4 (&b)[DP / 32]) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < DP / 32; k++) {
        x[0] = x[0] + a[k].x * b[k].x, x[1] = x[1] + a[k].y * b[k].y;
        x[2] = x[2] + a[k].z * b[k].z, x[3] = x[3] + a[k].w * b[k].w;
    }
#pragma unroll
    for (int apart = TOKEN_LANES / 2; apart > 0; apart >>= 1)
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = x[j] + __shfl_down_sync(ALL_LANES, x[j], apart);
    return (x[0] + x[2]) + (x[1] + x[3]);
}

// A block of 256 takes TILE tokens of one head; gridDim.z tensors. The last may be dout, with `numbers`: then also
// delta = ordered sum over the head of dout*out, and the other numbers of queries.
extern "C" __global__ void __launch_bounds__(256) k_attn_quantise(Quantised q0, Quantised q1, Quantised q2, Quantised q3,
                                                                  QueryNumbers numbers, int heads, int width, int tokens,
                                                                  int padded, int *unusual, int *flag) {
    __shared__ __align__(16) uint32 tile[2][TILE][DP / 4 + 1]; // the 1 keeps tokens on different banks
    __shared__ int exponents[TILE];
    Quantised q = blockIdx.z == 0 ? q0 : blockIdx.z == 1 ? q1 : blockIdx.z == 2 ? q2 : q3;
    int t0 = blockIdx.x * TILE, head = blockIdx.y, b = head / heads, h = head % heads;
    int lane = threadIdx.x % TOKEN_LANES, own = threadIdx.x / TOKEN_LANES;
    float *side = q.side + ((int64)head * (padded / TILE) + blockIdx.x) * q.side_rows * TILE;
    bool queries = numbers.out && blockIdx.z == 3;
    int64 plane = (int64)gridDim.y * padded * DP;
#pragma unroll 1
    for (int start = 0; start < TILE; start += STEP_TOKENS * STEPS_EACH) {
        // All loads are under way before the first is waited for.
        float4 v[STEPS_EACH][DP / 32], out[STEPS_EACH][DP / 32];
#pragma unroll
        for (int e = 0; e < STEPS_EACH; e++) {
            int t = t0 + start + STEP_TOKENS * e + own;
            int64 token = (int64)b * tokens + t;
            const float *from = q.source + token * q.source_width + q.source_at + h * width;
#pragma unroll
            for (int k = 0; k < DP / 32; k++) {
                v[e][k] = four_columns(from, 32 * k + 4 * lane, width, t < tokens);
                if (queries) out[e][k] = four_columns(numbers.out + (token * heads + h) * width, 32 * k + 4 * lane, width, t < tokens);
            }
        }
#pragma unroll
        for (int e = 0; e < STEPS_EACH; e++) {
            int i = start + STEP_TOKENS * e + own, top = 0;
#pragma unroll
            for (int k = 0; k < DP / 32; k++)
                top = max(top, max(max(magnitude_bits(v[e][k].x), magnitude_bits(v[e][k].y)),
                                   max(magnitude_bits(v[e][k].z), magnitude_bits(v[e][k].w))));
            int s = token_exponent(most_of_token(top), flag);
            Factor f = token_factor(s);
            if (queries) { // what is absent adds 0 * 0
                float sum = ordered_sum(v[e], out[e]);
                if (lane == 0) side[DELTA * TILE + i] = sum;
            }
            uint32 *row = (uint32 *)(q.rows + ((int64)head * padded + t0 + i) * DP);
#pragma unroll
            for (int k = 0; k < DP / 32; k++) {
                float4 x = v[e][k];
                if (s == ZERO_ROW) x = make_float4(0.0f, 0.0f, 0.0f, 0.0f); // also where a number is not finite
                uint32 high, low;
                split4(scaled_integer(x.x, f), scaled_integer(x.y, f), scaled_integer(x.z, f), scaled_integer(x.w, f), high, low);
                if (q.rows) row[8 * k + lane] = high, row[plane / 4 + 8 * k + lane] = low;
                if (q.columns) tile[0][i][8 * k + lane] = high, tile[1][i][8 * k + lane] = low;
            }
            if (lane == 0) {
                exponents[i] = s;
                if (s != ZERO_ROW && (s < LEAST_USUAL || s > q.largest_usual)) *unusual = 1;
            }
        }
    }
    __syncthreads();
    if (q.columns) // four tokens of four columns at a time
        for (int i = threadIdx.x; i < 2 * (DP / 4) * (TILE / 4); i += blockDim.x) {
            int p = i / ((DP / 4) * (TILE / 4)), four = i / (TILE / 4) % (DP / 4), word = i % (TILE / 4);
            uint32 x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int slot = 4 * word + j;
                x[j] = tile[p][(slot & 32) + slot_token(slot & 31)][four];
            }
            uint32 low01 = __byte_perm(x[0], x[1], 0x5140), high01 = __byte_perm(x[0], x[1], 0x7362);
            uint32 low23 = __byte_perm(x[2], x[3], 0x5140), high23 = __byte_perm(x[2], x[3], 0x7362);
            uint32 y[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                           __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
            int8 *to = q.columns + p * plane + ((int64)head * DP + 4 * four) * padded + t0 + 4 * word;
#pragma unroll
            for (int j = 0; j < 4; j++) *(uint32 *)(to + (int64)j * padded) = y[j];
        }
    if (threadIdx.x < TILE) {
        int i = threadIdx.x, s = exponents[i];
        q.exponents[(int64)head * padded + t0 + i] = s;
        if (q.factor_row >= 0) side[q.factor_row * TILE + i] = usual_factor(s);
        if (q.fold_row >= 0) {
            int other = lane_of_thread(), least = warp_min(min(exponents[other], exponents[other + WARP]));
            if (least == ZERO_ROW) least = 0;
            if (i == 0) q.least[head * (padded / TILE) + blockIdx.x] = least;
            side[q.fold_row * TILE + i] = s == ZERO_ROW || least - s < -126 ? 0.0f : power_of_two32(least - s);
        }
        if (queries) {
            bool present = t0 + i < tokens;
            int64 at = (int64)head * tokens + t0 + i;
            side[MAXIMUM * TILE + i] = present ? numbers.maxima[at] : 0.0f;
            side[INVERSE * TILE + i] = present ? 1.0f / numbers.normalisers[at] : 0.0f;
        }
    }
}

// --- tiles ----------------------------------------------------------------------------------------------------------

// Where chunk `chunk` of 16 bytes of row `row` lies in a tile of `CHUNKS` of them a row: the place is turned so that
// eight rows of one chunk fall on different banks.
template <int CHUNKS> __device__ __forceinline__ uint32 place(int row, int chunk) {
    int turn = CHUNKS % 8 == 0 ? row & 7 : CHUNKS % 4 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
    return (uint32)((row * CHUNKS + (chunk ^ turn)) * 16);
}

__device__ __forceinline__ uint32 row_place(int row, int chunk) { return place<DP / 16>(row, chunk); }
__device__ __forceinline__ uint32 column_place(int d, int chunk) { return place<TILE / 16>(d, chunk); }

// Both planes of TILE rows of a row plane into shared memory.
template <int COUNT = THREADS> __device__ __forceinline__ void load_rows(uint32 to, const int8 *planes, int64 plane, int64 first) {
    constexpr int CHUNKS = TILE * (DP / 16);
    const int8 *from = planes + first * DP;
#pragma unroll 1 // unrolled, addresses take registers that there are not
    for (int n = 0; n < (2 * CHUNKS + COUNT - 1) / COUNT; n++) {
        int i = threadIdx.x + n * COUNT, low = i / CHUNKS, chunk = i % CHUNKS;
        if (2 * CHUNKS % COUNT && i >= 2 * CHUNKS) break;
        copy16(to + low * ROW_TILE + row_place(chunk / (DP / 16), chunk % (DP / 16)), from + low * plane + 16 * chunk, true);
    }
}

// Both planes of TILE tokens of a column plane into shared memory; `from` is the place of the tile's first token.
template <int COUNT = THREADS> __device__ __forceinline__ void load_columns(uint32 to, const int8 *from, int64 plane, int padded) {
#if COLUMNS
    constexpr int CHUNKS = DP * (TILE / 16);
#pragma unroll 1
    for (int n = 0; n < (2 * CHUNKS + COUNT - 1) / COUNT; n++) {
        int i = threadIdx.x + n * COUNT, low = i / CHUNKS, d = i % CHUNKS / (TILE / 16), chunk = i % (TILE / 16);
        if (2 * CHUNKS % COUNT && i >= 2 * CHUNKS) break;
        copy16(to + low * COLUMN_TILE + column_place(d, chunk), from + low * plane + (int64)d * padded + chunk * 16, true);
    }
#endif
}

// `rows` rows of TILE numbers that stand beside a tile.
__device__ __forceinline__ void load_side(float *to, const float *side, int64 tile, int rows) {
    int i = threadIdx.x; // at most THREADS chunks of four
    if (i < rows * TILE / 4) copy16(shared_address(to + 4 * i), side + tile * rows * TILE + 4 * i, true);
}

// Tiles start at a multiple of TILE_ALIGNMENT: a swizzle is a function of the address.
__device__ __forceinline__ uint32 tiles_offset(const int8 *dynamic) {
    return WARPGROUP ? -shared_address(dynamic) & (TILE_ALIGNMENT - 1) : 0;
}

// Wait until what this thread copied is in shared memory, for the tensor cores too; a barrier must follow.
__device__ __forceinline__ void wait_for_tile() {
    wait_copy_groups<0>();
#if WARPGROUP
    show_to_tensor_cores();
#endif
}

// v[n][i] = P/256 of 16 rows (from `first` on) of tile a and rows 8*from..8*from+31 of tile b, both row tiles.
__device__ __forceinline__ void scores(uint32 a, uint32 b, int first, int from, int (&v)[4][4]) {
    int high[4][4], middle[4][4];
#if WARPGROUP
    uint64 a_high = tile_descriptor<DP>(a), a_low = tile_descriptor<DP>(a + ROW_TILE);
    uint64 b_high = tile_descriptor<DP>(b + 8 * from * DP), b_low = tile_descriptor<DP>(b + ROW_TILE + 8 * from * DP);
    begin_products();
    multiply32<false>(high, a_high, b_high);
    multiply32<false>(middle, a_high, b_low);
    multiply32<true>(middle, a_low, b_high);
#pragma unroll
    for (int k = 1; k < DP / 32; k++) {
        multiply32<true>(high, a_high + 2 * k, b_high + 2 * k);
        multiply32<true>(middle, a_high + 2 * k, b_low + 2 * k);
        multiply32<true>(middle, a_low + 2 * k, b_high + 2 * k);
    }
    end_products(high, middle);
#else
    int lane = lane_of_thread();
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) high[n][i] = middle[n][i] = 0;
#pragma unroll
    for (int k = 0; k < DP / 32; k++) {
        uint32 a_high[4], a_low[4];
        uint32 at_a = a + row_place(first + (lane & 15), 2 * k + (lane >> 4));
        load_matrices(a_high, at_a);
        load_matrices(a_low, at_a + ROW_TILE);
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            uint32 at_b = b + row_place(8 * (from + n) + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1));
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
#endif
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) v[n][i] = (high[n][i] << 8) + middle[n][i];
}

// The number beside column 8n + 2t + i of a score tile, t = lane % 4; side: one row of TILE numbers.
__device__ __forceinline__ float2 beside(const float *side, int n) {
    return *(const float2 *)(side + 8 * n + 2 * (threadIdx.x & 3));
}

__device__ __forceinline__ float part(const float2 &pair, int i) { return i & 1 ? pair.y : pair.x; }

// What is done where exponents are unusual stands in functions of its own: code that seldom runs must not lie between
// lines that always do, or much of a kernel's time is the fetching of it. Numbers are those of four n, as [4][4].
__device__ __noinline__ void scaled_scores_rare(const int *v, int s0, int s1, const int *exponents, float scale, float *x) {
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 4; i++) {
            int e = 8 - (i >> 1 ? s1 : s0) - exponents[8 * n + 2 * (threadIdx.x & 3) + (i & 1)];
            x[4 * n + i] = scaled_float_rare(v[4 * n + i], e) * scale;
        }
}

// sum += fp32(v * 2**e), e0 and e1 of rows g and g + 8.
__device__ __noinline__ void add_rare(const int *v, int count, int e0, int e1, float *sum) {
    for (int i = 0; i < count; i++) sum[i] = sum[i] + scaled_float_rare(v[i], i & 2 ? e1 : e0);
}

// v = rint(p * 2**(WEIGHT_EXPONENT + least - exponent of the column)) for p in [0, 1]; below 2**-2 it is 0.
__device__ __noinline__ void weights_rare(const float *p, int least0, int least1, const int *exponents, int *v) {
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 4; i++) {
            int e = WEIGHT_EXPONENT + (i >> 1 ? least1 : least0) - exponents[8 * n + 2 * (threadIdx.x & 3) + (i & 1)];
            float x = p[4 * n + i];
            v[4 * n + i] = x > 0.0f && e >= -2 ? __float2int_rn(x * power_of_two32(e)) : 0;
        }
}

// x[from + n][i] = fp32(v * 2**(8 - s - column's exponent)) * scale for four n; s and factor (times scale) of rows g and
// g + 8. exponents (in global memory) and factors of the 64 columns.
template <int COUNT>
__device__ __forceinline__ void scaled_scores(const int (&v)[4][4], const int (&s)[2], const float (&factor)[2],
                                              const int *exponents, const float *factors, float scale, bool usual, int from,
                                              float (&x)[COUNT][4]) {
    int base = COUNT == 4 ? 0 : from;
    if (usual) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float2 column = beside(factors, from + n);
#pragma unroll
            for (int i = 0; i < 4; i++) x[base + n][i] = ((float)v[n][i] * factor[i >> 1]) * part(column, i);
        }
    } else {
        int copy[16];
        float scaled[16];
#pragma unroll
        for (int i = 0; i < 16; i++) copy[i] = v[i / 4][i % 4];
        scaled_scores_rare(copy, s[0], s[1], exponents + 8 * from, scale, scaled);
#pragma unroll
        for (int i = 0; i < 16; i++) x[base + i / 4][i % 4] = scaled[i];
    }
}

// All 64 columns.
__device__ __forceinline__ void scaled_scores(uint32 a, uint32 b, int first, const int (&s)[2], const float (&factor)[2],
                                              const int *exponents, const float *factors, float scale, bool usual,
                                              float (&x)[8][4]) {
#pragma unroll
    for (int from = 0; from < 8; from += 4) {
        int v[4][4];
        scores(a, b, first, from, v);
        scaled_scores(v, s, factor, exponents, factors, scale, usual, from, x);
    }
}

// A warp's 16 x 64 integers as left operand: parts of the two blocks of 32 depths.
struct Left {
    uint32 high[2][4], low[2][4];
};

// Parts of one block of 32 depths, from columns 8n.. of it.
__device__ __forceinline__ void set_left_block(uint32 (&high)[4], uint32 (&low)[4], const int (&q)[4][4]) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int *x = q[2 * (r >> 1)], *y = q[2 * (r >> 1) + 1];
        int i = 2 * (r & 1);
        split4(x[i], x[i + 1], y[i], y[i + 1], high[r], low[r]);
    }
}

// Right operand for columns 8n.. and 8(n+1).. of the head and block k of 32 depths, from a column tile.
__device__ __forceinline__ void right_operand(uint32 tile, const int8 *from, int64 plane, int padded, int n, int k,
                                              uint32 (&h)[4], uint32 (&l)[4]) {
    int lane = lane_of_thread();
#if COLUMNS
    uint32 at = tile + column_place(8 * n + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1));
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
    bool plain = __all_sync(ALL_LANES, is_plain(e[0]) && is_plain(e[1]));
    float factor[2] = {power_of_two32(e[0]), power_of_two32(e[1])};
#pragma unroll
    for (int n = 0; n < DP / 8; n += PRODUCT_COLUMNS / 8) {
        int high[PRODUCT_COLUMNS / 8][4], middle[PRODUCT_COLUMNS / 8][4];
#if WARPGROUP
        uint64 b_high = tile_descriptor<TILE>(tile + 8 * n * TILE), b_low = tile_descriptor<TILE>(tile + COLUMN_TILE + 8 * n * TILE);
        begin_products();
        multiply32<false>(high, left.high[0], b_high);
        multiply32<false>(middle, left.high[0], b_low);
        multiply32<true>(middle, left.low[0], b_high);
        multiply32<true>(high, left.high[1], b_high + 2);
        multiply32<true>(middle, left.high[1], b_low + 2);
        multiply32<true>(middle, left.low[1], b_high + 2);
        end_products(high, middle);
#else
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) high[j][i] = middle[j][i] = 0;
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
#endif
        if (plain) {
#pragma unroll
            for (int j = 0; j < PRODUCT_COLUMNS / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[n + j][i] = sum[n + j][i] + (float)((high[j][i] << 8) + middle[j][i]) * factor[i >> 1];
        } else {
            int v[PRODUCT_COLUMNS / 2];
            float sums[PRODUCT_COLUMNS / 2];
#pragma unroll
            for (int i = 0; i < PRODUCT_COLUMNS / 2; i++)
                v[i] = (high[i / 4][i % 4] << 8) + middle[i / 4][i % 4], sums[i] = sum[n + i / 4][i % 4];
            add_rare(v, PRODUCT_COLUMNS / 2, e[0], e[1], sums);
#pragma unroll
            for (int i = 0; i < PRODUCT_COLUMNS / 2; i++) sum[n + i / 4][i % 4] = sums[i];
        }
    }
}

// keep[i*TILE + j] = 1 where dropout keeps query i0 + i and key j0 + j; `head_base` is the address of (query 0, key 0).
template <int COUNT = THREADS>
__device__ __forceinline__ void fill_keep(uint8 *keep, int64 head_base, int context, int i0, int j0, const Mask &mask,
                                          const StepValues *values) {
    if (context % 4 == 0) { // groups of four words start at multiples of four keys
#pragma unroll 1
        for (int at = threadIdx.x; at < TILE * TILE / 4; at += COUNT) {
            int i = at / (TILE / 4), group = at % (TILE / 4);
            uint4 w = random_words4(values, mask.site, (uint64)(head_base + (int64)(i0 + i) * context + j0) / 4 + group);
            uint32 low = (w.x >= mask.threshold) | (w.y >= mask.threshold) << 8;
            uint32 high = (w.z >= mask.threshold) | (w.w >= mask.threshold) << 8;
            ((uint32 *)keep)[at] = low | high << 16;
        }
        return;
    }
    for (int at = threadIdx.x; at < TILE * (TILE / 4 + 1); at += COUNT) {
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
    const int8 *q, *k, *v;             // row planes, row planes, column planes
    const int *sq, *sk, *sv;           // [B*H, TP]
    const float *side;                 // [B*H, TP/TILE, FORWARD_ROWS, TILE], of keys
    float *out, *maxima, *normalisers; // [B, T, H*D], [B, H, T], [B, H, T]
};

// The keys after a row's query, in the tile on the diagonal.
template <int COUNT>
__device__ __forceinline__ void hide_later(float (&x)[COUNT][4], const int (&row)[2], int lane, int from, float hidden) {
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[n][i] = 8 * (from + n) + 2 * (lane & 3) + (i & 1) <= row[i >> 1] ? x[n][i] : hidden;
}

// The same where rows are keys and columns are queries.
__device__ __forceinline__ void hide_earlier(float (&x)[8][4], const int (&row)[2], int lane) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[n][i] = 8 * n + 2 * (lane & 3) + (i & 1) >= row[i >> 1] ? x[n][i] : 0.0f;
}

#define FORWARD_COLUMNS (DP < 64 ? DP : 64) // of the head at a time: the accumulators of more do not fit in registers
#define FORWARD_STAGE (2 * ROW_TILE + 2 * COLUMN_TILE)

// The least exponent of the values of each of a thread's two queries' own and earlier tokens; 0 where all are zeros.
__device__ __forceinline__ void running_least(const int *exponents, int i0, const int (&row)[2], int (&least)[2]) {
    int lane = lane_of_thread(), before = ZERO_ROW;
    for (int j = lane; j < i0; j += WARP) before = min(before, exponents[j]);
    before = warp_min(before);
    int low = exponents[i0 + lane], high = exponents[i0 + WARP + lane];
#pragma unroll
    for (int apart = 1; apart < WARP; apart <<= 1) {
        int other_low = __shfl_up_sync(ALL_LANES, low, apart), other_high = __shfl_up_sync(ALL_LANES, high, apart);
        if (lane >= apart) low = min(low, other_low), high = min(high, other_high);
    }
    low = min(low, before);
    high = min(high, __shfl_sync(ALL_LANES, low, WARP - 1));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int from_low = __shfl_sync(ALL_LANES, low, row[r] & (WARP - 1)), from_high = __shfl_sync(ALL_LANES, high, row[r] & (WARP - 1));
        int s = row[r] < WARP ? from_low : from_high;
        least[r] = s == ZERO_ROW ? 0 : s;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS) k_attn_fwd(Forward f, Sizes z, Mask mask, const StepValues *values,
                                                                    const int *unusual, int *flag) {
    extern __shared__ __align__(128) int8 dynamic[];
    int8 *memory = dynamic + tiles_offset(dynamic);
    __shared__ __align__(16) float sides[STAGES][FORWARD_ROWS * TILE];
    __shared__ __align__(16) uint8 keep[STAGES][TILE * TILE];
    uint32 q_tile = shared_address(memory), stages = q_tile + 2 * ROW_TILE;
    int i0 = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, b = head / z.heads, h = head % z.heads;
    int lane = lane_of_thread(), first = threadIdx.x / WARP * 16;
    int64 plane = (int64)z.batch * z.heads * z.padded * DP, at = (int64)head * z.padded;
    int64 head_base = ((z.first_row + b) * z.heads + h) * (int64)z.context * z.context;
    const int8 *v_from = f.v + (int64)head * DP * z.padded;
    bool usual = !*unusual;
    int row[2] = {first + (lane >> 2), first + (lane >> 2) + 8}; // within the tile
    int sq[2] = {f.sq[at + i0 + row[0]], f.sq[at + i0 + row[1]]};
    float factor[2] = {usual_factor(sq[0]) * z.scale, usual_factor(sq[1]) * z.scale};
    int least[2];
    float m[2] = {-infinity(), -infinity()};
    auto load = [&](int j0, int stage, bool with_values) {
        uint32 to = stages + stage * FORWARD_STAGE;
        load_rows(to, f.k, plane, at + j0);
        load_side(sides[stage], f.side, (at + j0) / TILE, FORWARD_ROWS);
        if (with_values) {
            load_columns(to + 2 * ROW_TILE, v_from + j0, plane, z.padded);
            if (mask.threshold) fill_keep(keep[stage], head_base, z.context, i0, j0, mask, values);
        }
        end_copy_group();
    };
    load_rows(q_tile, f.q, plane, at + i0);
    load(0, 0, false);
    running_least(f.sv + at, i0, row, least);

    // First pass over keys: the exact maximum of each row.
    for (int j0 = 0, stage = 0; j0 <= i0; j0 += TILE, stage = NEXT_STAGE(stage)) {
        if (STAGES == 1 && j0 > 0) load(j0, 0, false);
        wait_for_tile();
        __syncthreads();
        if (STAGES == 2 && j0 < i0) load(j0 + TILE, NEXT_STAGE(stage), false);
#pragma unroll
        for (int from = 0; from < 8; from += 4) {
            int v[4][4];
            float x[4][4];
            scores(q_tile, stages + stage * FORWARD_STAGE, first, from, v);
            scaled_scores(v, sq, factor, f.sk + at + j0, sides[stage] + KEY_FACTOR * TILE, z.scale, usual, from, x);
            if (j0 == i0) hide_later(x, row, lane, from, -infinity());
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) m[i >> 1] = x[n][i] > m[i >> 1] ? x[n][i] : m[i >> 1];
        }
        if (STAGES == 1) __syncthreads();
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
        __syncthreads();
        load(0, 0, true);
        for (int j0 = 0, stage = 0; j0 <= i0; j0 += TILE, stage = NEXT_STAGE(stage)) {
            if (STAGES == 1 && j0 > 0) load(j0, 0, true);
            wait_for_tile();
            __syncthreads();
            if (STAGES == 2 && j0 < i0) load(j0 + TILE, NEXT_STAGE(stage), true);
            uint32 k_tile = stages + stage * FORWARD_STAGE;
#pragma unroll
            for (int block = 0; block < 2; block++) { // of 32 keys: a depth of the product with the values
                int v[4][4], from = 4 * block;
                float x[4][4];
                scores(q_tile, k_tile, first, from, v);
                scaled_scores(v, sq, factor, f.sk + at + j0, sides[stage] + KEY_FACTOR * TILE, z.scale, usual, from, x);
                if (j0 == i0) hide_later(x, row, lane, from, -infinity());
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    uint32 sums[2] = {0, 0}; // of two numbers up to 2**30 each
                    float2 column = beside(sides[stage] + VALUE_FACTOR * TILE, from + n);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int r = i >> 1;
                        float difference = x[n][i] - m[r];
                        // Hidden scores are -infinity, of which exp is 0.
                        float p = exp32_of_nonpositive(difference < 0.0f ? difference : 0.0f);
                        sums[r] += (uint32)__float2int_rn(p * 1073741824.0f);
                        v[n][i] = __float2int_rn((p * weight[r]) * part(column, i));
                        x[n][i] = p;
                    }
                    total[0] += sums[0], total[1] += sums[1];
                }
                if (!usual) {
                    float p[16];
                    int weights[16];
#pragma unroll
                    for (int i = 0; i < 16; i++) p[i] = x[i / 4][i % 4];
                    weights_rare(p, least[0], least[1], f.sv + at + j0 + 8 * from, weights);
#pragma unroll
                    for (int i = 0; i < 16; i++) v[i / 4][i % 4] = weights[i];
                }
                if (mask.threshold)
#pragma unroll
                    for (int n = 0; n < 4; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            v[n][i] = keep[stage][row[i >> 1] * TILE + 8 * (from + n) + 2 * (lane & 3) + (i & 1)] ? v[n][i] : 0;
                uint32 left_high[4], left_low[4];
                set_left_block(left_high, left_low, v);
#if WARPGROUP
                begin_products();
#pragma unroll
                for (int n = 0; n < FORWARD_COLUMNS / 8; n += 4) {
                    uint32 columns = k_tile + 2 * ROW_TILE + 8 * n * TILE;
                    uint64 b_high = tile_descriptor<TILE>(columns) + 2 * block, b_low = tile_descriptor<TILE>(columns + COLUMN_TILE) + 2 * block;
                    multiply32<true>(high + n, left_high, b_high);
                    multiply32<true>(middle + n, left_high, b_low);
                    multiply32<true>(middle + n, left_low, b_high);
                }
                end_products(high, middle);
#else
#pragma unroll
                for (int n = 0; n < FORWARD_COLUMNS / 8; n += 2) {
                    uint32 hi[4], lo[4];
                    if (d0 + 8 * n < DP) {
                        right_operand(k_tile + 2 * ROW_TILE, v_from + j0, plane, z.padded, d0 / 8 + n, block, hi, lo);
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            uint32 b_high[2] = {hi[2 * j], hi[2 * j + 1]}, b_low[2] = {lo[2 * j], lo[2 * j + 1]};
                            mma_pair(high[n + j], middle[n + j], left_high, left_low, b_high, b_low);
                        }
                    }
                }
#endif
            }
            if (STAGES == 1) __syncthreads();
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
    const int8 *q, *k, *v, *dout;                     // row planes
    const int8 *q_columns, *k_columns, *dout_columns; // column planes
    const int *sq, *sk, *sv, *sdo;                    // [B*H, TP]
    const int *least_q, *least_k, *least_do;          // [B*H, TP/TILE]
    const float *query_side, *key_side;               // [B*H, TP/TILE, QUERY_ROWS or KEY_ROWS, TILE]
    float *dqkv;                                      // [B, T, 3*H*D]
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
    Factor f[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int top = 0;
#pragma unroll
        for (int n = 0; n < 8; n++) top = max(top, max(magnitude_bits(x[n][2 * r]), magnitude_bits(x[n][2 * r + 1])));
        top = group_max(top);
        s[r] = top >= INFINITY_BITS ? 0 : exponent_for(top);
        f[r] = factor_of(s[r]);
    }
    bool one_factor = __all_sync(ALL_LANES, f[0].second == 1.0f && f[1].second == 1.0f);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int q[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float y = x[4 * k + n][i] * f[i >> 1].first;
                if (!one_factor) y = y * f[i >> 1].second;
                q[n][i] = __float2int_rn(y);
            }
        set_left_block(left.high[k], left.low[k], q);
    }
}

// x times what dropout makes of it; rows are keys, columns are queries.
__device__ __forceinline__ void drop_keys(float (&x)[8][4], const uint8 *keep, const int (&row)[2], int lane, float factor) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[n][i] = x[n][i] * (keep[(8 * n + 2 * (lane & 3) + (i & 1)) * TILE + row[i >> 1]] ? factor : 0.0f);
}

#define QUERIES_STAGE (4 * ROW_TILE + 2 * COLUMN_TILE)
#define KEYS_STAGE (4 * ROW_TILE + 4 * COLUMN_TILE)

// p = exp(x - maximum) * inverse for x at most the maximum, but for rounding.
__device__ __forceinline__ float probability(float x, float maximum, float inverse) {
    float difference = x - maximum;
    return exp32_of_nonpositive(difference < 0.0f ? difference : 0.0f) * inverse;
}

// dq of TILE queries: over key tiles, ascending.
extern "C" __global__ void __launch_bounds__(THREADS, QUERY_BLOCKS) k_attn_bwd_queries(Backward f, Sizes z, Mask mask,
                                                                            const StepValues *values, const int *unusual,
                                                                            int *flag) {
    extern __shared__ __align__(128) int8 dynamic[];
    int8 *memory = dynamic + tiles_offset(dynamic);
    __shared__ __align__(16) float sides[STAGES][KEY_ROWS * TILE];
    __shared__ __align__(16) uint8 keep[STAGES][TILE * TILE];
    uint32 q_tile = shared_address(memory), do_tile = q_tile + 2 * ROW_TILE, stages = do_tile + 2 * ROW_TILE;
    int i0 = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, b = head / z.heads, h = head % z.heads;
    int lane = lane_of_thread(), first = threadIdx.x / WARP * 16;
    int64 plane = (int64)z.batch * z.heads * z.padded * DP, at = (int64)head * z.padded;
    int64 head_base = ((z.first_row + b) * z.heads + h) * (int64)z.context * z.context;
    const int8 *k_from = f.k_columns + (int64)head * DP * z.padded;
    bool usual = !*unusual;
    int row[2] = {first + (lane >> 2), first + (lane >> 2) + 8}; // within the tile
    int sq[2], sdo[2];
    float q_factor[2], do_factor[2], maximum[2], inverse[2], delta[2];
    const float *own = f.query_side + (at + i0) * QUERY_ROWS;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sq[r] = f.sq[at + i0 + row[r]], sdo[r] = f.sdo[at + i0 + row[r]];
        q_factor[r] = own[QUERY_FACTOR * TILE + row[r]] * z.scale, do_factor[r] = own[DOUT_FACTOR * TILE + row[r]];
        maximum[r] = own[MAXIMUM * TILE + row[r]], inverse[r] = own[INVERSE * TILE + row[r]];
        delta[r] = own[DELTA * TILE + row[r]];
    }
    float sum[DP / 8][4];
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
    auto load = [&](int j0, int stage) {
        uint32 to = stages + stage * QUERIES_STAGE;
        load_rows(to, f.k, plane, at + j0);
        load_rows(to + 2 * ROW_TILE, f.v, plane, at + j0);
        load_columns(to + 4 * ROW_TILE, k_from + j0, plane, z.padded);
        load_side(sides[stage], f.key_side, (at + j0) / TILE, KEY_ROWS);
        if (mask.threshold) fill_keep(keep[stage], head_base, z.context, i0, j0, mask, values);
        end_copy_group();
    };
    load_rows(q_tile, f.q, plane, at + i0);
    load_rows(do_tile, f.dout, plane, at + i0);
    load(0, 0);
    for (int j0 = 0, stage = 0; j0 <= i0; j0 += TILE, stage = NEXT_STAGE(stage)) {
        if (STAGES == 1 && j0 > 0) load(j0, 0);
        wait_for_tile();
        __syncthreads();
        if (STAGES == 2 && j0 < i0) load(j0 + TILE, NEXT_STAGE(stage));
        uint32 k_tile = stages + stage * QUERIES_STAGE;
        const float *side = sides[stage];
        int top[2] = {0, 0};
        float x[8][4], g[8][4];
        scaled_scores(q_tile, k_tile, first, sq, q_factor, f.sk + at + j0, side + KEY_FACTOR * TILE, z.scale, usual, x);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = probability(x[n][i], maximum[i >> 1], inverse[i >> 1]);
        scaled_scores(do_tile, k_tile + 2 * ROW_TILE, first, sdo, do_factor, f.sv + at + j0, side + VALUE_FACTOR * TILE, 1.0f, usual, g);
        if (mask.threshold)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    g[n][i] = g[n][i] *
                              (keep[stage][row[i >> 1] * TILE + 8 * n + 2 * (lane & 3) + (i & 1)] ? mask.factor : 0.0f);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = x[n][i] * (g[n][i] - delta[i >> 1]) * z.scale;
        if (j0 == i0) hide_later(x, row, lane, 0, 0.0f);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 fold = beside(side + KEY_FOLD * TILE, n);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                top[i >> 1] = max(top[i >> 1], magnitude_bits(x[n][i]));
                x[n][i] = x[n][i] * part(fold, i);
            }
        }
        if (max(top[0], top[1]) >= INFINITY_BITS) *flag = 1;
        Left left;
        int s[2];
        quantise_left(x, left, s);
        add_product(left, k_tile + 4 * ROW_TILE, k_from + j0, plane, z.padded, s,
                    f.least_k[head * (z.padded / TILE) + j0 / TILE], sum);
        if (STAGES == 1) __syncthreads();
    }
    store_gradient(f.dqkv, z, b, h, 0, i0 + first, sum);
}

// dk and dv of TILE keys: over query tiles, ascending. Rows of the warps' tiles are keys, columns are queries.
//
// Two warps share 16 keys: one computes the weights, hands them over and adds to dv; the other computes the gradient of
// the scores from them and adds to dk. Twice as many warps fit so, and one's products run beside the other's exponentials.
#define KEY_THREADS (2 * THREADS)

extern "C" __global__ void __launch_bounds__(KEY_THREADS, KEY_BLOCKS) k_attn_bwd_keys(Backward f, Sizes z, Mask mask,
                                                                          const StepValues *values, const int *unusual,
                                                                          int *flag) {
    extern __shared__ __align__(128) int8 dynamic[];
    int8 *memory = dynamic + tiles_offset(dynamic);
    __shared__ __align__(16) float sides[STAGES][QUERY_ROWS * TILE];
    __shared__ __align__(16) uint8 keep[STAGES][TILE * TILE];
    uint32 k_tile = shared_address(memory), v_tile = k_tile + 2 * ROW_TILE, stages = v_tile + 2 * ROW_TILE;
    bool makes_weights = threadIdx.x < THREADS;
    int pair = threadIdx.x / WARP % (THREADS / WARP);
    // The weights of a pair's 16 x 64 scores, by lane.
    float4 *weights = (float4 *)(memory + 4 * ROW_TILE + STAGES * KEYS_STAGE) + pair * 8 * WARP + lane_of_thread();
    int j0 = blockIdx.x * TILE, head = blockIdx.y, b = head / z.heads, h = head % z.heads;
    int lane = lane_of_thread(), first = pair * 16;
    int64 plane = (int64)z.batch * z.heads * z.padded * DP, at = (int64)head * z.padded;
    int64 head_base = ((z.first_row + b) * z.heads + h) * (int64)z.context * z.context;
    const int8 *q_from = f.q_columns + (int64)head * DP * z.padded, *do_from = f.dout_columns + (int64)head * DP * z.padded;
    bool usual = !*unusual;
    int row[2] = {first + (lane >> 2), first + (lane >> 2) + 8}; // within the tile
    const int *exponents = (makes_weights ? f.sk : f.sv) + at + j0;
    int own[2] = {exponents[row[0]], exponents[row[1]]};
    float scale = makes_weights ? z.scale : 1.0f, factor[2] = {usual_factor(own[0]) * scale, usual_factor(own[1]) * scale};
    float sum[DP / 8][4]; // dv or dk
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
    auto load = [&](int i0, int stage) {
        uint32 to = stages + stage * KEYS_STAGE;
        load_rows<KEY_THREADS>(to, f.q, plane, at + i0);
        load_rows<KEY_THREADS>(to + 2 * ROW_TILE, f.dout, plane, at + i0);
        load_columns<KEY_THREADS>(to + 4 * ROW_TILE, q_from + i0, plane, z.padded);
        load_columns<KEY_THREADS>(to + 4 * ROW_TILE + 2 * COLUMN_TILE, do_from + i0, plane, z.padded);
        load_side(sides[stage], f.query_side, (at + i0) / TILE, QUERY_ROWS);
        if (mask.threshold) fill_keep<KEY_THREADS>(keep[stage], head_base, z.context, i0, j0, mask, values);
        end_copy_group();
    };
    load_rows<KEY_THREADS>(k_tile, f.k, plane, at + j0);
    load_rows<KEY_THREADS>(v_tile, f.v, plane, at + j0);
    load(j0, 0);
    for (int i0 = j0, stage = 0; i0 < z.tokens; i0 += TILE, stage = NEXT_STAGE(stage)) {
        if (STAGES == 1 && i0 > j0) load(i0, 0);
        wait_for_tile();
        __syncthreads();
        if (STAGES == 2 && i0 + TILE < z.tokens) load(i0 + TILE, NEXT_STAGE(stage));
        uint32 q_tile = stages + stage * KEYS_STAGE, do_tile = q_tile + 2 * ROW_TILE, q_columns = do_tile + 2 * ROW_TILE;
        uint32 do_columns = q_columns + 2 * COLUMN_TILE;
        const float *side = sides[stage];
        int s[2], tile = head * (z.padded / TILE) + i0 / TILE;
        float x[8][4];
        Left left;
        if (makes_weights) {
            scaled_scores(k_tile, q_tile, first, own, factor, f.sq + at + i0, side + QUERY_FACTOR * TILE, scale, usual, x);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 maximum = beside(side + MAXIMUM * TILE, n), inverse = beside(side + INVERSE * TILE, n);
#pragma unroll
                for (int i = 0; i < 4; i++) x[n][i] = probability(x[n][i], part(maximum, i), part(inverse, i));
            }
            if (j0 == i0) hide_earlier(x, row, lane);
#pragma unroll
            for (int n = 0; n < 8; n++) weights[n * WARP] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
            asm volatile("bar.arrive %0, 64;" ::"r"(1 + pair) : "memory");
            if (mask.threshold) drop_keys(x, keep[stage], row, lane, mask.factor);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 fold = beside(side + DOUT_FOLD * TILE, n);
#pragma unroll
                for (int i = 0; i < 4; i++) x[n][i] = x[n][i] * part(fold, i);
            }
            quantise_left(x, left, s);
            add_product(left, do_columns, do_from + i0, plane, z.padded, s, f.least_do[tile], sum);
        } else {
            scaled_scores(v_tile, do_tile, first, own, factor, f.sdo + at + i0, side + DOUT_FACTOR * TILE, scale, usual, x);
            if (mask.threshold) drop_keys(x, keep[stage], row, lane, mask.factor);
            asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory");
            int top = 0;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 delta = beside(side + DELTA * TILE, n);
                float4 four = weights[n * WARP];
                float a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; i++) x[n][i] = a[i] * (x[n][i] - part(delta, i)) * z.scale;
            }
            if (j0 == i0) hide_earlier(x, row, lane);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 fold = beside(side + QUERY_FOLD * TILE, n);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    top = max(top, magnitude_bits(x[n][i]));
                    x[n][i] = x[n][i] * part(fold, i);
                }
            }
            if (top >= INFINITY_BITS) *flag = 1;
            quantise_left(x, left, s);
            add_product(left, q_columns, q_from + i0, plane, z.padded, s, f.least_q[tile], sum);
        }
        if (STAGES == 1) __syncthreads();
    }
    store_gradient(f.dqkv, z, b, h, makes_weights ? 2 : 1, j0 + first, sum);
}
