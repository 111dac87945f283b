// The optimizer of the tier prod: gradients joined over shards, their norm, and AdamW that also leaves the weights in 16
// bits; see optimizer.py. The flat arrays are whole in groups of four elements.
#include "adamw.cuh"
#include "digest.cuh"
#include "half.cuh"
#include "squares.cuh"

// Four elements of the tree over COUNT sets. All are read before the first are added, and not again: they are marked as
// the first that the card's cache may forget.
template <int COUNT> __device__ __forceinline__ float4 set_tree(const float *sets, int64 stride) {
    if constexpr (COUNT == 1) return __ldcs((const float4 *)sets);
    else return set_tree<COUNT / 2>(sets, stride) + set_tree<COUNT / 2>(sets + COUNT / 2 * stride, stride);
}

// out (+)= the tree over `count` (a power of two, at most 64) gradient sets, `stride` elements apart.
extern "C" __global__ void k_join_gradients(const float *sets, int count, int64 stride, int64 size, float *out, int add) {
    int64 i = 4 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size) return;
    float4 sum;
    switch (count) {
    case 1: sum = set_tree<1>(sets + i, stride); break;
    case 2: sum = set_tree<2>(sets + i, stride); break;
    case 4: sum = set_tree<4>(sets + i, stride); break;
    case 8: sum = set_tree<8>(sets + i, stride); break;
    case 16: sum = set_tree<16>(sets + i, stride); break;
    case 32: sum = set_tree<32>(sets + i, stride); break;
    default: sum = set_tree<64>(sets + i, stride);
    }
    if (add) sum = *(const float4 *)(out + i) + sum;
    *(float4 *)(out + i) = sum;
}

__device__ __forceinline__ double block_total(double x, double *scratch) {
    x = lanes_total(x);
    if (lane_of_thread() == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    double total = 0.0;
    for (int w = 0; w < (int)(blockDim.x / WARP); w++) total += scratch[w];
    return total;
}

// partial[block] = sum of squares of a piece of the gradient.
extern "C" __global__ void k_grad_norm_partial(const Piece *pieces, const float *g, double *partial) {
    __shared__ double scratch[32];
    Piece piece = pieces[blockIdx.x];
    double sum = 0.0;
    g += piece.start;
    for (int64 i = piece.first + 4 * threadIdx.x; i < piece.last; i += 4 * blockDim.x) {
        float4 x = *(const float4 *)(g + i); // beyond the parameter are zeros
        sum += (double)x.x * x.x + (double)x.y * x.y + (double)x.z * x.z + (double)x.w * x.w;
    }
    sum = block_total(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// squares [blocks of rows, blocks of columns] of a weight's gradient, as the kernel that computes it can add them up, too.
// Grid: blocks of columns, blocks of rows.
extern "C" __global__ void __launch_bounds__(128) k_gradient_squares(const float *g, int rows, int columns, double *squares) {
    __shared__ double warps[4];
    auto pair = [&](int n) {
        int row = SQUARES * blockIdx.y + pair_row(n), column = SQUARES * blockIdx.x + pair_column(n);
        bool inside = row < rows && column < columns;
        return inside ? *(const float2 *)(g + (int64)row * columns + column) : make_float2(0.0f, 0.0f);
    };
    double sum = 0.0;
#pragma unroll
    for (int n = 0; n < SQUARE_PAIRS; n++) sum += pair_squares(pair(n));
    if (!has_room(sum)) {
        sum = 0.0;
        for (int n = 0; n < SQUARE_PAIRS; n++) sum += wide_pair_squares(pair(n));
    }
    sum = lanes_total(sum);
    if (lane_of_thread() == 0) warps[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) squares[blockIdx.y * gridDim.x + blockIdx.x] = block_squares(warps, 1);
}

// One block: norm and clip factor of the gradient without its loss scale, and whether the step may go on.
extern "C" __global__ void k_grad_norm_final(const double *partial, int parts, double clip_norm, const int *flags,
                                             int operations, const StepValues *values, Outcome *outcome) {
    __shared__ double scratch[32];
    double sum = 0.0;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) sum += partial[i];
    double norm = sqrt(block_total(sum, scratch)) / values->loss_scale;
    int stop = !(norm < __hiloint2double(0x7ff00000, 0));
    for (int i = threadIdx.x; i < operations; i += blockDim.x) stop |= flags[i];
    stop = __syncthreads_or(stop);
    if (threadIdx.x == 0) {
        double clip = clip_norm == 0.0 || norm <= clip_norm ? 1.0 : clip_norm / norm;
        outcome->norm = norm;
        outcome->clip = (float)(clip / values->loss_scale);
        outcome->stop = stop;
    }
}

__device__ __forceinline__ void count(uint64 *total, int64 first, const Eight &e) {
    uint64 z = mix_group(first, e.x);
    total[0] += z, total[1] += second(z);
}

// A group of the step digest, of a flat array that is whole in fours: the second four are zeros where they are not there.
__device__ __forceinline__ Eight load_group(const float *p, bool both) {
    float4 a = *(const float4 *)p, b = both ? *(const float4 *)(p + GROUP_APART) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    Eight e = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    return e;
}

__device__ __forceinline__ void store_group(float *p, bool both, const Eight &e) {
    *(float4 *)p = make_float4(e.x[0], e.x[1], e.x[2], e.x[3]);
    if (both) *(float4 *)(p + GROUP_APART) = make_float4(e.x[4], e.x[5], e.x[6], e.x[7]);
}

#define ADAMW_THREADS 256 // at most
#define TOTALS 6 // two of each of w, m and v

// A block takes a piece, a thread group after group of the step digest; `half` gets the new weights in 16 bits, sums
// [parameters, 3, 2] the digest's numbers, and bad[parameter] = 1 where a new number is not finite.
extern "C" __global__ void __launch_bounds__(ADAMW_THREADS)
k_adamw(const Piece *pieces, float *w, const float *g, float *m, float *v, uint16 *half, Constants k,
        const StepValues *values, const Outcome *outcome, int *bad, uint64 *sums) {
    __shared__ uint64 totals[TOTALS][ADAMW_THREADS];
    if (outcome->stop) return;
    Piece piece = pieces[blockIdx.x];
    StepValues s = *values;
    float clip = outcome->clip, decay = piece.decayed ? s.decay : 1.0f;
    uint64 total[TOTALS] = {0, 0, 0, 0, 0, 0};
    int top = 0, lane = lane_of_thread(), warp = threadIdx.x / WARP;
    for (int64 i = piece.first + 2 * GROUP_APART * warp + 4 * lane; i < piece.last; i += 8 * blockDim.x) {
        int64 at = piece.start + i;
        bool both = i + GROUP_APART < piece.last;
        Eight W = load_group(w + at, both), G = load_group(g + at, both), M = load_group(m + at, both), V = load_group(v + at, both);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            Update u = updated(W.x, G.x, M.x, V.x, j, k, s, clip, decay);
            W.x[j] = u.w, M.x[j] = u.m, V.x[j] = u.v;
        }
        if (i + GROUP_APART + 4 > piece.last) // what is not there stays the zero that it is
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (i + j % 4 + j / 4 * GROUP_APART >= piece.last) W.x[j] = M.x[j] = V.x[j] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) top = max(max(top, magnitude_bits(W.x[j])), max(magnitude_bits(M.x[j]), magnitude_bits(V.x[j])));
        count(total, i, W), count(total + 2, i, M), count(total + 4, i, V);
        store_group(w + at, both, W), store_group(m + at, both, M), store_group(v + at, both, V);
        uint4 words = narrowed(W);
        *(uint2 *)(half + at) = make_uint2(words.x, words.y);
        if (both) *(uint2 *)(half + at + GROUP_APART) = make_uint2(words.z, words.w);
    }
    if (top >= INFINITY_BITS) bad[piece.parameter] = 1;
#pragma unroll
    for (int j = 0; j < TOTALS; j++) totals[j][threadIdx.x] = total[j];
    __syncthreads();
    for (int j = warp; j < TOTALS; j += blockDim.x / WARP) {
        uint64 sum = 0;
        for (int t = lane; t < (int)blockDim.x; t += WARP) sum += totals[j][t];
        sum = warp_sum(sum);
        if (lane == 0) atomicAdd(&sums[piece.parameter * TOTALS + j], sum);
    }
}

// The weights in 16 bits.
extern "C" __global__ void k_narrow(const float *w, int64 size, uint16 *half) {
    int64 i = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i < size) store8(half + i, load8(w + i));
}
