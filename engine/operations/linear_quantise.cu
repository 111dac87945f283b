// Operands of the linear layers: from fp32, or from what makes them, to int8 planes. The definition is in linear.py; how
// an operand is kept is in numerics/fixed_point.cuh. Planes are int8 [rows, P], first hi and then lo; P is the depth
// padded with zeros.
//
// Where an elementwise operation stands before a linear layer, its values are computed here, as often as they are
// quantised: that costs less than writing them as fp32 and reading them back.
#include "elementary.cuh"
#include "fixed_point.cuh"
#include "logits.cuh"
#include "random.cuh"

// --- where values come from -----------------------------------------------------------------------------------------

enum Kind { PLAIN, NORMALISED, GELU, RELU, MASKED, LOGITS };

// Values [tokens, width]: x itself, or x through an operation; all but PLAIN need a width that is a multiple of 4.
struct Source {
    const float *x;
    const float *mean, *rstd, *gain, *bias; // of NORMALISED, gain and bias may be null; of LOGITS, maxima and sums
    const int *targets;                     // of LOGITS, whose gradient is meant; mask.factor is the loss scale
    const StepValues *values;               // of MASKED: dropout, whose element 0 has address `base`
    int64 base;
    Mask mask;
    int kind;
};

__device__ __forceinline__ float relu32(float x) { return x <= 0.0f ? 0.0f : x; }

// Columns c..c+3 of token t.
template <int KIND> __device__ __forceinline__ float4 four_values(const Source &f, int64 t, int c, int width) {
    float4 v = *(const float4 *)(f.x + t * width + c);
    if (KIND == GELU) return make_float4(gelu32(v.x), gelu32(v.y), gelu32(v.z), gelu32(v.w));
    if (KIND == RELU) return make_float4(relu32(v.x), relu32(v.y), relu32(v.z), relu32(v.w));
    if (KIND == MASKED) {
        uint4 w = random_words4(f.values, f.mask.site, (uint64)(f.base + t * width + c) / 4);
        return make_float4(dropped(v.x, w.x, f.mask.threshold, f.mask.factor), dropped(v.y, w.y, f.mask.threshold, f.mask.factor),
                           dropped(v.z, w.z, f.mask.threshold, f.mask.factor), dropped(v.w, w.w, f.mask.threshold, f.mask.factor));
    }
    if (KIND == LOGITS) {
        float m = f.mean[t], sum = f.rstd[t], scale = f.mask.factor;
        int target = f.targets[t];
        return make_float4(logit_gradient(v.x, m, sum, scale, c == target), logit_gradient(v.y, m, sum, scale, c + 1 == target),
                           logit_gradient(v.z, m, sum, scale, c + 2 == target), logit_gradient(v.w, m, sum, scale, c + 3 == target));
    }
    if (KIND == NORMALISED) {
        float m = f.mean[t], r = f.rstd[t];
        v = make_float4((v.x - m) * r, (v.y - m) * r, (v.z - m) * r, (v.w - m) * r);
        if (f.gain) {
            float4 gain = *(const float4 *)(f.gain + c), bias = *(const float4 *)(f.bias + c);
            v = make_float4(v.x * gain.x + bias.x, v.y * gain.y + bias.y, v.z * gain.z + bias.z, v.w * gain.w + bias.w);
        }
    }
    return v;
}

__device__ __forceinline__ void raise(int (&top)[4], const float4 &v) {
    top[0] = max(top[0], magnitude_bits(v.x)), top[1] = max(top[1], magnitude_bits(v.y));
    top[2] = max(top[2], magnitude_bits(v.z)), top[3] = max(top[3], magnitude_bits(v.w));
}

// Raise four column maxima. Most are high enough already: reading first, if only an older number, spares the rest.
__device__ __forceinline__ void raise_tops(int *tops, const int (&top)[4]) {
    int4 old = *(const int4 *)tops;
    if (top[0] > old.x) atomicMax(&tops[0], top[0]);
    if (top[1] > old.y) atomicMax(&tops[1], top[1]);
    if (top[2] > old.z) atomicMax(&tops[2], top[2]);
    if (top[3] > old.w) atomicMax(&tops[3], top[3]);
}

__device__ __forceinline__ int largest(const float4 &v) {
    return max(max(magnitude_bits(v.x), magnitude_bits(v.y)), max(magnitude_bits(v.z), magnitude_bits(v.w)));
}

__device__ __forceinline__ void split_values(const float4 &v, Factor f, uint32 &hi, uint32 &lo) {
    split4(scaled_integer(v.x, f), scaled_integer(v.y, f), scaled_integer(v.z, f), scaled_integer(v.w, f), hi, lo);
}

// --- rows, of any depth ---------------------------------------------------------------------------------------------

// Write the planes of one row with `count` threads, of which this is number `i`.
__device__ __forceinline__ void write_row(const float *x, int depth, int padded, int s, int8 *hi, int8 *lo, int i,
                                          int count) {
    Factor f = factor_of(s);
    uint32 *hi4 = (uint32 *)hi, *lo4 = (uint32 *)lo;
    bool by_four = depth % 4 == 0;
    for (int k = i; k < padded / 4; k += count) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (by_four) {
            if (4 * k < depth) v = ((const float4 *)x)[k];
        } else {
            if (4 * k < depth) v.x = x[4 * k];
            if (4 * k + 1 < depth) v.y = x[4 * k + 1];
            if (4 * k + 2 < depth) v.z = x[4 * k + 2];
            if (4 * k + 3 < depth) v.w = x[4 * k + 3];
        }
        split_values(v, f, hi4[k], lo4[k]);
    }
}

__device__ __forceinline__ int row_top(const float *x, int depth, int i, int count) {
    int top = 0;
    if (depth % 4 == 0)
        for (int k = i; k < depth / 4; k += count) top = max(top, largest(((const float4 *)x)[k]));
    else
        for (int k = i; k < depth; k += count) top = max(top, magnitude_bits(x[k]));
    return top;
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

// Rows first..first+count of x [rows, depth] to planes, a warp for each row in turn.
__device__ __forceinline__ void quantise_with_warps(const float *x, int first, int count, int rows, int depth, int padded,
                                                    int8 *planes, int *exponents, int *flag) {
    for (int r = threadIdx.x / WARP; r < count; r += blockDim.x / WARP) {
        int row = first + r;
        const float *source = x + (int64)row * depth;
        int s = row_exponent(warp_max(row_top(source, depth, lane_of_thread(), WARP)), flag);
        if (lane_of_thread() == 0) exponents[row] = s;
        int8 *hi = planes + (int64)row * padded;
        write_row(source, depth, padded, s, hi, hi + (int64)rows * padded, lane_of_thread(), WARP);
    }
}

// x [rows, depth] to planes with one exponent per row. With `tops` (zeros at first, or null) also the largest magnitudes
// of the columns of each shard.
extern "C" __global__ void k_quantise_rows(const float *x, int rows, int depth, int padded, int8 *planes, int *exponents,
                                           int shard_rows, int *tops, int *flag) {
    int block_rows = blockDim.x / WARP * WARP_ROWS, first = blockIdx.x * block_rows, count = min(block_rows, rows - first);
    quantise_with_warps(x, first, count, rows, depth, padded, planes, exponents, flag);
    if (tops) add_column_tops(x, first, count, depth, shard_rows, tops);
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

// --- rows kept in registers -----------------------------------------------------------------------------------------

#define GROUP_ROWS 4  // rows that a group of threads keeps in registers at a time
#define MOST_GROUPS 8 // of a block

struct Rows {
    int rows, depth, padded;
    int8 *planes;
    int *exponents;
    int shard_rows, rounds; // each group takes `rounds` times GROUP_ROWS rows
    int *tops, *flag;       // tops [shards, depth], zeros at first, or null
};

// The largest magnitudes of columns that a block has found, into those of a shard: `top` are a thread's columns c..c+3,
// `scratch` holds one number for each column. Together, so that an address is met once by each block, in whole lines.
__device__ __forceinline__ void merge_tops(int *tops, const int (&top)[4], int c, int depth, bool first_group, int *scratch) {
    if (first_group) *(int4 *)(scratch + c) = make_int4(top[0], top[1], top[2], top[3]);
    __syncthreads();
    if (!first_group)
        for (int j = 0; j < 4; j++) atomicMax(&scratch[c + j], top[j]);
    __syncthreads();
    for (int i = threadIdx.x; i < depth; i += blockDim.x) // reading first, if only an older number, spares most of the rest
        if (scratch[i] > tops[i]) atomicMax(&tops[i], scratch[i]);
    __syncthreads();
}

// Rows as integers, for a depth that is a multiple of 4 and at most 4096: a block is some groups of padded/4 threads, and a
// thread takes four columns of each row of its group. `value(row, c)` gives columns c..c+3 of a row.
template <typename Value> __device__ __forceinline__ void quantise_rows(const Rows &p, Value value) {
    extern __shared__ __align__(16) int column_tops[]; // [padded], where p.tops
    __shared__ int parts[GROUP_ROWS][32];
    __shared__ Factor factors[MOST_GROUPS * GROUP_ROWS];
    int width = p.padded / 4, groups = blockDim.x / width, group = threadIdx.x / width, inside = threadIdx.x - group * width;
    int c = 4 * inside, column_top[4] = {0, 0, 0, 0}, shard = -1, group_warps = width / WARP;
    uint32 *hi = (uint32 *)p.planes, *lo = (uint32 *)(p.planes + (int64)p.rows * p.padded);
    for (int round = 0; round < p.rounds; round++) {
        int block_rows = groups * GROUP_ROWS, start = (blockIdx.x * p.rounds + round) * block_rows;
        int all = min(block_rows, p.rows - start), first = start + group * GROUP_ROWS;
        if (all <= 0) break;
        float4 v[GROUP_ROWS];
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
            v[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (c < p.depth && first + r < p.rows) v[r] = value(first + r, c);
        }
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
            int row_top = warp_max(largest(v[r]));
            if (lane_of_thread() == 0) parts[r][threadIdx.x / WARP] = row_top;
        }
        if (p.tops) {
            int of_first = start / p.shard_rows;
            if (of_first == (start + all - 1) / p.shard_rows) {
                if (of_first != shard && shard >= 0) {
                    merge_tops(p.tops + (int64)shard * p.depth, column_top, c, p.depth, group == 0, column_tops);
                    for (int j = 0; j < 4; j++) column_top[j] = 0;
                }
                shard = of_first;
#pragma unroll
                for (int r = 0; r < GROUP_ROWS; r++) raise(column_top, v[r]);
            } else { // rows of several shards
                for (int r = 0; r < GROUP_ROWS; r++)
                    if (c < p.depth && first + r < p.rows) {
                        int top[4] = {0, 0, 0, 0};
                        raise(top, r == 0 ? v[0] : r == 1 ? v[1] : r == 2 ? v[2] : v[3]);
                        raise_tops(p.tops + (int64)((first + r) / p.shard_rows) * p.depth + c, top);
                    }
            }
        }
        __syncthreads();
        if (threadIdx.x < all) {
            int top = 0, of = threadIdx.x / GROUP_ROWS * group_warps;
            for (int w = 0; w < group_warps; w++) top = max(top, parts[threadIdx.x % GROUP_ROWS][of + w]);
            int s = row_exponent(top, p.flag);
            p.exponents[start + threadIdx.x] = s;
            factors[threadIdx.x] = factor_of(s);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++)
            if (first + r < p.rows) {
                int64 at = ((int64)(first + r) * p.padded + c) / 4;
                split_values(v[r], factors[group * GROUP_ROWS + r], hi[at], lo[at]);
            }
    }
    if (p.tops && shard >= 0) merge_tops(p.tops + (int64)shard * p.depth, column_top, c, p.depth, group == 0, column_tops);
}

#define QUANTISE(NAME, KIND)                                                                                           \
    extern "C" __global__ void __launch_bounds__(1024) NAME(Source f, Rows p) {                                        \
        quantise_rows(p, [&](int row, int c) { return four_values<KIND>(f, row, c, p.depth); });                       \
    }

QUANTISE(k_quantise_plain, PLAIN)
QUANTISE(k_quantise_gelu, GELU)
QUANTISE(k_quantise_relu, RELU)
QUANTISE(k_quantise_masked, MASKED)

__device__ __forceinline__ float gelu_backward(float x, float dy) { return dy * gelu_grad32(x); }
__device__ __forceinline__ float relu_backward(float x, float dy) { return x <= 0.0f ? 0.0f : dy; }

// `gradient` holds dy, becomes dx = FUNCTION(x, dy), and dx goes to planes.
#define QUANTISE_BACKWARD(NAME, FUNCTION)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024) NAME(const float *x, float *gradient, Rows p) {                 \
        quantise_rows(p, [&](int row, int c) {                                                                         \
            int64 at = (int64)row * p.depth + c;                                                                       \
            float4 v = *(const float4 *)(x + at), g = *(const float4 *)(gradient + at);                                \
            g = make_float4(FUNCTION(v.x, g.x), FUNCTION(v.y, g.y), FUNCTION(v.z, g.z), FUNCTION(v.w, g.w));           \
            *(float4 *)(gradient + at) = g;                                                                            \
            return g;                                                                                                  \
        });                                                                                                            \
    }

QUANTISE_BACKWARD(k_gelu_bwd_quantise, gelu_backward)
QUANTISE_BACKWARD(k_relu_bwd_quantise, relu_backward)

// --- the gradient of logits ----------------------------------------------------------------------------------------

#define LOGIT_ROWS 4 // rows that a block takes at a time

// Rows of the gradient of logits, of any multiple of 4 columns. exp32 does not fall where its argument rises, so a row's
// largest magnitude is the target's or that of the largest other logit: others [rows]. That needs no pass of its own.
extern "C" __global__ void __launch_bounds__(256) k_quantise_logits(Source f, const float *others, Rows p) {
    __shared__ Factor factors[LOGIT_ROWS];
    int first = blockIdx.x * LOGIT_ROWS, count = min(LOGIT_ROWS, p.rows - first);
    if (threadIdx.x < count) {
        int row = first + threadIdx.x;
        float m = f.mean[row], sum = f.rstd[row], scale = f.mask.factor;
        float target = logit_gradient(f.x[(int64)row * p.depth + f.targets[row]], m, sum, scale, true);
        float other = logit_gradient(others[row], m, sum, scale, false);
        int s = row_exponent(max(magnitude_bits(target), magnitude_bits(other)), p.flag);
        p.exponents[row] = s;
        factors[threadIdx.x] = factor_of(s);
    }
    __syncthreads();
    uint32 *hi = (uint32 *)p.planes, *lo = (uint32 *)(p.planes + (int64)p.rows * p.padded);
    for (int c = 4 * threadIdx.x; c < p.padded; c += 4 * blockDim.x) {
        float4 v[LOGIT_ROWS];
#pragma unroll
        for (int r = 0; r < LOGIT_ROWS; r++) {
            v[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (c < p.depth && r < count) v[r] = four_values<LOGITS>(f, first + r, c, p.depth);
        }
        if (c < p.depth)
            for (int r = 0; r < count;) {
                int shard = (first + r) / p.shard_rows, top[4] = {0, 0, 0, 0};
                int *tops = p.tops + (int64)shard * p.depth + c;
#pragma unroll
                for (int i = 0; i < LOGIT_ROWS; i++)
                    if (i < count && (first + i) / p.shard_rows == shard) raise(top, v[i]), r = i + 1;
                raise_tops(tops, top);
            }
#pragma unroll
        for (int r = 0; r < LOGIT_ROWS; r++)
            if (r < count) {
                int64 at = ((int64)(first + r) * p.padded + c) / 4;
                split_values(v[r], factors[r], hi[at], lo[at]);
            }
    }
}

// --- columns --------------------------------------------------------------------------------------------------------

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

#define TILE_COLUMNS 32
#define TILE_TOKENS 128

// Columns of a source of [shards, tokens, columns] become rows of planes [shards, 2, columns, padded].
struct Columns {
    Source f;
    const int *tops;      // [shards, columns]
    int8 *planes;
    int *exponents;       // [shards, columns]
    uint64 *totals;       // [shards, columns] += the sums of the integers, or null
    int columns;
};

struct ColumnTile {
    uint32 hi[TILE_COLUMNS][TILE_TOKENS / 4], lo[TILE_COLUMNS][TILE_TOKENS / 4];
    Factor factors[TILE_COLUMNS];
    int sums[TILE_COLUMNS];
};

// A thread's four tokens of four columns, as words of four tokens each. Chunks of 16 bytes are turned by the column, so
// that neither the writing nor the reading meets bank conflicts.
template <int KIND>
__device__ __forceinline__ void quantise_tile(const Columns &p, ColumnTile &tile, int c0, int64 shard_first, int t0, int tokens) {
    int g = threadIdx.x % (TILE_COLUMNS / 4), word = threadIdx.x / (TILE_COLUMNS / 4), c = c0 + 4 * g;
    float4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        int t = t0 + 4 * word + i;
        if (t >= tokens) continue;
        if (KIND != PLAIN || p.columns % 4 == 0) {
            if (c < p.columns) v[i] = four_values<KIND>(p.f, shard_first + t, c, p.columns);
        } else {
            const float *x = p.f.x + (shard_first + t) * p.columns + c;
            if (c < p.columns) v[i].x = x[0];
            if (c + 1 < p.columns) v[i].y = x[1];
            if (c + 2 < p.columns) v[i].z = x[2];
            if (c + 3 < p.columns) v[i].w = x[3];
        }
    }
    int at = (((word >> 2) ^ g) << 2) | (word & 3), sums[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        Factor f = tile.factors[4 * g + j];
        int q[4];
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = scaled_integer(j == 0 ? v[i].x : j == 1 ? v[i].y : j == 2 ? v[i].z : v[i].w, f);
        split4(q[0], q[1], q[2], q[3], tile.hi[4 * g + j][at], tile.lo[4 * g + j][at]);
        sums[j] = q[0] + q[1] + q[2] + q[3];
    }
    if (p.totals)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int sum = sums[j] + __shfl_xor_sync(ALL_LANES, sums[j], 8);
            sum += __shfl_xor_sync(ALL_LANES, sum, 16);
            if (lane_of_thread() < TILE_COLUMNS / 4) atomicAdd(&tile.sums[4 * g + j], sum);
        }
}

// Two tensors of the same tokens in one launch: the first `first_blocks` blocks take p0. 256 threads take TILE_TOKENS
// tokens of TILE_COLUMNS columns.
extern "C" __global__ void __launch_bounds__(256) k_quantise_columns(Columns p0, Columns p1, int first_blocks, int tokens,
                                                                     int padded, int *flag) {
    __shared__ __align__(16) ColumnTile tile;
    bool second = blockIdx.x >= first_blocks;
    Columns p = second ? p1 : p0;
    int c0 = (blockIdx.x - (second ? first_blocks : 0)) * TILE_COLUMNS, t0 = blockIdx.y * TILE_TOKENS, z = blockIdx.z;
    if (threadIdx.x < TILE_COLUMNS) {
        int c = c0 + threadIdx.x, s = 0;
        if (c < p.columns) {
            int top = p.tops[z * p.columns + c];
            s = top >= INFINITY_BITS ? 0 : exponent_for(top);
            if (blockIdx.y == 0) {
                p.exponents[z * p.columns + c] = s;
                if (top >= INFINITY_BITS) *flag = 1;
            }
        }
        tile.factors[threadIdx.x] = factor_of(s);
        tile.sums[threadIdx.x] = 0;
    }
    __syncthreads();
    int64 first = (int64)z * tokens;
    switch (p.f.kind) {
    case NORMALISED: quantise_tile<NORMALISED>(p, tile, c0, first, t0, tokens); break;
    case GELU: quantise_tile<GELU>(p, tile, c0, first, t0, tokens); break;
    case LOGITS: quantise_tile<LOGITS>(p, tile, c0, first, t0, tokens); break;
    case RELU: quantise_tile<RELU>(p, tile, c0, first, t0, tokens); break;
    case MASKED: quantise_tile<MASKED>(p, tile, c0, first, t0, tokens); break;
    default: quantise_tile<PLAIN>(p, tile, c0, first, t0, tokens);
    }
    __syncthreads();
    if (p.totals && threadIdx.x < TILE_COLUMNS && c0 + threadIdx.x < p.columns)
        atomicAdd(&p.totals[z * p.columns + c0 + threadIdx.x], (uint64)(int64)tile.sums[threadIdx.x]);
    int8 *hi = p.planes + (int64)z * 2 * p.columns * padded, *lo = hi + (int64)p.columns * padded;
    int row = threadIdx.x / (TILE_TOKENS / 16), chunk = threadIdx.x % (TILE_TOKENS / 16), turned = 4 * (chunk ^ (row >> 2));
    if (c0 + row >= p.columns) return;
    int64 to = (int64)(c0 + row) * padded + t0 + 16 * chunk;
    *(uint4 *)(hi + to) = *(const uint4 *)&tile.hi[row][turned];
    *(uint4 *)(lo + to) = *(const uint4 *)&tile.lo[row][turned];
}

// --- weights --------------------------------------------------------------------------------------------------------

// A weight matrix [wide, deep] and where its planes go, by rows and by columns.
struct Weight {
    const float *x;
    int8 *rows, *columns;
    int *row_exponents, *column_exponents, *tops, *flag; // tops [deep], zeros at first
    int wide, deep, deep_padded, wide_padded;
    int first_row_block, first_column_block, column_blocks, unused;
};

// The weight that a block belongs to: the last whose first block is not after it.
__device__ __forceinline__ int weight_of_block(const Weight *weights, int count, int block, bool columns) {
    int low = 0;
    while (count - low > 1) {
        int middle = (low + count) / 2;
        int first = columns ? weights[middle].first_column_block : weights[middle].first_row_block;
        if (first <= block) low = middle;
        else count = middle;
    }
    return low;
}

#define WEIGHT_ROWS 16

extern "C" __global__ void __launch_bounds__(256) k_quantise_weight_rows(const Weight *weights, int count) {
    Weight w = weights[weight_of_block(weights, count, blockIdx.x, false)];
    int first = (blockIdx.x - w.first_row_block) * WEIGHT_ROWS, rows = min(WEIGHT_ROWS, w.wide - first);
    quantise_with_warps(w.x, first, rows, w.wide, w.deep, w.deep_padded, w.rows, w.row_exponents, w.flag);
    add_column_tops(w.x + (int64)first * w.deep, rows, w.deep, w.tops);
}

extern "C" __global__ void __launch_bounds__(256) k_quantise_weight_columns(const Weight *weights, int count) {
    __shared__ __align__(16) ColumnTile tile;
    Weight w = weights[weight_of_block(weights, count, blockIdx.x, true)];
    int block = blockIdx.x - w.first_column_block;
    int c0 = block % w.column_blocks * TILE_COLUMNS, t0 = block / w.column_blocks * TILE_TOKENS;
    if (threadIdx.x < TILE_COLUMNS) {
        int c = c0 + threadIdx.x, s = 0;
        if (c < w.deep) {
            int top = w.tops[c];
            s = top >= INFINITY_BITS ? 0 : exponent_for(top);
            if (t0 == 0) {
                w.column_exponents[c] = s;
                if (top >= INFINITY_BITS) *w.flag = 1;
            }
        }
        tile.factors[threadIdx.x] = factor_of(s);
    }
    __syncthreads();
    Columns p = {};
    p.f.x = w.x, p.columns = w.deep;
    quantise_tile<PLAIN>(p, tile, c0, 0, t0, w.wide);
    __syncthreads();
    int row = threadIdx.x / (TILE_TOKENS / 16), chunk = threadIdx.x % (TILE_TOKENS / 16), turned = 4 * (chunk ^ (row >> 2));
    if (c0 + row >= w.deep) return;
    int64 to = (int64)(c0 + row) * w.wide_padded + t0 + 16 * chunk;
    *(uint4 *)(w.columns + to) = *(const uint4 *)&tile.hi[row][turned];
    *(uint4 *)(w.columns + (int64)w.deep * w.wide_padded + to) = *(const uint4 *)&tile.lo[row][turned];
}
