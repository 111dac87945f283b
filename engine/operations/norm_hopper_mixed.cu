// The end of a branch and LayerNorm in the tier prod, in one kernel, on compute capability 9.0.
//
// Legend: T tokens, W = WIDTH the model's width, K the depth of the product.
// branch [T, W] = left [T, K] * right [W, K] transposed + bias; sum = x + dropout(branch), y = LayerNorm(sum); formulas
// as in layernorm_mixed.cu. The branch never reaches memory.
//
// A block takes 64 tokens and all columns, so that it has whole rows: two warpgroups multiply, each with half of the
// columns, a warp copies operands. Then the product stands in shared memory where the operands were, and a warp takes
// eight rows of it. (Blocks that share what they read of the right operand take longer: docs/prod.md.)
//
// Compiled for WIDTH (a multiple of 128) and STAGES of the depth under way.
#include "half_products.cuh"
#include "half_rows.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define EPSILON 1e-5f
#define ROWS 64 // of a block
#define DEPTH 64 // of a stage
#define LINE 128 // bytes of a line in shared memory: 64 elements, the width of the copy engine's swizzle
#define BOX (64 * LINE)
#define BOXES (WIDTH / 64)
#define STAGE_BYTES (BOX + BOXES * BOX)
#define PARTS 2 // of the right operand: a copy is at most 256 lines
#define GROUPS 2 // warpgroups that multiply
#define WARPS (4 * GROUPS)
#define WARP_ROWS (ROWS / WARPS)
#define AT_ONCE (WIDTH <= 256 ? 8 : 4) // rows that a warp computes together, so that it waits less
#define TILE_BYTES (BOXES * BOX) // a product in 16 bits

struct Barriers {
    uint64 full[STAGES], empty[STAGES];
};

// Row r of the product in shared memory.
__device__ __forceinline__ OwnWords tile_words(uint32 tile, int r) {
    OwnWords words;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        int c = column_of(i);
        uint32 at = tile + c / 64 * BOX + r * LINE + ((c % 64 / 8) ^ (r % 8)) * 16 + c % 8 * 2;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.w[i].x), "=r"(words.w[i].y) : "r"(at) : "memory");
    }
    return words;
}

// All warps that multiply.
__device__ __forceinline__ void warps_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// The product of a block's rows, left in 16 bits at `memory`, for all warps of warpgroups that multiply: others return
// when all is copied.
__device__ __forceinline__ void multiply(const TensorMap *left, const TensorMap *right, int depth, uint32 memory, Barriers &barriers) {
    uint32 full = shared_address(barriers.full), empty = shared_address(barriers.empty);
    int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0), lane = lane_of_thread();
    int steps = (depth + DEPTH - 1) / DEPTH;
    if (threadIdx.x == 0) {
        for (const TensorMap *map : {left, right}) asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPS);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (group == GROUPS) {
        if (lane == 0) {
            int stage = 0;
            uint32 parity = 1; // the first pass over the stages finds them empty
            for (int step = 0; step < steps; step++) {
                uint32 to = memory + stage * STAGE_BYTES, arrival = full + 8 * stage;
                barrier_wait(empty + 8 * stage, parity);
                barrier_expect(arrival, STAGE_BYTES);
                copy_box(to, left, step * DEPTH, blockIdx.x * ROWS, 0, 0, arrival);
#pragma unroll
                for (int down = 0; down < WIDTH; down += WIDTH / PARTS)
                    copy_box(to + BOX + down * LINE, right, step * DEPTH, down, 0, 0, arrival);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        __syncwarp();
        return;
    }
    float d[WIDTH / 4];
    int stage = 0, last = 0;
    uint32 parity = 0, first = memory + BOX + group * (TILE_BYTES / GROUPS);
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
__device__ __forceinline__ void normalise(const Norm &p, uint32 tile, int above, int first, int tokens, const Own &branch_bias,
                                          const Own &gain, const Own &bias, const OwnWords (&xs)[AT_ONCE]) {
    OwnWords branches[AT_ONCE];
    Own v[AT_ONCE];
    float total[AT_ONCE], squares[AT_ONCE];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) branches[r] = tile_words(tile, above + r);
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        int64 start = (int64)(first + r) * WIDTH;
        Own x = widened(xs[r]), b = widened(branches[r]);
#pragma unroll
        for (int i = 0; i < OWN; i++) b.x[i] += branch_bias.x[i];
        drop_own(b, p.mask, p.values, p.base + start);
#pragma unroll
        for (int i = 0; i < OWN; i++) x.x[i] += b.x[i];
        OwnWords words = narrowed(x);
        if (first + r < tokens) store_own(p.sum + start, words);
        v[r] = widened(words); // the backward pass sees the rounded sum
        total[r] = squares[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) total[r] += v[r].x[i];
    }
    add_lanes(total);
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        total[r] *= 1.0f / WIDTH;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[r].x[i] -= total[r];
            squares[r] += v[r].x[i] * v[r].x[i];
        }
    }
    add_lanes(squares);
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        float s = rsqrtf(squares[r] * (1.0f / WIDTH) + EPSILON);
#pragma unroll
        for (int i = 0; i < OWN; i++) v[r].x[i] = v[r].x[i] * s * gain.x[i] + bias.x[i];
        if (first + r >= tokens) continue;
        store_own(p.y + (int64)(first + r) * WIDTH, narrowed(v[r]));
        if (lane_of_thread() == 0) p.mean[first + r] = total[r], p.rstd[first + r] = s;
    }
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS + WARP, 1)
    k_product_norm(const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap right, int tokens, int depth, Norm p) {
    extern __shared__ int8 dynamic[];
    __shared__ Barriers barriers;
    uint32 memory = (shared_address(dynamic) + 1023) & ~1023u;
    Own branch_bias = p.branch_bias ? load_own(p.branch_bias) : filled(0.0f);
    Own gain = p.gain ? load_own(p.gain) : filled(1.0f), bias = p.bias ? load_own(p.bias) : filled(0.0f);
    multiply(&left, &right, depth, memory, barriers);
    if (threadIdx.x >= 128 * GROUPS) return;
    int above = threadIdx.x / WARP * WARP_ROWS, first = blockIdx.x * ROWS + above;
    OwnWords xs[WARP_ROWS / AT_ONCE][AT_ONCE];
    // All on their way before the first is needed.
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) xs[r / AT_ONCE][r % AT_ONCE] = load_own(p.x + (int64)min(first + r, tokens - 1) * WIDTH);
    warps_meet();
#pragma unroll
    for (int n = 0; n < WARP_ROWS; n += AT_ONCE)
        normalise(p, memory, above + n, first + n, tokens, branch_bias, gain, bias, xs[n / AT_ONCE]);
}

#endif
