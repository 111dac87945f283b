// The optimizer of the tier prod: gradients joined over shards, their norm, and AdamW that also leaves the weights in 16
// bits; see optimizer.py. The flat arrays are whole in groups of four elements.
#include "adamw.cuh"
#include "digest.cuh"
#include "half.cuh"

#define NORM_CHUNK 4096

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

// partial[block] = sum of squares of a chunk of the gradient.
extern "C" __global__ void k_grad_norm_partial(const float *g, int64 size, double *partial) {
    __shared__ double scratch[32];
    int64 start = (int64)blockIdx.x * NORM_CHUNK, end = min(start + NORM_CHUNK, size);
    double sum = 0.0;
    for (int64 i = start + 4 * threadIdx.x; i < end; i += 4 * blockDim.x) {
        float4 x = *(const float4 *)(g + i);
        sum += (double)x.x * x.x + (double)x.y * x.y + (double)x.z * x.z + (double)x.w * x.w;
    }
    sum = block_total(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block: norm and clip factor of the gradient without its loss scale, and whether the step may go on.
extern "C" __global__ void k_grad_norm_final(const double *partial, int chunks, double clip_norm, const int *flags,
                                             int operations, const StepValues *values, Outcome *outcome) {
    __shared__ double scratch[32];
    double sum = 0.0;
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) sum += partial[c];
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

__device__ __forceinline__ void count(uint64 *total, int64 i, float x) {
    uint64 z = mix(i, x);
    total[0] += z, total[1] += second(z);
}

// A block takes a piece; `half` gets the new weights in 16 bits, sums [parameters, 3, 2] the step digest's numbers, and
// bad[parameter] = 1 where a new number is not finite.
extern "C" __global__ void k_adamw(const Piece *pieces, float *w, const float *g, float *m, float *v, uint16 *half,
                                   Constants k, const StepValues *values, const Outcome *outcome, int *bad,
                                   uint64 *sums) {
    __shared__ uint64 scratch[32];
    if (outcome->stop) return;
    Piece piece = pieces[blockIdx.x];
    StepValues s = *values;
    float clip = outcome->clip, decay = piece.decayed ? s.decay : 1.0f;
    uint64 total[6] = {0, 0, 0, 0, 0, 0};
    int top = 0;
    for (int64 i = piece.first + 4 * threadIdx.x; i < piece.last; i += 4 * blockDim.x) {
        int64 at = piece.start + i;
        float4 ws = *(const float4 *)(w + at), gs = *(const float4 *)(g + at), ms = *(const float4 *)(m + at),
               vs = *(const float4 *)(v + at);
        float *W = &ws.x, *G = &gs.x, *M = &ms.x, *V = &vs.x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Update u = updated(W, G, M, V, j, k, s, clip, decay);
            W[j] = u.w, M[j] = u.m, V[j] = u.v;
            if (i + j < piece.last) {
                top = max(max(top, magnitude_bits(u.w)), max(magnitude_bits(u.m), magnitude_bits(u.v)));
                count(total, i + j, u.w);
                count(total + 2, i + j, u.m);
                count(total + 4, i + j, u.v);
            }
        }
        *(float4 *)(w + at) = ws;
        *(float4 *)(m + at) = ms;
        *(float4 *)(v + at) = vs;
        *(uint2 *)(half + at) = make_uint2(narrowed(ws.x, ws.y), narrowed(ws.z, ws.w));
    }
    if (top >= INFINITY_BITS) bad[piece.parameter] = 1;
#pragma unroll
    for (int j = 0; j < 6; j++) {
        uint64 sum = block_sum(total[j], scratch);
        if (threadIdx.x == 0) atomicAdd(&sums[piece.parameter * 6 + j], sum);
    }
}

// The weights in 16 bits.
extern "C" __global__ void k_narrow(const float *w, int64 size, uint16 *half) {
    int64 i = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i < size) store8(half + i, load8(w + i));
}
