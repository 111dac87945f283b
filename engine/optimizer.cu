// Kernels of the optimizer: the tree over shards, the gradient norm and AdamW with the step digest; see optimizer.py.
#include "adamw.cuh"
#include "digest.cuh"
#include "sums.cuh"

#define NORM_CHUNK 4096

// out (+)= the tree over `count` consecutive gradients of `size` elements.
extern "C" __global__ void k_join_gradients(const float *sets, int count, int64 size, float *out, int add) {
    int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (size % 4 == 0) {
        if (4 * i >= size) return;
        const float4 *four = (const float4 *)sets + i;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sum.x = shard_tree(count, [&](int z) { return four[z * (size / 4)].x; });
        sum.y = shard_tree(count, [&](int z) { return four[z * (size / 4)].y; });
        sum.z = shard_tree(count, [&](int z) { return four[z * (size / 4)].z; });
        sum.w = shard_tree(count, [&](int z) { return four[z * (size / 4)].w; });
        float4 *target = (float4 *)out + i;
        if (add) {
            float4 old = *target;
            sum = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
        }
        *target = sum;
    } else if (i < size) {
        float sum = shard_tree(count, [&](int z) { return sets[z * size + i]; });
        out[i] = add ? out[i] + sum : sum;
    }
}

// partial[c] = ordered float64 sum of squares of chunk c; a warp takes a chunk.
extern "C" __global__ void k_grad_norm_partial(const float *g, int64 size, int chunks, double *partial) {
    int chunk = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (chunk >= chunks) return;
    int64 start = (int64)chunk * NORM_CHUNK, end = min(start + NORM_CHUNK, size);
    double sum = 0.0;
    for (int64 i = start + lane_of_thread(); i < end; i += WARP) {
        double x = (double)g[i];
        sum = sum + x * x;
    }
    sum = lanes_total(sum);
    if (lane_of_thread() == 0) partial[chunk] = sum;
}

// One warp: the norm, the clip factor, and whether the step may go on. flags [operations].
extern "C" __global__ void k_grad_norm_final(const double *partial, int chunks, double clip_norm, const int *flags,
                                             int operations, Outcome *outcome) {
    double sum = 0.0;
    for (int c = lane_of_thread(); c < chunks; c += WARP) sum = sum + partial[c];
    double norm = sqrt(lanes_total(sum));
    int stop = !(norm < __hiloint2double(0x7ff00000, 0));
    for (int i = lane_of_thread(); i < operations; i += WARP) stop |= flags[i];
    stop = warp_max(stop);
    if (lane_of_thread() == 0) {
        outcome->norm = norm;
        outcome->clip = clip_norm == 0.0 || norm <= clip_norm ? 1.0f : (float)(clip_norm / norm);
        outcome->stop = stop;
    }
}

// bad[parameter] = 1 and stop = 1 where k_adamw would write a number that is not finite; a block takes a piece.
extern "C" __global__ void k_adamw_check(const Piece *pieces, const float *w, const float *g, const float *m,
                                         const float *v, Constants k, const StepValues *values, Outcome *outcome,
                                         int *bad) {
    Piece piece = pieces[blockIdx.x];
    StepValues s = *values;
    float clip = outcome->clip, decay = piece.decayed ? s.decay : 1.0f;
    int top = 0;
    for (int64 i = piece.first + threadIdx.x; i < piece.last; i += blockDim.x) {
        Update u = updated(w, g, m, v, piece.start + i, k, s, clip, decay);
        top = max(max(top, magnitude_bits(u.w)), max(magnitude_bits(u.m), magnitude_bits(u.v)));
    }
    if (top >= INFINITY_BITS) bad[piece.parameter] = outcome->stop = 1;
}

// A block takes a piece; sums [parameters, 3, 2] (zeros at first) get the step digest's numbers of w, m and v.
extern "C" __global__ void k_adamw(const Piece *pieces, float *w, const float *g, float *m, float *v, Constants k,
                                   const StepValues *values, const Outcome *outcome, uint64 *sums) {
    __shared__ uint64 scratch[32];
    if (outcome->stop) return;
    Piece piece = pieces[blockIdx.x];
    StepValues s = *values;
    float clip = outcome->clip, decay = piece.decayed ? s.decay : 1.0f;
    uint64 total[6] = {0, 0, 0, 0, 0, 0};
    for (int64 i = piece.first + threadIdx.x; i < piece.last; i += blockDim.x) {
        int64 at = piece.start + i;
        Update u = updated(w, g, m, v, at, k, s, clip, decay);
        w[at] = u.w;
        m[at] = u.m;
        v[at] = u.v;
        uint64 z = mix(i, u.w);
        total[0] += z, total[1] += second(z);
        z = mix(i, u.m);
        total[2] += z, total[3] += second(z);
        z = mix(i, u.v);
        total[4] += z, total[5] += second(z);
    }
#pragma unroll
    for (int j = 0; j < 6; j++) {
        uint64 sum = block_sum(total[j], scratch);
        if (threadIdx.x == 0) atomicAdd(&sums[piece.parameter * 6 + j], sum);
    }
}
