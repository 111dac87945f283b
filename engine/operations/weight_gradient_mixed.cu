// Gradients of one or two weights in the tier prod on compute capability 9.0: dy transposed times x over all tokens of
// the shards that are taken at once, joined on the way.
//
// Legend: M columns of dy, N columns of x, T tokens of a shard, S shards of a chain. A chain is one sequence of sums
// through the tokens of its shards, in registers; chains are joined by the tree. The blocks of a cluster take two
// neighbouring tiles of every chain of the same columns of x: two of the same chain share what they read of x, and
// chains are joined through the cluster's shared memory. So a gradient reaches memory once. Where there is one chain its
// squares are added up on the way, for the gradient's norm.
// Grid: two for each pair of tiles, columns first, those of the second gradient behind those of the first; chains.
//
// Compiled for GROUPS warpgroups of 64 rows that multiply, COLUMNS of a tile, CHAINS, STAGES of tokens under way and
// BLOCKS that share a processor.
#include "half_products.cuh"
#include "squares.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define STEP 64 // tokens of a stage
#define BOX (STEP * 128) // bytes of a stage's tokens times 64 columns
#define BOXES (COLUMNS / 64)
#define STAGE ((GROUPS + BOXES) * BOX)
#define SUMS (COLUMNS / 2) // that a thread holds
#define PAIRED 2
#define THREADS (128 * GROUPS + WARP) // the last warp copies

struct Gradient {
    float *out; // [M, N]
    double *squares; // [blocks of M, blocks of N], where not null; with one chain alone
    int rows, columns; // M, N
};

struct Chains {
    int tokens, shards; // T, S
    int adds, goes_on; // whether `out` has a sum that this one is added to, or the beginning of the only chain
};

// A block's tile of a gradient: its first row and column.
struct Tile {
    float *out;
    double *squares;
    int rows, columns, row, column;

    __device__ __forceinline__ Tile(const Gradient &g, int pair) : out(g.out), squares(g.squares), rows(g.rows), columns(g.columns) {
        int across = (g.columns + COLUMNS - 1) / COLUMNS, down = pair / across;
        row = (PAIRED * down + blockIdx.x % PAIRED) * GROUPS * 64, column = (pair - down * across) * COLUMNS;
    }
};

// Both copy engines of a pair fill the stages of both: each brings its own columns of dy, and half of the tokens of x.
__device__ __forceinline__ void copy_stages(const TensorMap *dy, const TensorMap *x, const Tile &tile, const Chains &p,
                                            uint32 memory, uint32 full, uint32 empty) {
    uint32 rank = cluster_rank(), half = rank & 1;
    int stage = 0;
    uint32 parity = 1; // the first pass over the stages finds them empty
    for (int s = 0; s < p.shards; s++)
        for (int token = 0; token < p.tokens; token += STEP) {
            int shard = blockIdx.y * p.shards + s;
            uint32 to = memory + stage * STAGE, arrived = full + 8 * stage;
            barrier_wait(empty + 8 * stage, parity);
            barrier_expect(arrived, STAGE);
#pragma unroll
            for (int g = 0; g < GROUPS; g++) copy_box(to + g * BOX, dy, tile.row + 64 * g, token, 0, shard, arrived);
            to += GROUPS * BOX + half * (BOX / PAIRED);
#pragma unroll
            for (int b = 0; b < BOXES; b++)
                copy_box_to(to + b * BOX, x, tile.column + 64 * b, token + half * (STEP / PAIRED), 0, shard, arrived, 3 << (rank - half));
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
}

// Queue the products of a stage that has arrived.
__device__ __forceinline__ void multiply_stage(float (&d)[SUMS], uint32 full, uint32 parity, uint32 left, uint32 right) {
    barrier_wait(full, parity);
    uint64 a = box_descriptor<128>(left), b = box_descriptor<128>(right);
    products_begin();
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) half_product<1, 1>(d, a + 128 * k, b + 128 * k, 1);
    products_commit();
}

// Where a thread's sum number i stands in the gradient: the first of two neighbouring columns; null outside of it.
__device__ __forceinline__ float2 *place_of(const Tile &tile, int i) {
    int row = tile.row + SQUARES * (threadIdx.x / 128) + pair_row(i / 2), column = tile.column + pair_column(i / 2);
    return row < tile.rows && column < tile.columns ? (float2 *)(tile.out + (int64)row * tile.columns + column) : nullptr;
}

__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

// What stands in the gradient then; zeros outside of it.
__device__ __forceinline__ float2 write_sums(const Tile &tile, int adds, int i, float2 sums) {
    float2 *out = place_of(tile, i);
    if (!out) return make_float2(0.0f, 0.0f);
    if (adds) sums = *out + sums;
    *out = sums;
    return sums;
}

// Of a thread's pairs in a box whose first is number i, in fp64.
__device__ __noinline__ double written_squares(const Tile &tile, int i) {
    double sum = 0.0;
    for (int last = i + 2 * SQUARE_PAIRS; i < last; i += 2) {
        const float2 *out = place_of(tile, i);
        if (out) sum += wide_pair_squares(*out);
    }
    return sum;
}

__device__ __forceinline__ float2 sums_at(uint32 address) {
    float2 sums;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(sums.x), "=f"(sums.y) : "r"(address) : "memory");
    return sums;
}

// The tree over COUNT chains from `first` on, of what stands at `address` in the shared memory of each.
template <int COUNT> __device__ __forceinline__ float2 chain_tree(uint32 address, int first) {
    if constexpr (COUNT == 1) return sums_at(address_in(address, PAIRED * first + (cluster_rank() & 1)));
    else return chain_tree<COUNT / 2>(address, first) + chain_tree<COUNT / 2>(address, first + COUNT / 2);
}

// Of each box of a warpgroup, from those of its warps [4, BOXES].
__device__ __forceinline__ void put_squares(const Tile &tile, int group, const double *warps) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    int b = threadIdx.x % 128, row = tile.row + SQUARES * group, column = tile.column + SQUARES * b;
    if (b >= BOXES || row >= tile.rows || column >= tile.columns) return;
    int across = (tile.columns + SQUARES - 1) / SQUARES;
    tile.squares[row / SQUARES * across + column / SQUARES] = block_squares(warps + b, BOXES);
}

extern "C" __global__ void __cluster_dims__(PAIRED, CHAINS, 1) __launch_bounds__(THREADS, BLOCKS)
    k_weight_gradient(const __grid_constant__ TensorMap dy0, const __grid_constant__ TensorMap x0,
                      const __grid_constant__ TensorMap dy1, const __grid_constant__ TensorMap x1, Gradient first,
                      Gradient second, int first_pairs, Chains p) {
    extern __shared__ char raw[];
    __shared__ __align__(8) uint64 barriers[2 * STAGES];
    __shared__ double squares[GROUPS][4][BOXES];
    uint32 memory = (shared_address(raw) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    int pair = blockIdx.x / PAIRED, behind = pair >= first_pairs;
    const TensorMap *dy = behind ? &dy1 : &dy0, *x = behind ? &x1 : &x0;
    Tile tile(behind ? second : first, behind ? pair - first_pairs : pair);
    int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0), copies = group == GROUPS;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(dy) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(x) : "memory");
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, PAIRED * 4 * GROUPS); // every warp of the pair that multiplies
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    cluster_sync();
    if (copies) {
        if (lane_of_thread() == 0) copy_stages(dy, x, tile, p, memory, full, empty);
        __syncwarp();
        cluster_sync();
        if (CHAINS > 1) {
            cluster_sync();
            cluster_sync();
        }
    } else {
        float d[SUMS];
        int stage = 1, before = 0, lane = lane_of_thread();
        uint32 parity = 0, left = memory + group * BOX, right = memory + GROUPS * BOX;
        uint32 empty_there = address_in(empty, cluster_rank() ^ 1);
        int steps = p.shards * ((p.tokens + STEP - 1) / STEP);
#pragma unroll
        for (int i = 0; i < SUMS; i += 2) {
            float2 *out = p.goes_on ? place_of(tile, i) : nullptr, begun = out ? *out : make_float2(0.0f, 0.0f);
            d[i] = begun.x, d[i + 1] = begun.y;
        }
        multiply_stage(d, full, parity, left, right);
#pragma unroll 1
        for (int step = 1; step < steps; step++) {
            multiply_stage(d, full + 8 * stage, parity, left + stage * STAGE, right + stage * STAGE);
            products_wait<1>();
            barrier_arrive(empty + 8 * before, lane == 0);
            barrier_arrive_there(empty_there + 8 * before, lane == 0);
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        products_wait<0>();
        products_done(d);
        cluster_sync(); // nobody copies to stages or reads them any more
        if constexpr (CHAINS == 1) {
#pragma unroll
            for (int b = 0; b < BOXES; b++) {
                double sum = 0.0;
#pragma unroll
                for (int i = 2 * SQUARE_PAIRS * b; i < 2 * SQUARE_PAIRS * (b + 1); i += 2) {
                    if (i % 16 == 0) asm volatile("" : "+r"(tile.row), "+r"(tile.column)); // or addresses of all would be kept
                    sum += pair_squares(write_sums(tile, p.adds, i, make_float2(d[i], d[i + 1])));
                }
                if (!has_room(sum)) sum = written_squares(tile, 2 * SQUARE_PAIRS * b);
                sum = lanes_total(sum);
                if (lane == 0) squares[group][threadIdx.x / WARP % 4][b] = sum;
            }
            if (tile.squares) put_squares(tile, group, &squares[group][0][0]);
        } else {
            uint32 mine = memory + 8 * threadIdx.x;
#pragma unroll
            for (int i = 0; i < SUMS / 2; i++)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(mine + 8 * 128 * GROUPS * i), "f"(d[2 * i]), "f"(d[2 * i + 1]) : "memory");
            cluster_sync();
#pragma unroll 4
            for (int i = blockIdx.y % CHAINS; i < SUMS / 2; i += CHAINS)
                write_sums(tile, p.adds, 2 * i, chain_tree<CHAINS>(mine + 8 * 128 * GROUPS * i, 0));
            cluster_sync(); // others read here until now
        }
    }
}

#endif
