// Causal attention of the tier prod on compute capability 9.0, forward and backward. Compiled for one padded width DP of
// a head (32, 64 or 128), with or without DROPOUT.
//
// Dao et al. 2022 (FlashAttention), Shah et al. 2024 (FlashAttention-3). Scores live in registers alone: sums of one
// product are the left operand of the next. The backward pass is two kernels, one over queries and one over keys, each
// of which computes the weights again: every gradient has one writer, which adds in a fixed order.
//
// Legend: B rows of the batch, H heads, T tokens, D the width of a head, TP = T padded to a multiple of TILE.
// qkv is [B, T, 3, H, D], y, dy [B, T, H, D], stats [B, H, T] logarithms of row sums. numbers [B, H, TP, 2] is what the
// kernel over keys wants to know of a query: the logarithm to base 2 of its row sum, and delta = sum of dy * y.
#include "half_products.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define TILE 64 // rows of a warpgroup, and of a box of the copy engine
#define ROW_BYTES (DP >= 64 ? 128 : 2 * DP)
#define HALVES (DP == 128 ? 2 : 1) // boxes side by side: one is at most 128 bytes wide
#define TILE_BYTES (TILE * DP * 2)
#define DEPTHS (DP / 16)
// KEYS_SHARED, QUERIES_SHARED: left operands of the kernel over keys, over queries, stand in shared memory, else in
// registers.
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
// Weights are relative to a reference that follows a row's maximum with this much of slack (in powers of two).
#define SLACK 8.0f
#define SCORES (TILE / 2) // that a thread holds of a tile of 64 x 64

__device__ __forceinline__ float infinity() { return __int_as_float(INFINITY_BITS); }

struct Attention {
    const uint16 *qkv, *y, *dy;
    uint16 *out; // y, or dqkv
    float *stats, *numbers;
    const StepValues *values;
    int heads, width, tokens, rows, first_row, chunk;
    float scale; // of scores
    Mask mask;
};

// Which tile of which head a block takes: heads in chunks whose keys and values stay in the cache, the longest first.
struct Place {
    int tile, head;
};

__device__ __forceinline__ Place place_of(const Attention &p, int tiles) {
    int chunk = blockIdx.x / (p.chunk * tiles), within = blockIdx.x - chunk * p.chunk * tiles;
    int heads = min(p.chunk, p.rows * p.heads - chunk * p.chunk);
    Place place = {within / heads, chunk * p.chunk + within % heads};
    return place;
}

// Through a shuffle, so that the compiler knows it to be the same for a whole warp.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(ALL_LANES, threadIdx.x / 128, 0); }

// What 16 elements further along a row, and 16 rows further down, add to a descriptor.
__device__ __forceinline__ int along(int k) { return k / 4 * (TILE * ROW_BYTES / 16) + k % 4 * 2; }
__device__ __forceinline__ int down(int k) { return k * ROW_BYTES; }

__device__ __forceinline__ void copy_tile(uint32 to, const TensorMap *map, int token, int head, int row, uint32 barrier, int acts = 1) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) copy_box(to + h * TILE * ROW_BYTES, map, 64 * h, token, head, row, barrier, acts);
}

// Left operand from global memory: the 64 tokens from `token` on of a matrix with `stride` elements from token to token.
struct Fragments {
    uint32 a[DEPTHS][4];
};

__device__ __forceinline__ void load_left(Fragments &f, const uint16 *from, int64 stride, int token, int tokens, int width) {
    int lane = lane_of_thread(), row = token + 16 * ((threadIdx.x / WARP) & 3) + lane / 4, column = 2 * (lane & 3);
#pragma unroll
    for (int k = 0; k < DEPTHS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = row + 8 * (i & 1), c = 16 * k + column + 4 * (i & 2);
            f.a[k][i] = r < tokens && c < width ? *(const uint32 *)(from + r * stride + c) : 0u;
        }
}

// scores = left times a tile's rows.
__device__ __forceinline__ void multiply_rows(float (&d)[SCORES], const Fragments &left, uint64 tile) {
#pragma unroll
    for (int k = 0; k < DEPTHS; k++) half_product<0>(d, left.a[k], tile + along(k), k > 0);
}

__device__ __forceinline__ void multiply_rows(float (&d)[SCORES], uint64 left, uint64 tile) {
#pragma unroll
    for (int k = 0; k < DEPTHS; k++) half_product<0>(d, left + along(k), tile + along(k), k > 0);
}

// d += left [64 x 64] times a tile.
__device__ __forceinline__ void add_tile(float (&d)[DP / 2], const uint32 (&left)[TILE / 16][4], uint64 tile) {
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) half_product<1>(d, left[k], tile + down(k), 1);
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// Four lanes hold four words each: afterwards lane t holds the words number t of all four.
__device__ __forceinline__ void turn(uint32 (&w)[4]) {
    int lane = lane_of_thread();
#pragma unroll
    for (int apart = 1; apart <= 2; apart *= 2)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j & apart) continue;
            bool upper = lane & apart;
            uint32 got = __shfl_xor_sync(ALL_LANES, upper ? w[j] : w[j + apart], apart);
            if (upper) w[j] = got;
            else w[j + apart] = got;
        }
}

// Narrow and write the 64 x DP sums of a warpgroup, times a factor for each of a thread's two rows.
__device__ __forceinline__ void write_rows(uint16 *out, int64 stride, int row, int tokens, int width, float (&d)[DP / 2],
                                           float first, float second) {
    int t = lane_of_thread() & 3;
#pragma unroll
    for (int i = 0; i < DP / 32; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float factor = half ? second : first;
            uint32 w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = 16 * i + 4 * j + 2 * half;
                w[j] = narrowed(d[at] * factor, d[at + 1] * factor);
            }
            turn(w);
            int r = row + 8 * half, c = 32 * i + 8 * t;
            if (r < tokens && c < width) *(uint4 *)(out + r * stride + c) = make_uint4(w[0], w[1], w[2], w[3]);
        }
}

// --- dropout --------------------------------------------------------------------------------------------------------

// Decisions are 16 bits of a word each, a function of the place alone. A block of 128 bits serves eight pairs of a query
// q and a key k of a patch of 16 x 16: q and q + 8, with k, k + 1, k + 8 and k + 9 where k is even.
// word: (k odd, q >= 8); its upper half: k >= 8. So that what a thread wants is in one or two blocks whichever side of
// the scores it holds.
__device__ __forceinline__ uint4 decisions(const Attention &p, int head, int query, int key) {
    uint64 patches = (uint64)((p.tokens + 15) / 16);
    uint64 patch = ((uint64)((int64)p.first_row * p.heads + head) * patches + query / 16) * patches + key / 16;
    return random_words4(p.values, p.mask.site, patch * 32 + (query % 8) * 4 + (key % 8) / 2);
}

// One bit for each of a thread's scores, rows queries from `query` (a multiple of 16) on, columns keys from `key` on.
__device__ __forceinline__ uint32 kept_by_query(const Attention &p, int head, int query, int key) {
    int lane = lane_of_thread();
    uint32 kept = 0;
#pragma unroll
    for (int k = 0; k < SCORES / 8; k++) {
        uint4 w = decisions(p, head, query + lane / 4, key + 16 * k + 2 * (lane & 3));
        uint32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            uint32 word = words[2 * (e & 1) + e / 2];
            kept |= (uint32)((word & 0xffff) >= p.mask.threshold) << (8 * k + e);
            kept |= (uint32)((word >> 16) >= p.mask.threshold) << (8 * k + 4 + e);
        }
    }
    return kept;
}

// The same where rows are keys and columns are queries.
__device__ __forceinline__ uint32 kept_by_key(const Attention &p, int head, int query, int key) {
    int lane = lane_of_thread(), g = lane / 4, odd = g & 1;
    uint32 kept = 0;
#pragma unroll
    for (int k = 0; k < SCORES / 8; k++) {
        // Of the two blocks that its pairs lie in a lane draws one, and the lane with the key beside it the other.
        uint4 w = decisions(p, head, query + 16 * k + 2 * (lane & 3) + odd, key + g);
        uint32 own[2] = {odd ? w.z : w.x, odd ? w.w : w.y}, others[2];
        others[0] = __shfl_xor_sync(ALL_LANES, odd ? w.x : w.z, 4);
        others[1] = __shfl_xor_sync(ALL_LANES, odd ? w.y : w.w, 4);
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                uint32 word = (e & 1) == odd ? own[c] : others[c];
                uint32 decision = e / 2 ? word >> 16 : word & 0xffff;
                kept |= (uint32)(decision >= p.mask.threshold) << (8 * k + 4 * c + e);
            }
    }
    return kept;
}

__device__ __forceinline__ bool is_kept(uint32 kept, int i) { return !DROPOUT || (kept >> i & 1); }

// --- a ring of tiles ------------------------------------------------------------------------------------------------

// Tiles go round through STAGES places. The first warp asks for a tile as soon as all warps have left the one before in
// its place; it looks after those that were left a step ago, so that warpgroups may run apart by a step. Every warp waits
// for every tile, also for those that it has no use for, or it would leave tiles that have not come.
template <int STAGES, int BYTES>
struct Ring {
    uint32 memory, full, empty;
    int count, leads, lane;

    __device__ __forceinline__ uint32 at(int step) const { return memory + (step % STAGES) * BYTES; }
    __device__ __forceinline__ uint32 arrival(int step) const { return full + 8 * (step % STAGES); }
    __device__ __forceinline__ void wait(int step) const { barrier_wait(arrival(step), (step / STAGES) & 1); }
    __device__ __forceinline__ void leave(int step) const { barrier_arrive(empty + 8 * (step % STAGES), lane == 0); }
    template <typename Copy>
    __device__ __forceinline__ void begin(const Copy &copy) const {
        if (leads)
            for (int step = 0; step < min(STAGES, count); step++) copy(step, lane == 0);
    }
    // After `step`: products of the one before are done.
    template <typename Copy>
    __device__ __forceinline__ void pass(int step, const Copy &copy) const {
        if (step > 0) leave(step - 1);
        int left = step - 2;
        if (leads && left >= 0 && left + STAGES < count) {
            barrier_wait(empty + 8 * (left % STAGES), (left / STAGES) & 1);
            copy(left + STAGES, lane == 0);
        }
    }
    template <typename Copy>
    __device__ __forceinline__ void skip(int step, const Copy &copy) const {
        wait(step);
        pass(step, copy);
    }
};

template <int STAGES, int BYTES, int GROUPS>
__device__ __forceinline__ Ring<STAGES, BYTES> make_ring(uint32 memory, uint64 *barriers, int count) {
    // Asked for before it is waited for; and what a warpgroup that ends early still reads is not written over.
    static_assert(STAGES >= 3 && STAGES >= GROUPS, "too few stages");
    Ring<STAGES, BYTES> ring = {memory, shared_address(barriers), shared_address(barriers) + 8 * STAGES, count,
                               __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0) == 0, lane_of_thread()};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + 8 * s, 1);
            barrier_init(ring.empty + 8 * s, blockDim.x / WARP);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    return ring;
}

// The tile number `step` of a head's keys, and beside it that of its values.
template <int STAGES, int BYTES>
__device__ __forceinline__ void copy_keys_and_values(const Ring<STAGES, BYTES> &ring, const TensorMap *map, int heads, int head,
                                                     int row, int step, int acts) {
    barrier_expect(ring.arrival(step), 2 * TILE_BYTES, acts);
    copy_tile(ring.at(step), map, step * TILE, heads + head, row, ring.arrival(step), acts);
    copy_tile(ring.at(step) + TILE_BYTES, map, step * TILE, 2 * heads + head, row, ring.arrival(step), acts);
}

// --- forward --------------------------------------------------------------------------------------------------------

struct Rows {
    float reference[2], sum[2]; // of a thread's two rows; references are in powers of two
};

// Scores become weights relative to the rows' references, which follow if they have to; what sums are to be multiplied
// by then, and whether any of the warp's are.
__device__ __forceinline__ bool weigh(float (&s)[SCORES], Rows &rows, float scale, float (&factor)[2]) {
    float top[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < SCORES; i++) top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], s[i]);
    bool follow = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = quad_max(top[r]) * scale;
        follow = follow || top[r] > rows.reference[r] + SLACK;
    }
    follow = __any_sync(ALL_LANES, follow);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        factor[r] = 1.0f;
        if (follow) {
            float next = fmaxf(rows.reference[r], top[r]);
            factor[r] = exp2f(rows.reference[r] - next);
            rows.reference[r] = next;
            rows.sum[r] *= factor[r];
        }
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        int r = (i >> 1) & 1;
        s[i] = exp2f(s[i] * scale - rows.reference[r]);
        rows.sum[r] += s[i];
    }
    return follow;
}

extern "C" __global__ void __launch_bounds__(128 * FORWARD_GROUPS, FORWARD_BLOCKS)
    k_attention_forward(const __grid_constant__ TensorMap map, Attention p) {
    extern __shared__ int8 dynamic[];
    __shared__ uint64 barriers[2 * FORWARD_STAGES];
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u;
    int tiles = (p.tokens + FORWARD_GROUPS * TILE - 1) / (FORWARD_GROUPS * TILE);
    Place place = place_of(p, tiles);
    int first = (tiles - 1 - place.tile) * FORWARD_GROUPS * TILE, own = first + warpgroup() * TILE;
    int b = place.head / p.heads, h = place.head % p.heads, lane = lane_of_thread();
    int row = own + 16 * ((threadIdx.x / WARP) & 3) + lane / 4;
    int steps = (min(first + FORWARD_GROUPS * TILE, p.tokens) + TILE - 1) / TILE;
    int own_steps = own < p.tokens ? own / TILE + 1 : 0;
    auto ring = make_ring<FORWARD_STAGES, 2 * TILE_BYTES, FORWARD_GROUPS>(memory, barriers, steps);
    auto copy = [&](int step, int acts) { copy_keys_and_values(ring, &map, p.heads, h, b, step, acts); };
    ring.begin(copy);
    int64 line = (int64)p.heads * p.width;
    Fragments q;
    load_left(q, p.qkv + (int64)b * p.tokens * 3 * line + h * p.width, 3 * line, own, p.tokens, p.width);
    float scale = p.scale * LOG2_E, o[DP / 2], s[SCORES];
    uint32 weights[TILE / 16][4];
    Rows rows = {{-1e30f, -1e30f}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < DP / 2; i++) o[i] = 0.0f;
    auto take = [&](int step, bool first) {
        ring.wait(step);
        uint64 keys = box_descriptor<ROW_BYTES>(ring.at(step));
        products_begin();
        multiply_rows(s, q, keys);
        products_commit();
        if (!first) {
            add_tile(o, weights, box_descriptor<ROW_BYTES>(ring.at(step - 1) + TILE_BYTES));
            products_commit();
        }
        if (first) products_wait<0>();
        else products_wait<1>();
        products_done(s);
        int key = step * TILE;
        if (step + 1 == own_steps) {
#pragma unroll
            for (int i = 0; i < SCORES; i++)
                if (key + 8 * (i / 4) + 2 * (lane & 3) + (i & 1) > row + 8 * ((i >> 1) & 1)) s[i] = -infinity();
        }
        float factor[2];
        bool follow = weigh(s, rows, scale, factor);
        if (DROPOUT) {
            uint32 kept = kept_by_query(p, place.head, own + 16 * ((threadIdx.x / WARP) & 3), key);
#pragma unroll
            for (int i = 0; i < SCORES; i++) s[i] = is_kept(kept, i) ? s[i] : 0.0f;
        }
        products_wait<0>();
        products_done(o);
        if (!first && follow)
#pragma unroll
            for (int i = 0; i < DP / 2; i++) o[i] *= factor[(i >> 1) & 1];
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) left_operand(weights[k], s, k);
        ring.pass(step, copy);
    };
    if (own_steps > 0) take(0, true);
    for (int step = 1; step < own_steps; step++) take(step, false);
    for (int step = own_steps; step < steps; step++) ring.skip(step, copy);
    if (own_steps == 0) return;
    products_begin();
    add_tile(o, weights, box_descriptor<ROW_BYTES>(ring.at(own_steps - 1) + TILE_BYTES));
    products_commit();
    products_wait<0>();
    products_done(o);
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = quad_sum(rows.sum[r]);
        inverse[r] = (DROPOUT ? p.mask.factor : 1.0f) / sum;
        if ((lane & 3) == 0 && row + 8 * r < p.tokens)
            p.stats[(int64)place.head * p.tokens + row + 8 * r] = (rows.reference[r] + log2f(sum)) * LN_2;
    }
    write_rows(p.out + (int64)b * p.tokens * line + h * p.width, line, row, p.tokens, p.width, o, inverse[0], inverse[1]);
}

// --- backward, over queries -----------------------------------------------------------------------------------------

// Both left operands of each warpgroup of a block, from two tensors, to shared memory; asked for by thread 0.
__device__ __forceinline__ void copy_lefts(uint32 to, const TensorMap *a, int a_head, const TensorMap *b, int b_head, int token,
                                           int row, uint32 barrier) {
    int groups = blockDim.x / 128;
    barrier_init(barrier, 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_expect(barrier, groups * 2 * TILE_BYTES);
    for (int g = 0; g < groups; g++) {
        copy_tile(to + 2 * g * TILE_BYTES, a, token + g * TILE, a_head, row, barrier);
        copy_tile(to + (2 * g + 1) * TILE_BYTES, b, token + g * TILE, b_head, row, barrier);
    }
}

// dq, and the numbers of queries.
extern "C" __global__ void __launch_bounds__(128 * QUERY_GROUPS, QUERY_BLOCKS)
    k_attention_queries(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap dy_map, Attention p) {
    extern __shared__ int8 dynamic[];
    __shared__ uint64 barriers[2 * QUERY_STAGES + 1];
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u;
    int tiles = (p.tokens + QUERY_GROUPS * TILE - 1) / (QUERY_GROUPS * TILE);
    Place place = place_of(p, tiles);
    int first = (tiles - 1 - place.tile) * QUERY_GROUPS * TILE, own = first + warpgroup() * TILE;
    int b = place.head / p.heads, h = place.head % p.heads, lane = lane_of_thread();
    int row = own + 16 * ((threadIdx.x / WARP) & 3) + lane / 4;
    int steps = (min(first + QUERY_GROUPS * TILE, p.tokens) + TILE - 1) / TILE;
    int own_steps = own < p.tokens ? own / TILE + 1 : 0;
    uint32 lefts = memory + QUERY_STAGES * 2 * TILE_BYTES, loaded = shared_address(barriers + 2 * QUERY_STAGES);
    if (QUERIES_SHARED && threadIdx.x == 0) copy_lefts(lefts, &map, h, &dy_map, h, first, b, loaded);
    auto ring = make_ring<QUERY_STAGES, 2 * TILE_BYTES, QUERY_GROUPS>(memory, barriers, steps);
    auto copy = [&](int step, int acts) { copy_keys_and_values(ring, &map, p.heads, h, b, step, acts); };
    ring.begin(copy);
    int64 line = (int64)p.heads * p.width, start = (int64)b * p.tokens * line + h * p.width;
    Fragments left_dy, left_y;
    load_left(left_dy, p.dy + start, line, own, p.tokens, p.width);
    load_left(left_y, p.y + start, line, own, p.tokens, p.width);
    float delta[2] = {0.0f, 0.0f}, logarithm[2];
#pragma unroll
    for (int k = 0; k < DEPTHS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            delta[i & 1] += widened((uint16)(left_dy.a[k][i] & 0xffff)) * widened((uint16)(left_y.a[k][i] & 0xffff));
            delta[i & 1] += widened((uint16)(left_dy.a[k][i] >> 16)) * widened((uint16)(left_y.a[k][i] >> 16));
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = row + 8 * r, padded = (p.tokens + TILE - 1) / TILE * TILE;
        delta[r] = quad_sum(delta[r]);
        // Absent queries weigh nothing.
        logarithm[r] = at < p.tokens ? p.stats[(int64)place.head * p.tokens + at] * LOG2_E : infinity();
        if ((lane & 3) == 0 && at < padded)
            ((float2 *)p.numbers)[(int64)place.head * padded + at] = make_float2(logarithm[r], delta[r]);
    }
#if QUERIES_SHARED
    uint64 q = box_descriptor<ROW_BYTES>(lefts + 2 * warpgroup() * TILE_BYTES), dy = q + TILE_BYTES / 16;
    barrier_wait(loaded, 0);
#else
    Fragments q, &dy = left_dy;
    load_left(q, p.qkv + (int64)b * p.tokens * 3 * line + h * p.width, 3 * line, own, p.tokens, p.width);
#endif
    float scale = p.scale * LOG2_E, dq[DP / 2], s[SCORES], ds[SCORES];
    uint32 left[TILE / 16][4];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) dq[i] = 0.0f;
    auto take = [&](int step, bool first) {
        ring.wait(step);
        uint64 keys = box_descriptor<ROW_BYTES>(ring.at(step)), values = box_descriptor<ROW_BYTES>(ring.at(step) + TILE_BYTES);
        products_begin();
        multiply_rows(s, q, keys);
        products_commit();
        multiply_rows(ds, dy, values);
        products_commit();
        if (!first) {
            add_tile(dq, left, box_descriptor<ROW_BYTES>(ring.at(step - 1)));
            products_commit();
        }
        uint32 kept = 0;
        if (DROPOUT) kept = kept_by_query(p, place.head, own + 16 * ((threadIdx.x / WARP) & 3), step * TILE);
        if (first) products_wait<1>();
        else products_wait<2>();
        products_done(s);
#pragma unroll
        for (int i = 0; i < SCORES; i++) s[i] = exp2f(s[i] * scale - logarithm[(i >> 1) & 1]);
        if (step + 1 == own_steps) {
#pragma unroll
            for (int i = 0; i < SCORES; i++)
                if (step * TILE + 8 * (i / 4) + 2 * (lane & 3) + (i & 1) > row + 8 * ((i >> 1) & 1)) s[i] = 0.0f;
        }
        if (first) products_wait<0>();
        else products_wait<1>();
        products_done(ds);
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            if (DROPOUT) ds[i] = is_kept(kept, i) ? ds[i] * p.mask.factor : 0.0f;
            ds[i] = s[i] * (ds[i] - delta[(i >> 1) & 1]);
        }
        products_wait<0>();
        products_done(dq);
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) left_operand(left[k], ds, k);
        ring.pass(step, copy);
    };
    if (own_steps > 0) take(0, true);
    for (int step = 1; step < own_steps; step++) take(step, false);
    for (int step = own_steps; step < steps; step++) ring.skip(step, copy);
    if (own_steps == 0) return;
    products_begin();
    add_tile(dq, left, box_descriptor<ROW_BYTES>(ring.at(own_steps - 1)));
    products_commit();
    products_wait<0>();
    products_done(dq);
    write_rows(p.out + (int64)b * p.tokens * 3 * line + h * p.width, 3 * line, row, p.tokens, p.width, dq, p.scale, p.scale);
}

// --- backward, over keys --------------------------------------------------------------------------------------------

#define NUMBERS_BYTES (8 * TILE)
#define KEYS_STAGE (2 * TILE_BYTES + 1024) // queries, dy, and the numbers of queries

// dk and dv.
extern "C" __global__ void __launch_bounds__(128 * KEY_GROUPS, KEY_BLOCKS)
    k_attention_keys(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap dy_map, Attention p) {
    extern __shared__ int8 dynamic[];
    __shared__ uint64 barriers[2 * KEY_STAGES + 1];
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u;
    int group = warpgroup();
    int tiles = (p.tokens + KEY_GROUPS * TILE - 1) / (KEY_GROUPS * TILE);
    Place place = place_of(p, tiles);
    int first = place.tile * KEY_GROUPS * TILE, own = first + group * TILE;
    int b = place.head / p.heads, h = place.head % p.heads, lane = lane_of_thread();
    int row = own + 16 * ((threadIdx.x / WARP) & 3) + lane / 4;
    int query_tiles = (p.tokens + TILE - 1) / TILE, first_tile = first / TILE, steps = query_tiles - first_tile;
    bool present = own < p.tokens;
    uint32 lefts = memory + KEY_STAGES * KEYS_STAGE, loaded = shared_address(barriers + 2 * KEY_STAGES);
    if (KEYS_SHARED && threadIdx.x == 0) copy_lefts(lefts, &map, p.heads + h, &map, 2 * p.heads + h, first, b, loaded);
    auto ring = make_ring<KEY_STAGES, KEYS_STAGE, KEY_GROUPS>(memory, barriers, steps);
    auto copy = [&](int step, int acts) {
        int token = (first_tile + step) * TILE;
        uint32 to = ring.at(step), arrival = ring.arrival(step);
        barrier_expect(arrival, 2 * TILE_BYTES + NUMBERS_BYTES, acts);
        copy_tile(to, &map, token, h, b, arrival, acts);
        copy_tile(to + TILE_BYTES, &dy_map, token, h, b, arrival, acts);
        copy_bytes(to + 2 * TILE_BYTES, p.numbers + 2 * ((int64)place.head * query_tiles * TILE + token), NUMBERS_BYTES, arrival, acts);
    };
    ring.begin(copy);
    int64 line = (int64)p.heads * p.width, start = (int64)b * p.tokens * 3 * line + h * p.width;
#if KEYS_SHARED
    uint64 k = box_descriptor<ROW_BYTES>(lefts + 2 * group * TILE_BYTES), v = k + TILE_BYTES / 16;
    barrier_wait(loaded, 0);
#else
    Fragments k, v;
    load_left(k, p.qkv + start + line, 3 * line, own, p.tokens, p.width);
    load_left(v, p.qkv + start + 2 * line, 3 * line, own, p.tokens, p.width);
#endif
    float scale = p.scale * LOG2_E, dk[DP / 2], dv[DP / 2], s[SCORES], ds[SCORES];
    uint32 weights[TILE / 16][4], left[TILE / 16][4];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) dk[i] = dv[i] = 0.0f;
    auto take = [&](int step, bool first) {
        ring.wait(step);
        uint32 at = ring.at(step);
        uint64 queries = box_descriptor<ROW_BYTES>(at), dys = box_descriptor<ROW_BYTES>(at + TILE_BYTES);
        const float4 *numbers = (const float4 *)__cvta_shared_to_generic(at + 2 * TILE_BYTES) + (lane & 3);
        products_begin();
        multiply_rows(s, k, queries);
        products_commit();
        multiply_rows(ds, v, dys);
        products_commit();
        if (!first) {
            uint32 before = ring.at(step - 1);
            add_tile(dv, weights, box_descriptor<ROW_BYTES>(before + TILE_BYTES));
            add_tile(dk, left, box_descriptor<ROW_BYTES>(before));
            products_commit();
        }
        uint32 kept = 0;
        int token = (first_tile + step) * TILE;
        if (DROPOUT) kept = kept_by_key(p, place.head, token, own + 16 * ((threadIdx.x / WARP) & 3));
        if (first) products_wait<1>();
        else products_wait<2>();
        products_done(s);
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            float4 pair = numbers[4 * n]; // logarithm and delta of two queries
#pragma unroll
            for (int e = 0; e < 4; e++) s[4 * n + e] = exp2f(s[4 * n + e] * scale - (e & 1 ? pair.z : pair.x));
        }
        if (first) {
#pragma unroll
            for (int i = 0; i < SCORES; i++)
                if (row + 8 * ((i >> 1) & 1) > token + 8 * (i / 4) + 2 * (lane & 3) + (i & 1)) s[i] = 0.0f;
        }
        if (first) products_wait<0>();
        else products_wait<1>();
        products_done(ds);
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            float4 pair = numbers[4 * n];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int i = 4 * n + e;
                if (DROPOUT) ds[i] = is_kept(kept, i) ? ds[i] * p.mask.factor : 0.0f;
                ds[i] = s[i] * (ds[i] - (e & 1 ? pair.w : pair.y));
                if (DROPOUT) s[i] = is_kept(kept, i) ? s[i] : 0.0f;
            }
        }
        products_wait<0>();
        products_done(dk);
        products_done(dv);
#pragma unroll
        for (int c = 0; c < TILE / 16; c++) left_operand(weights[c], s, c), left_operand(left[c], ds, c);
        ring.pass(step, copy);
    };
    int own_start = present ? group : steps;
    for (int step = 0; step < own_start; step++) ring.skip(step, copy);
    if (present) take(group, true);
    for (int step = own_start + 1; step < steps; step++) take(step, false);
    if (!present) return;
    uint32 last = ring.at(steps - 1);
    products_begin();
    add_tile(dv, weights, box_descriptor<ROW_BYTES>(last + TILE_BYTES));
    add_tile(dk, left, box_descriptor<ROW_BYTES>(last));
    products_commit();
    products_wait<0>();
    products_done(dk);
    products_done(dv);
    float factor = DROPOUT ? p.mask.factor : 1.0f;
    write_rows(p.out + start + line, 3 * line, row, p.tokens, p.width, dk, p.scale, p.scale);
    write_rows(p.out + start + 2 * line, 3 * line, row, p.tokens, p.width, dv, factor, factor);
}

#endif
