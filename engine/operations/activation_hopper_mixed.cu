// The MLP's products beside its activation f in the tier prod, on compute capability 9.0, each in one kernel with it.
//
// Legend: T tokens, W the model's width, H the hidden one.
// Forward: before [T, H] = x [T, W] * weight [H, W] transposed + bias [H], after [T, H] = f(before).
// BACK: dbefore [T, H] = (dy [T, W] * weight [W, H]) * f'(before), and what the gradient of the bias is added up from.
//
// Blocks stay and take tile after tile. One warp copies the operands of all tiles, in turn; two pairs of warpgroups take
// every other tile: while one goes through the depth, the other computes the activation or its derivative, chunk by
// chunk. Chunks of results stand in shared memory, which has room for those of TILES tiles (1 or 2), on the way back
// each where that of `before` was; two warps bring the ones and write the others, as soon as there is room or they are
// done. (One warpgroup for a tile would do for the products, but its four warps alone take too long for the rest.)
//
// The two blocks of a cluster take tiles one above the other: each copies half of what a stage
// has of the weight, to both.
//
// Compiled for RELU or GELU, forward or BACK, with a BIAS or without, STAGES of the depth under way, and TILES.
#include "activations.cuh"
#include "half_products.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define ROWS 128 // of a tile
#define COLUMNS 128
#define DEPTH 64 // of a stage; also rows and columns of a chunk
#define LINE 128 // bytes of a line in shared memory: 64 elements, the width of the copy engine's swizzle
#define LEFT_BYTES (ROWS * LINE)
#define BOX_BYTES (DEPTH * LINE) // a chunk, or 64 columns of the right operand
#define BOXES (COLUMNS / 64)
#define STAGE_BYTES (LEFT_BYTES + BOXES * BOX_BYTES)
#define CHUNKS (2 * BOXES)
#define CHUNK_BYTES (BACK ? BOX_BYTES : 2 * BOX_BYTES) // forward `before`, and `after` behind it
#define PAIRED 2 // blocks of a cluster
#define SUM_ROWS 64 // that the parts of the bias's gradient are sums of

struct Product {
    const uint16 *bias; // [H]
    float *parts; // [T / SUM_ROWS, H]
    int tokens, width, hidden;
};

struct Place {
    int row, column;
};

// The tiles of a block.
struct Tiles {
    int wide, tall, first, step, count, down;

    __device__ __forceinline__ Tiles(const Product &p) {
        tall = (p.tokens + PAIRED * ROWS - 1) / (PAIRED * ROWS);
        wide = (p.hidden + COLUMNS - 1) / COLUMNS, down = cluster_rank();
        first = blockIdx.x / PAIRED, step = gridDim.x / PAIRED, count = (tall * wide - first + step - 1) / step;
    }
    // To the right first: what they share of dy is read once from memory, and the weight stays in the cache. The last
    // tokens first: the product that follows begins with the first ones, which are in the cache then.
    __device__ __forceinline__ Place operator[](int i) const {
        int number = first + i * step, line = number / wide;
        return {((tall - 1 - line) * PAIRED + down) * ROWS, (number - line * wide) * COLUMNS};
    }
};

// Barriers in shared memory: of stages, whether they are full, empty; of each pair of warpgroups, whether it may go
// through the depth, and of the chunks of its tile, whether there is room (with `before` in it) and results are. A
// barrier's parity tells one round from the next, no more: none is waited for by one that may be two rounds ahead.
struct Barriers {
    uint64 full[STAGES], empty[STAGES], turn[2], ready[2 * CHUNKS], written[2 * CHUNKS];
};

// A chunk of tile number i: the upper or lower half of its 64 columns number b.
__device__ __forceinline__ int chunk_of(int i, int b, int half) { return (i & 1) * CHUNKS + 2 * b + half; }

__device__ __forceinline__ uint32 chunk_place(uint32 chunks, int chunk) { return chunks + chunk % (TILES * CHUNKS) * CHUNK_BYTES; }

__device__ __forceinline__ void copy_operands(const TensorMap *left, const TensorMap *weight, const Tiles &tiles, int steps,
                                              uint32 memory, uint32 full, uint32 empty) {
    int stage = 0, half = tiles.down * (DEPTH / PAIRED);
    uint32 parity = 1; // the first pass over the stages finds them empty
    for (int i = 0; i < tiles.count; i++) {
        Place place = tiles[i];
        for (int step = 0; step < steps; step++) {
            uint32 to = memory + stage * STAGE_BYTES, arrival = full + 8 * stage;
            barrier_wait(empty + 8 * stage, parity);
            barrier_expect(arrival, STAGE_BYTES);
            copy_box(to, left, step * DEPTH, place.row, 0, 0, arrival);
            to += LEFT_BYTES;
            if (BACK) {
#pragma unroll
                for (int b = 0; b < BOXES; b++)
                    copy_box_to(to + b * BOX_BYTES + half * LINE, weight, place.column + 64 * b, step * DEPTH + half, 0, 0, arrival, 3);
            } else {
                int columns = tiles.down * (COLUMNS / PAIRED);
                copy_box_to(to + columns * LINE, weight, step * DEPTH, place.column + columns, 0, 0, arrival, 3);
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

// Make room for the chunks of one half of all tiles, on the way back with `before` in it, and write what gets there.
__device__ __forceinline__ void copy_chunks(const TensorMap *before, const TensorMap *result, const Tiles &tiles, int half,
                                            uint32 chunks, uint32 ready, uint32 written) {
    for (int i = 0; i < tiles.count + TILES; i++)
#pragma unroll
        for (int b = 0; b < BOXES; b++) {
            int done = i - TILES;
            if (done >= 0) {
                Place place = tiles[done];
                int chunk = chunk_of(done, b, half);
                barrier_wait(written + 8 * chunk, done / 2 & 1);
                uint32 from = chunk_place(chunks, chunk);
                if (!BACK) {
                    store_box(before, place.column + 64 * b, place.row + 64 * half, 0, 0, from);
                    from += BOX_BYTES;
                }
                store_box(result, place.column + 64 * b, place.row + 64 * half, 0, 0, from);
                stores_read();
            }
            if (i < tiles.count) {
                Place place = tiles[i];
                int chunk = chunk_of(i, b, half);
                if (BACK) {
                    barrier_expect(ready + 8 * chunk, BOX_BYTES);
                    copy_box(chunk_place(chunks, chunk), before, place.column + 64 * b, place.row + 64 * half, 0, 0, ready + 8 * chunk);
                } else {
                    barrier_arrive(ready + 8 * chunk);
                }
            }
        }
}

// Eight sums each of 32 lanes over the eight lanes with the same lane % 4: lane 4g + t keeps that of number g.
__device__ __forceinline__ float sum_of_eight(float (&s)[8]) {
#pragma unroll
    for (int apart = 4; apart >= 1; apart /= 2) {
        bool upper = lane_of_thread() & (4 * apart);
#pragma unroll
        for (int j = 0; j < apart; j++) {
            float own = upper ? s[j + apart] : s[j], other = upper ? s[j] : s[j + apart];
            s[j] = own + __shfl_xor_sync(ALL_LANES, other, 4 * apart);
        }
    }
    return s[0];
}

// Sixteen columns of a warp's 16 rows in shared memory, as a product's sums lie in registers: a word is a row's two
// neighbouring elements, of row g and g + 8, and of the eight columns further right.
struct Words {
    uint32 w[4];
};

__device__ __forceinline__ Words load_words(uint32 address) {
    Words v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_words(uint32 address, const Words &v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.w[0]), "r"(v.w[1]),
                 "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

__device__ __forceinline__ float low_half(uint32 w) { return widened((uint16)(w & 0xffff)); }
__device__ __forceinline__ float high_half(uint32 w) { return widened((uint16)(w >> 16)); }

// A chunk: sums from number `first` on, times the derivative of what stands at `at` (of this lane's row of a block of
// 16 x 16), become dbefore there; columns are the sums over the warp's rows.
__device__ __forceinline__ void apply_slopes(const float (&d)[COLUMNS / 2], int first, uint32 at, float *columns) {
    int lane = lane_of_thread();
    Words next[2] = {load_words(at), load_words(at ^ 32)};
#pragma unroll
    for (int q = 0; q < 2; q++) {
        Words v[2] = {next[0], next[1]};
        if (q == 0)
#pragma unroll
            for (int b = 0; b < 2; b++) next[b] = load_words(at ^ (64 + 32 * b));
        float s[8];
#pragma unroll
        for (int b = 0; b < 2; b++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int i = first + 16 * q + 8 * b + 2 * j, n = 4 * b + j / 2 * 2;
                float low = d[i] * derivative(low_half(v[b].w[j])), high = d[i + 1] * derivative(high_half(v[b].w[j]));
                v[b].w[j] = narrowed(low, high);
                s[n] = j & 1 ? s[n] + low : low;
                s[n + 1] = j & 1 ? s[n + 1] + high : high;
            }
            store_words(at ^ (64 * q + 32 * b), v[b]);
        }
        if (BIAS) columns[32 * q + lane / 8 * 8 + 2 * (lane & 3) + (lane / 4 & 1)] = sum_of_eight(s);
    }
}

// Two neighbouring elements of the bias for each two of a thread's sums of 8 x 8 results.
struct Bias {
    uint32 w[COLUMNS / 8];
};

__device__ __forceinline__ Bias load_bias(const Product &p, int column) {
    Bias bias;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
        int c = column + 8 * n + 2 * (lane_of_thread() & 3);
        bias.w[n] = BIAS && c < p.hidden ? *(const uint32 *)(p.bias + c) : 0;
    }
    return bias;
}

// A chunk: sums from number `first` on become `before` at `at` (of this lane's row of a block of 16 x 16), and `after`.
__device__ __forceinline__ void apply_activation(const float (&d)[COLUMNS / 2], int first, const Bias &bias, uint32 at) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
        Words before, after;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int i = first + 8 * q + 2 * j;
            uint32 b = bias.w[i / 4];
            before.w[j] = BIAS ? narrowed(d[i] + low_half(b), d[i + 1] + high_half(b)) : narrowed(d[i], d[i + 1]);
            after.w[j] = narrowed(activated(low_half(before.w[j])), activated(high_half(before.w[j])));
        }
        store_words(at ^ (32 * q), before);
        store_words((at ^ (32 * q)) + BOX_BYTES, after);
    }
}

// All warps of the warpgroup number `group`.
__device__ __forceinline__ void warps_meet(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory"); }

// A chunk's sums over its rows from those over each warp's: a thread for each column.
__device__ __forceinline__ void put_sums(const Product &p, int row, int column, const float (&columns)[4][64]) {
    int c = threadIdx.x % 128;
    if (c >= 64 || row >= p.tokens || column + c >= p.hidden) return;
    float sum = columns[0][c];
#pragma unroll
    for (int w = 1; w < 4; w++) sum += columns[w][c];
    p.parts[(int64)(row / SUM_ROWS) * p.hidden + column + c] = sum;
}

extern "C" __global__ void __cluster_dims__(PAIRED) __launch_bounds__(640, 1)
    k_activation_product(const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap weight,
                         const __grid_constant__ TensorMap before, const __grid_constant__ TensorMap result, Product p) {
    extern __shared__ int8 dynamic[];
    __shared__ Barriers barriers;
    __shared__ float columns[BACK ? 2 * CHUNKS : 1][4][64];
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u, chunks = memory + STAGES * STAGE_BYTES;
    uint32 full = shared_address(barriers.full), empty = shared_address(barriers.empty), turn = shared_address(barriers.turn);
    uint32 ready = shared_address(barriers.ready), written = shared_address(barriers.written);
    int role = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0), lane = lane_of_thread(), warp = (threadIdx.x / WARP) & 3;
    if (threadIdx.x == 0) {
        for (const TensorMap *map : {&left, &weight, &before, &result}) asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 8 * PAIRED); // warps
        }
        for (int g = 0; g < 2; g++) barrier_init(turn + 8 * g, 8);
        for (int c = 0; c < 2 * CHUNKS; c++) {
            barrier_init(ready + 8 * c, 1);
            barrier_init(written + 8 * c, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    cluster_sync();
    Tiles tiles(p);
    int steps = (p.width + DEPTH - 1) / DEPTH;
    if (role == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (lane == 0) {
            if (warp == 0) copy_operands(&left, &weight, tiles, steps, memory, full, empty);
            else if (warp <= 2) copy_chunks(&before, &result, tiles, warp - 1, chunks, ready, written);
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        int pair = (role - 1) / 2, half = (role - 1) & 1; // of the tile's rows
        uint32 left_lines = half * 64 * LINE;
        // A lane's row of a block of 16 x 16, its half to the left or right; the swizzle moves 16 bytes by the row.
        uint32 inside = (16 * warp + lane % 16) * LINE + (lane % 8 ^ lane / 16) * 16;
        uint32 empty_there = address_in(empty, lane % PAIRED); // a lane for each block of the cluster
        float d[COLUMNS / 2];
        uint32 round = 0; // of the pair's own tiles
        for (int i = pair; i < tiles.count; i += 2, round ^= 1) {
            int taken = i * steps, stage = taken % STAGES, last = 0;
            uint32 parity = (taken / STAGES) & 1;
            barrier_wait(turn + 8 * pair, pair == 0 ? round ^ 1 : round);
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                barrier_wait(full + 8 * stage, parity);
                uint64 left = box_descriptor<LINE>(memory + stage * STAGE_BYTES + left_lines);
                uint64 right = box_descriptor<LINE>(memory + stage * STAGE_BYTES + LEFT_BYTES);
                products_begin();
#pragma unroll
                for (int k = 0; k < DEPTH / 16; k++) half_product<BACK>(d, left + 2 * k, right + (BACK ? LINE : 2) * k, step + k > 0);
                products_commit();
                if (step > 0) {
                    products_wait<1>();
                    barrier_arrive_there(empty_there + 8 * last, lane < PAIRED);
                }
                last = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            barrier_arrive(turn + 8 * (pair ^ 1), lane == 0);
            Place place = tiles[i];
            Bias bias = load_bias(p, place.column);
            products_wait<0>();
            products_done(d);
            barrier_arrive_there(empty_there + 8 * last, lane < PAIRED);
#pragma unroll
            for (int b = 0; b < BOXES; b++) {
                int chunk = chunk_of(i, b, half);
                barrier_wait(ready + 8 * chunk, round);
                uint32 at = chunk_place(chunks, chunk) + inside;
                if (BACK) apply_slopes(d, 32 * b, at, columns[chunk][warp]);
                else apply_activation(d, 32 * b, bias, at);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                if (BACK && BIAS) {
                    warps_meet(role);
                    put_sums(p, place.row + 64 * half, place.column + 64 * b, columns[chunk]);
                }
                __syncwarp();
                barrier_arrive(written + 8 * chunk, lane == 0);
            }
        }
    }
    cluster_sync(); // nothing copies to a block, or arrives there, that has ended
}

#endif
