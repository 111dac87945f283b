// Causal attention of the tier prod on compute capability 9.0, forward and backward. Compiled for one padded width DP of
// a head (32, 64 or 128), with or without DROPOUT.
//
// Dao et al. 2022 (FlashAttention), Shah et al. 2024 (FlashAttention-3). Scores live in registers alone: sums of one
// product are the left operand of the next. The backward pass is two kernels, one over queries and one over keys, each
// of which computes the weights again; or, where a block has room for a head, one. Every gradient has one writer, which
// adds in a fixed order.
//
// Legend: B rows of the batch, H heads, T tokens, D the width of a head, TP = T padded to a multiple of TILE.
// qkv is [B, T, 3, H, D], y, dy [B, T, H, D], stats [B, H, T] logarithms of row sums. numbers [B, H, TP / TILE, 2, TILE] is
// what the kernel over keys wants to know of queries: logarithms to base 2 of row sums, and deltas, sums of dy * y.
#include "half_products.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define TILE 64 // rows of a warpgroup, and of a box of the copy engine
#define ROW_BYTES (DP >= 64 ? 128 : 2 * DP)
#define HALVES (DP == 128 ? 2 : 1) // boxes side by side: one is at most 128 bytes wide
#define TILE_BYTES (TILE * DP * 2)
#define DEPTHS (DP / 16)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
// Weights are relative to a reference that follows a row's maximum with this much of slack (in powers of two).
#define SLACK 8.0f
#define SCORES (TILE / 2) // that a thread holds of a tile of 64 x 64

__device__ __forceinline__ float infinity() { return __int_as_float(INFINITY_BITS); }

// Of tensors in boxes of a tile of a head; in k_attention_short those that are read in boxes of all tokens.
struct Maps {
    TensorMap qkv, y, dy, dqkv;
};

struct Attention {
    float *stats, *numbers;
    const StepValues *values;
    int heads, tokens, rows, first_row, chunk;
    float scale; // of scores
    Mask mask;
};

// Which tile of which head a block takes: heads in chunks whose keys and values stay in the cache, the longest first.
struct Place {
    int tile, head; // of all rows' heads
    int b, h; // the row, and the head within it
};

// In which order heads are taken. The library's products go through them in rising order, so the kernel after one falls: it
// begins with those that the cache still has, and ends with those that the product after it begins with. Of the two on the
// way back, the one over keys comes last.
enum Order { RISING, FALLING };

__device__ __forceinline__ Place place_of(const Attention &p, int tiles, int item, Order order) {
    int chunk = item / (p.chunk * tiles), within = item - chunk * p.chunk * tiles;
    int heads = min(p.chunk, p.rows * p.heads - chunk * p.chunk);
    int head = chunk * p.chunk + within % heads;
    if (order == FALLING) head = p.rows * p.heads - 1 - head;
    return {within / heads, head, head / p.heads, head % p.heads};
}

// The item that the kernel over keys hands out next: behind the numbers.
__device__ __forceinline__ int *next_item(const Attention &p) {
    return (int *)(p.numbers + 2 * (int64)p.rows * p.heads * ((p.tokens + TILE - 1) / TILE * TILE));
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

// Where a lane's row of four blocks of 8 x 8 is in a tile: this warp's 16 rows, the columns from 8 n on.
__device__ __forceinline__ uint32 blocks_in(uint32 tile, int n) {
    const int parts = ROW_BYTES / 16;
    int lane = lane_of_thread(), row = 16 * ((threadIdx.x / WARP) & 3) + lane / 8 % 2 * 8 + lane % 8, part = n + lane / 16;
    int swizzled = part % parts ^ (ROW_BYTES == 128 ? row % 8 : row / 2 % 4);
    return tile + part / parts * TILE * ROW_BYTES + row * ROW_BYTES + swizzled * 16;
}

// A left operand of a warpgroup, from a tile.
struct Fragments {
    uint32 a[DEPTHS][4];

    __device__ __forceinline__ void load(uint32 tile) {
#pragma unroll
        for (int k = 0; k < DEPTHS; k++)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3]) : "r"(blocks_in(tile, 2 * k)) : "memory");
    }
};

// Narrow the 64 x DP sums of a warpgroup, times a factor for each of a thread's two rows, to a tile.
__device__ __forceinline__ void store_tile(uint32 tile, const float (&d)[DP / 2], float first, float second) {
#pragma unroll
    for (int n = 0; n < DP / 8; n += 2) {
        uint32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float factor = i % 2 ? second : first;
            words[i] = narrowed(d[4 * n + 2 * i] * factor, d[4 * n + 2 * i + 1] * factor);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(blocks_in(tile, n)), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    }
}

// After a warpgroup has stored tiles: whether this is the thread that has them copied. Boxes by the copy engine, as threads
// that write rows of 64 bytes themselves take several times as long.
__device__ __forceinline__ bool tiles_stored() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup()) : "memory");
    return threadIdx.x % 128 == 0;
}

__device__ __forceinline__ void write_tile(uint32 from, const TensorMap *map, int token, int head, int row) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) store_box(map, 64 * h, token, head, row, from + h * TILE * ROW_BYTES);
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

// The copy engine may use barriers that this thread has made.
__device__ __forceinline__ void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Tiles go round through STAGES places. The first warp of a warpgroup, of one after the other, asks for a tile as soon as
// all warps have left the one before in its place; it looks after those that were left a step ago, so that warpgroups may
// run apart by a step. Every warp waits for every tile, also for those that it has no use for, or it would leave tiles
// that have not come.
template <int STAGES, int BYTES, int GROUPS>
struct Ring {
    static constexpr bool STAYS = false; // in the block's last item nobody waits for the last stage to be left
    uint32 memory, full, empty;
    int count, leads, lane; // leads: the warpgroup whose first warp this is, else -1

    __device__ __forceinline__ uint32 at(int step) const { return memory + (step % STAGES) * BYTES; }
    __device__ __forceinline__ uint32 arrival(int step) const { return full + 8 * (step % STAGES); }
    __device__ __forceinline__ void wait(int step) const { barrier_wait(arrival(step), (step / STAGES) & 1); }
    __device__ __forceinline__ void leave(int step) const { barrier_arrive(empty + 8 * (step % STAGES), lane == 0); }
    template <typename Copy>
    __device__ __forceinline__ void begin(const Copy &copy) const {
        if (leads == 0)
            for (int step = 0; step < min(STAGES, count); step++) copy(step, lane == 0);
    }
    // After `step`: products of the one before are done.
    template <typename Copy>
    __device__ __forceinline__ void pass(int step, const Copy &copy) const {
        if (step > 0) leave(step - 1);
        int left = step - 2;
        if (leads == left % GROUPS && left >= 0 && left + STAGES < count) {
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
__device__ __forceinline__ Ring<STAGES, BYTES, GROUPS> make_ring(uint32 memory, uint64 *barriers, int count) {
    // Asked for before it is waited for; and what a warpgroup that ends early still reads is not written over.
    static_assert(STAGES >= 3 && STAGES >= GROUPS, "too few stages");
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    Ring<STAGES, BYTES, GROUPS> ring = {memory, shared_address(barriers), shared_address(barriers) + 8 * STAGES, count,
                                       warp % 4 == 0 ? warp / 4 : -1, lane_of_thread()};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + 8 * s, 1);
            barrier_init(ring.empty + 8 * s, blockDim.x / WARP);
        }
        barriers_made();
    }
    __syncthreads();
    return ring;
}

// The barrier of so many tiles for each warpgroup of a block, that one thread asks for next.
template <int GROUPS>
__device__ __forceinline__ void begin_lefts(uint32 barrier, int tiles) {
    barrier_init(barrier, 1);
    barriers_made();
    barrier_expect(barrier, GROUPS * tiles * TILE_BYTES);
}

// The tile number `step` of a head's keys, and beside it that of its values.
template <typename Ring>
__device__ __forceinline__ void copy_keys_and_values(const Ring &ring, const TensorMap *map, int heads, int head, int row,
                                                     int step, int acts) {
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
    k_attention_forward(const __grid_constant__ Maps maps, Attention p) {
    extern __shared__ int8 dynamic[];
    __shared__ uint64 barriers[2 * FORWARD_STAGES + 1];
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u;
    int tiles = (p.tokens + FORWARD_GROUPS * TILE - 1) / (FORWARD_GROUPS * TILE);
    Place place = place_of(p, tiles, blockIdx.x, FALLING);
    int first = (tiles - 1 - place.tile) * FORWARD_GROUPS * TILE, own = first + warpgroup() * TILE;
    int b = place.b, h = place.h, lane = lane_of_thread();
    int row = own + 16 * ((threadIdx.x / WARP) & 3) + lane / 4;
    int steps = (min(first + FORWARD_GROUPS * TILE, p.tokens) + TILE - 1) / TILE;
    int own_steps = own < p.tokens ? own / TILE + 1 : 0;
    uint32 lefts = memory + FORWARD_STAGES * 2 * TILE_BYTES, loaded = shared_address(barriers + 2 * FORWARD_STAGES);
    if (threadIdx.x == 0) {
        begin_lefts<FORWARD_GROUPS>(loaded, 1);
        for (int g = 0; g < FORWARD_GROUPS; g++) copy_tile(lefts + g * TILE_BYTES, &maps.qkv, first + g * TILE, h, b, loaded);
    }
    auto ring = make_ring<FORWARD_STAGES, 2 * TILE_BYTES, FORWARD_GROUPS>(memory, barriers, steps);
    auto copy = [&](int step, int acts) { copy_keys_and_values(ring, &maps.qkv, p.heads, h, b, step, acts); };
    ring.begin(copy);
    uint32 left = lefts + warpgroup() * TILE_BYTES; // queries, and y in the end
    barrier_wait(loaded, 0);
    Fragments q;
    q.load(left);
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
    store_tile(left, o, inverse[0], inverse[1]);
    if (tiles_stored()) {
        write_tile(left, &maps.y, own, h, b);
        stores_read();
    }
}

// --- backward, over queries -----------------------------------------------------------------------------------------

// dq, and the numbers of queries.
extern "C" __global__ void __launch_bounds__(128 * QUERY_GROUPS, QUERY_BLOCKS)
    k_attention_queries(const __grid_constant__ Maps maps, Attention p) {
    extern __shared__ int8 dynamic[];
    __shared__ uint64 barriers[2 * QUERY_STAGES + 1];
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u;
    int tiles = (p.tokens + QUERY_GROUPS * TILE - 1) / (QUERY_GROUPS * TILE);
    Place place = place_of(p, tiles, blockIdx.x, RISING);
    int first = (tiles - 1 - place.tile) * QUERY_GROUPS * TILE, own = first + warpgroup() * TILE;
    int b = place.b, h = place.h, lane = lane_of_thread();
    int row = own + 16 * ((threadIdx.x / WARP) & 3) + lane / 4;
    int steps = (min(first + QUERY_GROUPS * TILE, p.tokens) + TILE - 1) / TILE;
    int own_steps = own < p.tokens ? own / TILE + 1 : 0;
    uint32 lefts = memory + QUERY_STAGES * 2 * TILE_BYTES, loaded = shared_address(barriers + 2 * QUERY_STAGES);
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) *next_item(p) = 0;
        begin_lefts<QUERY_GROUPS>(loaded, 3);
        for (int g = 0; g < QUERY_GROUPS; g++) {
            uint32 to = lefts + 3 * g * TILE_BYTES;
            copy_tile(to, &maps.qkv, first + g * TILE, h, b, loaded);
            copy_tile(to + TILE_BYTES, &maps.dy, first + g * TILE, h, b, loaded);
            copy_tile(to + 2 * TILE_BYTES, &maps.y, first + g * TILE, h, b, loaded);
        }
    }
    auto ring = make_ring<QUERY_STAGES, 2 * TILE_BYTES, QUERY_GROUPS>(memory, barriers, steps);
    auto copy = [&](int step, int acts) { copy_keys_and_values(ring, &maps.qkv, p.heads, h, b, step, acts); };
    ring.begin(copy);
    uint32 left_at = lefts + 3 * warpgroup() * TILE_BYTES; // queries, dy and y
    barrier_wait(loaded, 0);
    Fragments left_dy, left_y;
    left_dy.load(left_at + TILE_BYTES);
    left_y.load(left_at + 2 * TILE_BYTES);
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
        if ((lane & 3) == 0 && at < padded) {
            float *numbers = p.numbers + 2 * ((int64)place.head * padded + at / TILE * TILE) + at % TILE;
            numbers[0] = logarithm[r], numbers[TILE] = delta[r];
        }
    }
    uint64 q = box_descriptor<ROW_BYTES>(left_at), dy = q + TILE_BYTES / 16;
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
    store_tile(left_at, dq, p.scale, p.scale);
    if (tiles_stored()) {
        write_tile(left_at, &maps.dqkv, own, h, b);
        stores_read();
    }
}

// --- backward, over keys --------------------------------------------------------------------------------------------

// Numbers of a thread's columns of a tile of queries.
struct Numbers {
    float2 of[TILE / 8];

    __device__ __forceinline__ void load(const float *tile) {
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) of[n] = *(const float2 *)(tile + 8 * n + 2 * (lane_of_thread() & 3));
    }
    __device__ __forceinline__ float at(int i) const { return i & 1 ? of[i / 4].y : of[i / 4].x; }
};

// The gradient of a weight becomes that of its score, and the weight what values are multiplied by.
__device__ __forceinline__ void differentiate(float &weight, float &gradient, float delta, bool kept, float factor) {
    if (DROPOUT) gradient = kept ? gradient * factor : 0.0f;
    gradient = weight * (gradient - delta);
    if (DROPOUT) weight = kept ? weight : 0.0f;
}

#define NUMBERS_BYTES (8 * TILE)
#define KEYS_STAGE (2 * TILE_BYTES + 1024) // queries, dy, and the numbers of queries

// A tile of a head's queries, and beside it their dy and numbers.
__device__ __forceinline__ void copy_queries(const Maps &maps, const Attention &p, Place place, uint32 to, uint32 arrival, int tile, int acts = 1) {
    int tiles = (p.tokens + TILE - 1) / TILE;
    barrier_expect(arrival, 2 * TILE_BYTES + NUMBERS_BYTES, acts);
    copy_tile(to, &maps.qkv, tile * TILE, place.h, place.b, arrival, acts);
    copy_tile(to + TILE_BYTES, &maps.dy, tile * TILE, place.h, place.b, arrival, acts);
    copy_bytes(to + 2 * TILE_BYTES, p.numbers + 2 * ((int64)place.head * tiles + tile) * TILE, NUMBERS_BYTES, arrival, acts);
}

// Keys and values of a place, for each warpgroup of a block.
__device__ __forceinline__ void copy_keys(const Maps &maps, const Attention &p, Place place, uint32 to, uint32 arrival, int acts = 1) {
    for (int g = 0; g < KEY_GROUPS; g++)
        for (int n = 0; n < 2; n++)
            copy_tile(to + (2 * g + n) * TILE_BYTES, &maps.qkv, (place.tile * KEY_GROUPS + g) * TILE, (1 + n) * p.heads + place.h, place.b, arrival, acts);
}

// dk and dv of a warpgroup's tile, whose keys and values are at `left_at`, where their gradients stand in the end.
template <typename Ring, typename Pass>
__device__ __forceinline__ void differentiate_keys(const Maps &maps, const Attention &p, Place place, uint32 left_at, const Ring &ring,
                                                   const Pass &pass) {
    int group = warpgroup(), first_tile = place.tile * KEY_GROUPS, own = (first_tile + group) * TILE, lane = lane_of_thread();
    int row = own + 16 * ((threadIdx.x / WARP) & 3) + lane / 4;
    int steps = (p.tokens + TILE - 1) / TILE - first_tile;
    bool present = own < p.tokens;
    uint64 k = box_descriptor<ROW_BYTES>(left_at), v = k + TILE_BYTES / 16;
    float scale = p.scale * LOG2_E, dk[DP / 2], dv[DP / 2], s[SCORES], ds[SCORES];
    uint32 weights[TILE / 16][4], left[TILE / 16][4];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) dk[i] = dv[i] = 0.0f;
    auto take = [&](int step, bool first) {
        ring.wait(step);
        uint32 at = ring.at(step);
        uint64 queries = box_descriptor<ROW_BYTES>(at), dys = box_descriptor<ROW_BYTES>(at + TILE_BYTES);
        const float *numbers = (const float *)__cvta_shared_to_generic(at + 2 * TILE_BYTES);
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
        Numbers logarithms, deltas; // read before they are wanted, as far as there are registers
        logarithms.load(numbers);
        if (DP == 64) deltas.load(numbers + TILE);
        if (first) products_wait<1>();
        else products_wait<2>();
        products_done(s);
#pragma unroll
        for (int i = 0; i < SCORES; i++) s[i] = exp2f(s[i] * scale - logarithms.at(i));
        if (first) {
#pragma unroll
            for (int i = 0; i < SCORES; i++)
                if (row + 8 * ((i >> 1) & 1) > token + 8 * (i / 4) + 2 * (lane & 3) + (i & 1)) s[i] = 0.0f;
        }
        if (first) products_wait<0>();
        else products_wait<1>();
        products_done(ds);
        if (DP != 64) deltas.load(numbers + TILE);
#pragma unroll
        for (int i = 0; i < SCORES; i++) differentiate(s[i], ds[i], deltas.at(i), is_kept(kept, i), p.mask.factor);
        products_wait<0>();
        products_done(dk);
        products_done(dv);
#pragma unroll
        for (int c = 0; c < TILE / 16; c++) left_operand(weights[c], s, c), left_operand(left[c], ds, c);
        pass(step);
    };
    int own_start = present ? group : steps;
    for (int step = 0; step < own_start; step++) ring.wait(step), pass(step);
    if (present) take(group, true);
    for (int step = own_start + 1; step < steps; step++) take(step, false);
    if (!present) {
        if (Ring::STAYS) pass(steps);
        return;
    }
    uint32 last = ring.at(steps - 1);
    products_begin();
    add_tile(dv, weights, box_descriptor<ROW_BYTES>(last + TILE_BYTES));
    add_tile(dk, left, box_descriptor<ROW_BYTES>(last));
    products_commit();
    products_wait<0>();
    products_done(dk);
    products_done(dv);
    if (Ring::STAYS) pass(steps);
    float factor = DROPOUT ? p.mask.factor : 1.0f;
    store_tile(left_at, dk, p.scale, p.scale);
    store_tile(left_at + TILE_BYTES, dv, factor, factor);
    if (tiles_stored()) {
        write_tile(left_at, &maps.dqkv, own, p.heads + place.h, place.b);
        write_tile(left_at + TILE_BYTES, &maps.dqkv, own, 2 * p.heads + place.h, place.b);
        stores_read();
    }
}

#if KEYS_STAY
struct KeyBarriers {
    uint64 full[KEY_STAGES], empty[KEY_STAGES], loaded[2], free[2];
};

// Tiles of one item after another go round through the stages.
struct LongRing {
    static constexpr bool STAYS = true;
    uint32 memory, full, empty;
    int begin; // steps of the items before

    __device__ __forceinline__ int stage(int step) const { return (begin + step) % KEY_STAGES; }
    __device__ __forceinline__ uint32 at(int step) const { return memory + stage(step) * KEYS_STAGE; }
    __device__ __forceinline__ void wait(int step) const { barrier_wait(full + 8 * stage(step), ((begin + step) / KEY_STAGES) & 1); }
    __device__ __forceinline__ void leave(int step) const { barrier_arrive(empty + 8 * stage(step), lane_of_thread() == 0); }
};

// dk and dv. A block stays and takes item after item, as they are handed out, the longest first. One warp copies, so that
// what the next item needs comes while the warpgroups compute this one.
extern "C" __global__ void __launch_bounds__(128 * (KEY_GROUPS + 1), KEY_BLOCKS)
    k_attention_keys(const __grid_constant__ Maps maps, Attention p) {
    extern __shared__ int8 dynamic[];
    __shared__ KeyBarriers barriers;
    __shared__ int items[2];
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u, lefts = memory + KEY_STAGES * KEYS_STAGE;
    uint32 full = shared_address(barriers.full), empty = shared_address(barriers.empty);
    uint32 loaded = shared_address(barriers.loaded), free = shared_address(barriers.free);
    int tiles = (p.tokens + KEY_GROUPS * TILE - 1) / (KEY_GROUPS * TILE), query_tiles = (p.tokens + TILE - 1) / TILE;
    const uint32 lefts_bytes = 2 * KEY_GROUPS * TILE_BYTES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < KEY_STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * KEY_GROUPS);
        }
        for (int n = 0; n < 2; n++) {
            barrier_init(loaded + 8 * n, 1);
            barrier_init(free + 8 * n, 4 * KEY_GROUPS);
        }
        barriers_made();
    }
    __syncthreads();
    if (warpgroup() == KEY_GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (__shfl_sync(ALL_LANES, threadIdx.x / WARP, 0) != 4 * KEY_GROUPS) return;
        int acts = lane_of_thread() == 0, all = tiles * p.rows * p.heads;
        for (int number = 0, step = 0;; number++) {
            int item = __shfl_sync(ALL_LANES, acts ? atomicAdd(next_item(p), 1) : 0, 0), at = number % 2;
            if (number > 1) barrier_wait(free + 8 * at, (number / 2 - 1) & 1);
            if (item >= all) {
                if (acts) items[at] = -1;
                if (acts && item == all + (int)gridDim.x - 1) *next_item(p) = 0; // every block has been told that there is none
                barrier_arrive(loaded + 8 * at, acts);
                return;
            }
            if (acts) items[at] = item;
            Place place = place_of(p, tiles, item, FALLING);
            barrier_expect(loaded + 8 * at, lefts_bytes, acts);
            copy_keys(maps, p, place, lefts + at * lefts_bytes, loaded + 8 * at, acts);
#pragma unroll 1
            for (int tile = place.tile * KEY_GROUPS; tile < query_tiles; tile++, step++) {
                int stage = step % KEY_STAGES;
                if (step >= KEY_STAGES) barrier_wait(empty + 8 * stage, (step / KEY_STAGES - 1) & 1);
                copy_queries(maps, p, place, memory + stage * KEYS_STAGE, full + 8 * stage, tile, acts);
            }
        }
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    LongRing ring = {memory, full, empty, 0};
#pragma unroll 1
    for (int number = 0;; number++) {
        int at = number % 2;
        barrier_wait(loaded + 8 * at, (number / 2) & 1);
        int item = items[at];
        if (item < 0) break;
        Place place = place_of(p, tiles, item, FALLING);
        uint32 left_at = lefts + at * lefts_bytes + warpgroup() * 2 * TILE_BYTES;
        differentiate_keys(maps, p, place, left_at, ring, [&](int step) { if (step > 0) ring.leave(step - 1); });
        barrier_arrive(free + 8 * at, lane_of_thread() == 0);
        ring.begin += query_tiles - place.tile * KEY_GROUPS;
    }
}
#else
// dk and dv.
extern "C" __global__ void __launch_bounds__(128 * KEY_GROUPS, KEY_BLOCKS)
    k_attention_keys(const __grid_constant__ Maps maps, Attention p) {
    extern __shared__ int8 dynamic[];
    __shared__ uint64 barriers[2 * KEY_STAGES + 1];
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u;
    Place place = place_of(p, (p.tokens + KEY_GROUPS * TILE - 1) / (KEY_GROUPS * TILE), blockIdx.x, FALLING);
    int first_tile = place.tile * KEY_GROUPS, steps = (p.tokens + TILE - 1) / TILE - first_tile;
    uint32 lefts = memory + KEY_STAGES * KEYS_STAGE, loaded = shared_address(barriers + 2 * KEY_STAGES);
    if (threadIdx.x == 0) {
        begin_lefts<KEY_GROUPS>(loaded, 2);
        copy_keys(maps, p, place, lefts, loaded);
    }
    auto ring = make_ring<KEY_STAGES, KEYS_STAGE, KEY_GROUPS>(memory, barriers, steps);
    auto copy = [&](int step, int acts) { copy_queries(maps, p, place, ring.at(step), ring.arrival(step), first_tile + step, acts); };
    ring.begin(copy);
    barrier_wait(loaded, 0);
    differentiate_keys(maps, p, place, lefts + 2 * warpgroup() * TILE_BYTES, ring, [&](int step) { ring.pass(step, copy); });
}
#endif

#if DP == 32
// --- backward, all of a head in one block ---------------------------------------------------------------------------

#define SHORT_TILES 4 // at most, of tokens
#define SHORT_GROUPS 2
#define SHORT_STEPS (SHORT_TILES + 1)
#define SCORE_BYTES (TILE * 128) // of a tile of gradients of scores

// The sum of products of eight elements.
__device__ __forceinline__ float eight_products(uint4 a, uint4 b) {
    uint32 as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum += widened((uint16)(as[i] & 0xffff)) * widened((uint16)(bs[i] & 0xffff));
        sum += widened((uint16)(as[i] >> 16)) * widened((uint16)(bs[i] >> 16));
    }
    return sum;
}

// Store what a warp has of gradients of scores, 16 keys and 16 queries, to a tile whose lines are queries: a lane names
// the row of one of four blocks of 8 x 8, which are stored transposed.
__device__ __forceinline__ void store_scores(uint32 tile, int queries, const uint32 (&words)[4]) {
    int lane = lane_of_thread(), query = queries + lane / 16 * 8 + lane % 8, chunk = 2 * ((threadIdx.x / WARP) & 3) + lane / 8 % 2;
    uint32 to = tile + query * 128 + (chunk ^ (query & 7)) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]) : "memory");
}

// dq, dk and dv of a head with at most four tiles, by two warpgroups: number g takes first the keys of tile g, with all
// queries from the last tile up to these, then those of tile 3 - g, five steps in all. g owns the queries of tiles g and
// 3 - g, too: after every step both meet, and what the step left for dq is added. Every gradient has one writer, which
// adds in a fixed order.
extern "C" __global__ void __launch_bounds__(128 * SHORT_GROUPS, 2)
    k_attention_short(const __grid_constant__ Maps maps, Attention p) {
    extern __shared__ int8 dynamic[];
    __shared__ uint64 barriers[1];
    __shared__ __align__(16) float numbers[2][SHORT_TILES * TILE]; // logarithms and deltas of queries
    int tiles = (p.tokens + TILE - 1) / TILE, group = warpgroup(), warp = (threadIdx.x / WARP) & 3, lane = lane_of_thread();
    int b = blockIdx.x / p.heads, h = blockIdx.x - b * p.heads;
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u, arrival = shared_address(barriers);
    // Behind each other: queries, keys, values, dy; where y is first, gradients of scores of both warpgroups; dq of the
    // later queries as far as it has come, which registers have no room for.
    uint32 places[5];
#pragma unroll
    for (int n = 0; n < 5; n++) places[n] = memory + n * SHORT_TILES * TILE_BYTES;
    uint32 scores = places[4];
    float *parked = (float *)__cvta_shared_to_generic(scores + SHORT_GROUPS * SCORE_BYTES) + threadIdx.x;
    if (threadIdx.x == 0) {
        begin_lefts<1>(arrival, 5 * tiles);
#pragma unroll
        for (int n = 0; n < 5; n++) // all tokens in a box
            copy_box(places[n], n == 4 ? &maps.y : n == 3 ? &maps.dy : &maps.qkv, 0, 0, n < 3 ? n * p.heads + h : h, b, arrival);
    }
    int token = threadIdx.x;
    float logarithm = token < p.tokens ? p.stats[(int64)blockIdx.x * p.tokens + token] : infinity(); // absent ones weigh nothing
    __syncthreads();
    barrier_wait(arrival, 0);
    if (token < tiles * TILE) {
        const uint4 *y = (const uint4 *)__cvta_shared_to_generic(places[4] + token * ROW_BYTES);
        const uint4 *dy = (const uint4 *)__cvta_shared_to_generic(places[3] + token * ROW_BYTES);
        float delta = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) { // y and dy lie alike; threads side by side read from different banks
            int part = (i + lane / 2) % 4;
            delta += eight_products(dy[part], y[part]);
        }
        numbers[0][token] = logarithm * LOG2_E, numbers[1][token] = delta;
    }
    __syncthreads();
    float scale = p.scale * LOG2_E, dk[DP / 2], dv[DP / 2];
#pragma unroll
    for (int i = 0; i < DP / 2; i++) dk[i] = dv[i] = 0.0f;
    // d += gradients of scores that `by` has left times these keys.
    auto add_queries = [&](float (&d)[DP / 2], int by, int keys) {
        uint64 from = box_descriptor<128>(scores + by * SCORE_BYTES), tile = box_descriptor<ROW_BYTES>(places[1] + keys * TILE_BYTES);
        products_begin();
#pragma unroll
        for (int c = 0; c < TILE / 16; c++) half_product<1>(d, from + 2 * c, tile + down(c), 1);
        products_commit();
        products_wait<0>();
        products_done(d);
    };
    int turning = SHORT_TILES - 1 - group; // the last step with the first keys
#pragma unroll 1
    for (int step = 0; step < SHORT_STEPS; step++) {
        int keys = step <= turning ? group : turning, tile = SHORT_TILES - 1 - (step <= turning ? step : step - turning - 1);
        if (tile < tiles) {
            uint64 queries = box_descriptor<ROW_BYTES>(places[0] + tile * TILE_BYTES);
            uint64 dys = box_descriptor<ROW_BYTES>(places[3] + tile * TILE_BYTES);
            float s[SCORES], ds[SCORES];
            uint32 weights[TILE / 16][4], left[TILE / 16][4];
            products_begin();
            multiply_rows(s, box_descriptor<ROW_BYTES>(places[1] + keys * TILE_BYTES), queries);
            products_commit();
            multiply_rows(ds, box_descriptor<ROW_BYTES>(places[2] + keys * TILE_BYTES), dys);
            products_commit();
            uint32 kept = 0;
            if (DROPOUT) kept = kept_by_key(p, blockIdx.x, tile * TILE, keys * TILE + 16 * warp);
            Numbers logarithms, deltas;
            products_wait<1>();
            products_done(s);
            logarithms.load(numbers[0] + tile * TILE);
#pragma unroll
            for (int i = 0; i < SCORES; i++) s[i] = exp2f(s[i] * scale - logarithms.at(i));
            if (tile == keys) {
#pragma unroll
                for (int i = 0; i < SCORES; i++)
                    if (16 * warp + lane / 4 + 8 * ((i >> 1) & 1) > 8 * (i / 4) + 2 * (lane & 3) + (i & 1)) s[i] = 0.0f;
            }
            products_wait<0>();
            products_done(ds);
            deltas.load(numbers[1] + tile * TILE);
#pragma unroll
            for (int c = 0; c < TILE / 16; c++) {
#pragma unroll
                for (int i = 8 * c; i < 8 * c + 8; i++) differentiate(s[i], ds[i], deltas.at(i), is_kept(kept, i), p.mask.factor);
                left_operand(weights[c], s, c), left_operand(left[c], ds, c);
                store_scores(scores + group * SCORE_BYTES, 16 * c, left[c]);
            }
            products_begin();
            add_tile(dv, weights, dys);
            add_tile(dk, left, queries);
            products_commit();
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            products_wait<0>(); // the other warpgroup may write over their operands next
            products_done(dk), products_done(dv);
        }
        __syncthreads();
        bool begins = step == group, goes_on = step == SHORT_STEPS - 2 && group == 0, ends = step == SHORT_STEPS - 1;
        float dq[DP / 2];
        if (turning < tiles && (begins || goes_on)) {
#pragma unroll
            for (int i = 0; i < DP / 2; i++) dq[i] = begins ? 0.0f : parked[128 * SHORT_GROUPS * i];
            add_queries(dq, begins ? 0 : 1, begins ? 0 : 2);
            if (begins) add_queries(dq, 1, 1);
#pragma unroll
            for (int i = 0; i < DP / 2; i++) parked[128 * SHORT_GROUPS * i] = dq[i];
        }
        if (keys < tiles && (step == turning || ends)) {
#pragma unroll
            for (int i = 0; i < DP / 2; i++) dq[i] = ends ? parked[128 * SHORT_GROUPS * i] : 0.0f;
            add_queries(dq, ends ? group : 0, ends ? turning : 0);
            if (group == 1 && !ends) add_queries(dq, 1, 1);
            // Nobody needs queries, keys and values of this tile any more.
            float factor = DROPOUT ? p.mask.factor : 1.0f;
            uint32 from = memory + keys * TILE_BYTES;
            store_tile(from, dq, p.scale, p.scale);
            store_tile(from + SHORT_TILES * TILE_BYTES, dk, p.scale, p.scale);
            store_tile(from + 2 * SHORT_TILES * TILE_BYTES, dv, factor, factor);
            if (tiles_stored())
#pragma unroll
                for (int n = 0; n < 3; n++)
                    write_tile(from + n * SHORT_TILES * TILE_BYTES, &maps.dqkv, keys * TILE, n * p.heads + h, b);
#pragma unroll
            for (int i = 0; i < DP / 2; i++) dk[i] = dv[i] = 0.0f;
        }
        __syncthreads(); // before the next gradients are left
    }
    if (threadIdx.x % 128 == 0) stores_read();
}

#endif
#endif
