// The end of a branch and LayerNorm in the tier prod, in one kernel, on compute capability 9.0.
//
// Legend: T tokens, W = WIDTH the model's width, K the depth of the product.
// branch [T, W] = left [T, K] * right [W, K] transposed + bias; sum = x + dropout(branch), y = LayerNorm(sum); formulas
// as in layernorm_mixed.cu. The branch never reaches memory.
//
// A block takes 64 tokens and all columns, so that it has whole rows: two warpgroups multiply, each with half of the
// columns, a warp copies operands. Then the product stands in shared memory where the operands were, and a warp takes
// eight rows of it. The two blocks of a cluster each copy half of what a stage has of the right operand, to both.
//
// Compiled for WIDTH (a multiple of 128) and STAGES of the depth under way.
#include "half_products.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define EPSILON 1e-5f
#define ROWS 64 // of a block
#define DEPTH 64 // of a stage
#define LINE 128 // bytes of a line in shared memory: 64 elements, the width of the copy engine's swizzle
#define BOX (64 * LINE)
#define BOXES (WIDTH / 64)
#define STAGE_BYTES (BOX + BOXES * BOX)
#define PAIRED 2 // blocks of a cluster
#define GROUPS 2 // warpgroups that multiply
#define WARPS (4 * GROUPS)
#define WARP_ROWS (ROWS / WARPS)
#define AT_ONCE 4 // rows that a warp computes together, so that it waits less
#define FOURS (WIDTH / (4 * WARP)) // groups of four columns that a lane has of a row
#define TILE_BYTES (BOXES * BOX) // a product in 16 bits

struct Barriers {
    uint64 full[STAGES], empty[STAGES];
};

// A lane's part of a row: element 4 i + j is column 4 (lane + 32 i) + j.
struct Row {
    float x[4 * FOURS];
};

struct Words {
    uint2 w[FOURS];
};

__device__ __forceinline__ int column_of(int i) { return 4 * (lane_of_thread() + WARP * i); }

__device__ __forceinline__ Row widened(const Words &words) {
    Row row;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        uint32 w[2] = {words.w[i].x, words.w[i].y};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            row.x[4 * i + 2 * j] = widened((uint16)(w[j] & 0xffff));
            row.x[4 * i + 2 * j + 1] = widened((uint16)(w[j] >> 16));
        }
    }
    return row;
}

__device__ __forceinline__ Words narrowed(const Row &row) {
    Words words;
#pragma unroll
    for (int i = 0; i < FOURS; i++)
        words.w[i] = make_uint2(narrowed(row.x[4 * i], row.x[4 * i + 1]), narrowed(row.x[4 * i + 2], row.x[4 * i + 3]));
    return words;
}

__device__ __forceinline__ Words load_words(const uint16 *row) {
    Words words;
#pragma unroll
    for (int i = 0; i < FOURS; i++) words.w[i] = *(const uint2 *)(row + column_of(i));
    return words;
}

__device__ __forceinline__ void store_words(uint16 *row, const Words &words) {
#pragma unroll
    for (int i = 0; i < FOURS; i++) *(uint2 *)(row + column_of(i)) = words.w[i];
}

// Of fp32 [W], `otherwise` where it is null.
__device__ __forceinline__ Row load_parameter(const float *p, float otherwise) {
    Row row;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        float4 v = p ? *(const float4 *)(p + column_of(i)) : make_float4(otherwise, otherwise, otherwise, otherwise);
        row.x[4 * i] = v.x, row.x[4 * i + 1] = v.y, row.x[4 * i + 2] = v.z, row.x[4 * i + 3] = v.w;
    }
    return row;
}

// Row r of the product in shared memory.
__device__ __forceinline__ Words tile_words(uint32 tile, int r) {
    Words words;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        int c = column_of(i);
        uint32 at = tile + c / 64 * BOX + r * LINE + ((c % 64 / 8) ^ (r % 8)) * 16 + c % 8 * 2;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.w[i].x), "=r"(words.w[i].y) : "r"(at) : "memory");
    }
    return words;
}

// Dropout of a row that begins at element `at`.
__device__ __forceinline__ void drop(Row &row, const Mask &mask, const StepValues *values, int64 at) {
    if (!mask.threshold) return;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        uint4 r = random_words4(values, mask.site, (uint64)((at + column_of(i)) / 4));
        uint32 words[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int j = 0; j < 4; j++) row.x[4 * i + j] = dropped(row.x[4 * i + j], words[j], mask.threshold, mask.factor);
    }
}

// All warps that multiply.
__device__ __forceinline__ void warps_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// The product of a block's rows, left in 16 bits at `memory`, for all warps of warpgroups that multiply: others return
// when all is copied.
__device__ __forceinline__ void multiply(const TensorMap *left, const TensorMap *right, int depth, uint32 memory, Barriers &barriers) {
    uint32 full = shared_address(barriers.full), empty = shared_address(barriers.empty), half = cluster_rank();
    int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0), lane = lane_of_thread();
    int steps = (depth + DEPTH - 1) / DEPTH;
    if (threadIdx.x == 0) {
        for (const TensorMap *map : {left, right}) asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPS * PAIRED);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    cluster_sync();
    if (group == GROUPS) {
        if (lane == 0) {
            int stage = 0, down = half * (WIDTH / PAIRED);
            uint32 parity = 1; // the first pass over the stages finds them empty
            for (int step = 0; step < steps; step++) {
                uint32 to = memory + stage * STAGE_BYTES, arrival = full + 8 * stage;
                barrier_wait(empty + 8 * stage, parity);
                barrier_expect(arrival, STAGE_BYTES);
                copy_box(to, left, step * DEPTH, blockIdx.x * ROWS, 0, 0, arrival);
                copy_box_to(to + BOX + down * LINE, right, step * DEPTH, down, 0, 0, arrival, 3);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        __syncwarp();
        return;
    }
    float d[WIDTH / 4];
    int stage = 0, last = 0;
    uint32 parity = 0, first = memory + BOX + group * (TILE_BYTES / GROUPS), empty_there = address_in(empty, half ^ 1);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        barrier_wait(full + 8 * stage, parity);
        uint64 a = box_descriptor<LINE>(memory + stage * STAGE_BYTES), b = box_descriptor<LINE>(first + stage * STAGE_BYTES);
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) half_product<0>(d, a + 2 * k, b + 2 * k, step + k > 0);
        products_commit();
        if (step > 0) {
            products_wait<1>();
            barrier_arrive(empty + 8 * last, lane == 0);
            barrier_arrive_there(empty_there + 8 * last, lane == 0);
        }
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    products_wait<0>();
    products_done(d);
    warps_meet(); // nobody reads operands any more
    uint32 inside = (16 * (threadIdx.x / WARP & 3) + lane % 16) * LINE + (lane % 8 ^ lane / 16) * 16;
#pragma unroll
    for (int q = 0; q < WIDTH / 32; q++) {
        uint32 at = memory + group * (TILE_BYTES / GROUPS) + q / 4 * BOX + (inside ^ (q % 4 * 32)), w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = narrowed(d[8 * q + 2 * j], d[8 * q + 2 * j + 1]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(w[0]), "r"(w[1]),
                     "r"(w[2]), "r"(w[3]) : "memory");
    }
}

struct Norm {
    const uint16 *x; // [T, W], as sum and y
    const float *branch_bias, *gain, *bias; // [W], or null: zeros, ones, zeros
    uint16 *sum, *y;
    float *mean, *rstd; // [T]
    int64 base;
    Mask mask;
    const StepValues *values;
};

// A sum for each of several rows over all lanes.
__device__ __forceinline__ void add_lanes(float (&sums)[AT_ONCE]) {
#pragma unroll
    for (int apart = WARP / 2; apart > 0; apart >>= 1)
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) sums[r] += __shfl_xor_sync(ALL_LANES, sums[r], apart);
}

// The rows from number `above` of a block on, which are rows from `first` on: AT_ONCE of them, of which those below
// `tokens` are there.
__device__ __forceinline__ void normalise(const Norm &p, uint32 tile, int above, int first, int tokens, const Row &branch_bias,
                                          const Words (&xs)[AT_ONCE]) {
    Row v[AT_ONCE];
    float total[AT_ONCE], squares[AT_ONCE];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        int64 start = (int64)(first + r) * WIDTH;
        Row x = widened(xs[r]), b = widened(tile_words(tile, above + r));
#pragma unroll
        for (int i = 0; i < 4 * FOURS; i++) b.x[i] += branch_bias.x[i];
        drop(b, p.mask, p.values, p.base + start);
#pragma unroll
        for (int i = 0; i < 4 * FOURS; i++) x.x[i] += b.x[i];
        Words words = narrowed(x);
        if (first + r < tokens) store_words(p.sum + start, words);
        v[r] = widened(words); // the backward pass sees the rounded sum
        total[r] = squares[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * FOURS; i++) total[r] += v[r].x[i];
    }
    add_lanes(total);
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        total[r] *= 1.0f / WIDTH;
#pragma unroll
        for (int i = 0; i < 4 * FOURS; i++) {
            v[r].x[i] -= total[r];
            squares[r] += v[r].x[i] * v[r].x[i];
        }
    }
    add_lanes(squares);
    Row gain = load_parameter(p.gain, 1.0f), bias = load_parameter(p.bias, 0.0f);
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        float s = rsqrtf(squares[r] * (1.0f / WIDTH) + EPSILON);
#pragma unroll
        for (int i = 0; i < 4 * FOURS; i++) v[r].x[i] = v[r].x[i] * s * gain.x[i] + bias.x[i];
        if (first + r >= tokens) continue;
        store_words(p.y + (int64)(first + r) * WIDTH, narrowed(v[r]));
        if (lane_of_thread() == 0) p.mean[first + r] = total[r], p.rstd[first + r] = s;
    }
}

extern "C" __global__ void __cluster_dims__(PAIRED) __launch_bounds__(128 * GROUPS + WARP, 1)
    k_product_norm(const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap right, int tokens, int depth, Norm p) {
    extern __shared__ int8 dynamic[];
    __shared__ Barriers barriers;
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u;
    multiply(&left, &right, depth, memory, barriers);
    if (threadIdx.x < 128 * GROUPS) {
        int above = threadIdx.x / WARP * WARP_ROWS, first = blockIdx.x * ROWS + above;
        Words xs[WARP_ROWS / AT_ONCE][AT_ONCE];
        // All on their way before the first is needed.
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) xs[r / AT_ONCE][r % AT_ONCE] = load_words(p.x + (int64)min(first + r, tokens - 1) * WIDTH);
        Row branch_bias = load_parameter(p.branch_bias, 0.0f);
        warps_meet();
#pragma unroll
        for (int n = 0; n < WARP_ROWS; n += AT_ONCE)
            normalise(p, memory, above + n, first + n, tokens, branch_bias, xs[n / AT_ONCE]);
    }
    cluster_sync(); // nothing arrives at a block that has ended
}

#endif
