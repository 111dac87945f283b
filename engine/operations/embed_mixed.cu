// Token and position embedding of the tier prod; see embed.py. Sums over tokens go in ascending order.
#include "half.cuh"

// A thread takes eight elements; width % 8 == 0.
extern "C" __global__ void k_embed_fwd(const int *ids, int context, const float *token, const float *position, int64 size,
                                       int width, uint16 *y, int64 base, Mask mask, const StepValues *values) {
    int64 i = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size) return;
    int64 t = i / width;
    int c = (int)(i - t * width);
    Eight a = load8(token + (int64)ids[t] * width + c), b = load8(position + (t % context) * width + c);
#pragma unroll
    for (int j = 0; j < 8; j++) a.x[j] += b.x[j];
    drop8(a, mask, values, base + i);
    store8(y + i, a);
}

#define TILE 1024

// Where each token stands in a shard: order [shards, tokens] lists places by id, ascending; spans [shards, vocab] say
// where an id's places begin there and how many they are. Ids that do not occur have zeros in spans already.
// Grid: blocks of threads over the tokens, shards.
extern "C" __global__ void k_embed_places(const int *ids, int tokens, int vocab, int *order, int2 *spans) {
    __shared__ int tile[TILE];
    int t = blockIdx.x * blockDim.x + threadIdx.x, smaller = 0, before = 0, same = 0;
    int64 shard = (int64)blockIdx.y * tokens;
    int mine = t < tokens ? ids[shard + t] : 0;
    for (int start = 0; start < tokens; start += TILE) {
        int count = min(TILE, tokens - start);
        for (int i = threadIdx.x; i < count; i += blockDim.x) tile[i] = ids[shard + start + i];
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < count; i++) {
            int id = tile[i];
            smaller += id < mine;
            same += id == mine;
            before += id == mine && start + i < t;
        }
        __syncthreads();
    }
    if (t >= tokens) return;
    order[shard + smaller + before] = t;
    if (before == 0) spans[(int64)blockIdx.y * vocab + mine] = make_int2(smaller, same);
}

__device__ __forceinline__ Eight operator+(Eight a, const Eight &b) {
#pragma unroll
    for (int j = 0; j < 8; j++) a.x[j] += b.x[j];
    return a;
}

#define BLOCK_SHARDS 8
#define TOKENS_AT_ONCE 4 // rows on their way from memory together: more need registers that other blocks want
#define ROWS_AT_ONCE 8

// sum += a lane's eight columns of `count` tokens, in ascending order.
__device__ __forceinline__ void add_tokens(Eight &sum, const int *places, int count, const uint16 *dy, int width, int64 base,
                                           const Mask &mask, const StepValues *values) {
    for (int from = 0; from < count; from += TOKENS_AT_ONCE) {
        int64 at[TOKENS_AT_ONCE];
        uint4 words[TOKENS_AT_ONCE];
#pragma unroll
        for (int n = 0; n < TOKENS_AT_ONCE; n++) at[n] = (int64)places[min(from + n, count - 1)] * width;
#pragma unroll
        for (int n = 0; n < TOKENS_AT_ONCE; n++) words[n] = *(const uint4 *)(dy + at[n]);
#pragma unroll
        for (int n = 0; n < TOKENS_AT_ONCE; n++) {
            if (from + n >= count) break;
            Eight d = widened(words[n]);
            drop8(d, mask, values, base + at[n]);
            sum = sum + d;
        }
    }
}

// dtoken[id] (+)= the sum of dy (and of `others` where not null) over the tokens of a shard with that id, in ascending
// order, joined by the tree over shards (a power of two, at most 64). dy [shards, tokens, width], others [shards, vocab,
// width]. A warp takes a shard, a lane eight columns. Grid: ids, 256 columns; a block has min(shards, BLOCK_SHARDS) warps.
extern "C" __global__ void __launch_bounds__(BLOCK_SHARDS *WARP, 5)
k_embed_bwd_token(const int *order, const int2 *spans, int shards, int tokens, int vocab, int width, const uint16 *dy,
                  int64 base, Mask mask, const StepValues *values, const float *others, float *dtoken, int add) {
    __shared__ __align__(16) float sums[BLOCK_SHARDS][256];
    int id = blockIdx.x, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = lane_of_thread();
    int c = 256 * blockIdx.y + 8 * lane;
    bool inside = c < width;
    Eight pending[4];
    int depth = 0;
    // Most ids of a large vocabulary do not occur.
    bool occurs = others;
    for (int s = warp; s < shards; s += warps) occurs |= spans[(int64)s * vocab + id].y > 0;
    if (!__syncthreads_or(occurs)) {
        const Eight zeros = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
        if (warp == 0 && inside && !add) store8(dtoken + (int64)id * width + c, zeros);
        return;
    }
    for (int first = 0; first < shards; first += warps) {
        Eight sum = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
        if (inside) {
            int64 row = (int64)(first + warp) * vocab + id, shard = (int64)(first + warp) * tokens;
            int2 span = spans[row];
            if (others) sum = load8(others + row * width + c);
            add_tokens(sum, order + shard + span.x, span.y, dy + shard * width + c, width, base + shard * width + c, mask, values);
        }
        store8(&sums[warp][8 * lane], sum);
        __syncthreads();
        if (warp == 0) {
            for (int n = warps / 2; n > 0; n /= 2)
                for (int s = 0; s < n; s++)
                    store8(&sums[s][8 * lane], load8(&sums[2 * s][8 * lane]) + load8(&sums[2 * s + 1][8 * lane]));
            sum = load8(&sums[0][8 * lane]);
            for (int n = first / warps; n & 1; n >>= 1) sum = pending[--depth] + sum;
            pending[depth++] = sum;
        }
        __syncthreads();
    }
    if (warp || !inside) return;
    float *out = dtoken + (int64)id * width + c;
    store8(out, add ? load8(out) + pending[0] : pending[0]);
}

// The same sums where an id stands in few shards, if in any: a warp takes an id. Grid: blocks of warps over the ids, 256
// columns.
extern "C" __global__ void __launch_bounds__(BLOCK_SHARDS *WARP)
k_embed_bwd_token_rare(const int *order, const int2 *spans, int shards, int tokens, int vocab, int width, const uint16 *dy,
                       int64 base, Mask mask, const StepValues *values, const float *others, float *dtoken, int add) {
    int id = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = lane_of_thread(), c = 256 * blockIdx.y + 8 * lane;
    if (id >= vocab) return;
    bool inside = c < width;
    const Eight zeros = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
    float *out = dtoken + (int64)id * width + c;
    auto span_of = [&](int s) { return s < shards ? spans[(int64)s * vocab + id] : make_int2(0, 0); };
    auto sum_of = [&](Eight sum, int s, int2 span) { // with the lane's columns of shard s
        int64 shard = (int64)s * tokens;
        add_tokens(sum, order + shard + span.x, span.y, dy + shard * width + c, width, base + shard * width + c, mask, values);
        return sum;
    };
    auto span_from = [&](int2 own, int from) {
        return make_int2(__shfl_sync(ALL_LANES, own.x, from), __shfl_sync(ALL_LANES, own.y, from));
    };
    if (!others && shards <= WARP) {
        int2 own = span_of(lane);
        uint32 present = __ballot_sync(ALL_LANES, own.y > 0);
        // Most stand in two shards at most, and a tree adds zeros to their sums: that changes a sum alone that was flushed
        // to -0.
        if (__popc(present) <= 2) {
            Eight sum = zeros;
            int apart = max(__ffs(present) - 1, 0) ^ (WARP - 1 - __clz(present | 1)); // of both shards' numbers
            for (uint32 left = present; left; left &= left - 1) {
                int s = __ffs(left) - 1;
                int2 span = span_from(own, s);
                if (!inside) continue;
                Eight one = sum_of(zeros, s, span);
                if (apart > 1) one = one + zeros; // its neighbour
                sum = left == present ? one : sum + one;
            }
            if (max(2 * apart, 1) < shards) sum = sum + zeros; // the other half
            if (inside && (present || !add)) store8(out, add ? load8(out) + sum : sum);
            return;
        }
    }
    Eight pending[7];
    int depth = 0;
    bool occurs = others;
    for (int first = 0; first < shards; first += WARP) {
        int2 own = span_of(first + lane);
        for (int s = first; s < min(first + WARP, shards); s++) {
            int2 span = span_from(own, s - first);
            occurs |= span.y > 0;
            Eight sum = zeros;
            if (inside) sum = sum_of(others ? load8(others + ((int64)s * vocab + id) * width + c) : zeros, s, span);
            for (int n = s; n & 1; n >>= 1) sum = pending[--depth] + sum;
            pending[depth++] = sum;
        }
    }
    if (inside && (occurs || !add)) store8(out, add ? load8(out) + pending[0] : pending[0]);
}

// dposition[t] (+)= the sum of dy over the rows of each shard, joined by the tree over shards (a power of two, at most 64).
extern "C" __global__ void k_embed_bwd_position(int shards, int tokens, int context, int width, const uint16 *dy,
                                                int64 base, Mask mask, const StepValues *values, float *dposition,
                                                int add) {
    int i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= context * width) return;
    const Eight zeros = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
    Eight pending[7], sum = zeros;
    int depth = 0, shard_rows = tokens / context, rows = shards * shard_rows;
    int64 row = (int64)context * width;
    for (int first = 0, s = 0, left = shard_rows; first < rows; first += ROWS_AT_ONCE) {
        uint4 words[ROWS_AT_ONCE];
#pragma unroll
        for (int n = 0; n < ROWS_AT_ONCE; n++)
            if (first + n < rows) words[n] = *(const uint4 *)(dy + (first + n) * row + i);
#pragma unroll
        for (int n = 0; n < ROWS_AT_ONCE; n++) {
            if (first + n >= rows) break;
            Eight d = widened(words[n]);
            drop8(d, mask, values, base + (first + n) * row + i);
            sum = sum + d;
            if (--left) continue;
            for (int m = s; m & 1; m >>= 1) sum = pending[--depth] + sum;
            pending[depth++] = sum;
            sum = zeros, left = shard_rows, s++;
        }
    }
    store8(dposition + i, add ? load8(dposition + i) + pending[0] : pending[0]);
}
