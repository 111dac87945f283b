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

// Four elements of a piece; what lies beyond its parameter is padding of zeros.
struct Four {
    float w[4], g[4], m[4], v[4];
};

__device__ __forceinline__ void take(float (&to)[4], const float *x) {
    float4 four = *(const float4 *)x;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

__device__ __forceinline__ Four four_at(const float *w, const float *g, const float *m, const float *v, int64 at) {
    Four f;
    take(f.w, w + at), take(f.g, g + at), take(f.m, m + at), take(f.v, v + at);
    return f;
}

#define MILD 1e15f

__device__ __forceinline__ bool absolute_at_most(float x, float most) { return magnitude_bits(x) <= magnitude_bits(most); }

// Whether the numbers of a step are such that from mild w, m, v and clipped g no update can fail to be finite.
__device__ __forceinline__ bool is_mild(const Constants &k, const StepValues &s, float decay) {
    return k.beta1 <= 1.0f && k.rest1 <= 1.0f && k.beta2 <= 1.0f && k.rest2 <= 1.0f && k.epsilon >= 1e-12f &&
           s.correction1 >= 1e-6f && s.correction2 >= 1e-6f && absolute_at_most(s.rate, 1e3f) && absolute_at_most(decay, 2.0f);
}

// bad[parameter] = 1 and stop = 1 where k_adamw would write a number that is not finite; a block takes a piece.
extern "C" __global__ void __launch_bounds__(256) k_adamw_check(const Piece *pieces, const float *w, const float *g,
                                                                const float *m, const float *v, Constants k,
                                                                const StepValues *values, Outcome *outcome, int *bad) {
    Piece piece = pieces[blockIdx.x];
    StepValues s = *values;
    float clip = outcome->clip, decay = piece.decayed ? s.decay : 1.0f;
    bool mild = is_mild(k, s, decay);
    int top = 0;
#pragma unroll 2
    for (int64 i = piece.first + 4 * threadIdx.x; i < piece.last; i += 4 * blockDim.x) {
        Four f = four_at(w, g, m, v, piece.start + i);
        bool all = mild;
#pragma unroll
        for (int j = 0; j < 4; j++)
            all = all && absolute_at_most(f.w[j], MILD) && absolute_at_most(f.m[j], MILD) && absolute_at_most(f.g[j] * clip, MILD) &&
                  f.v[j] >= 0.0f && f.v[j] <= MILD;
        if (all) continue;
        for (int j = 0; j < 4 && i + j < piece.last; j++) {
            Update u = updated(f.w, f.g, f.m, f.v, j, k, s, clip, decay);
            top = max(max(top, magnitude_bits(u.w)), max(magnitude_bits(u.m), magnitude_bits(u.v)));
        }
    }
    if (top >= INFINITY_BITS) bad[piece.parameter] = outcome->stop = 1;
}

// A block takes a piece; sums [parameters, 3, 2] (zeros at first) get the step digest's numbers of w, m and v.
extern "C" __global__ void __launch_bounds__(256) k_adamw(const Piece *pieces, float *w, const float *g, float *m, float *v,
                                                          Constants k, const StepValues *values, const Outcome *outcome,
                                                          uint64 *sums) {
    __shared__ uint64 parts[8][6];
    if (outcome->stop) return;
    Piece piece = pieces[blockIdx.x];
    StepValues s = *values;
    float clip = outcome->clip, decay = piece.decayed ? s.decay : 1.0f;
    uint64 total[6] = {0, 0, 0, 0, 0, 0};
    for (int64 i = piece.first + 4 * threadIdx.x; i < piece.last; i += 4 * blockDim.x) {
        int64 at = piece.start + i;
        Four f = four_at(w, g, m, v, at);
        int count = (int)min((int64)4, piece.last - i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j >= count) continue; // the padding stays as it is
            Update u = updated(f.w, f.g, f.m, f.v, j, k, s, clip, decay);
            f.w[j] = u.w, f.m[j] = u.m, f.v[j] = u.v;
            uint64 z = mix(i + j, bits_of(u.w));
            total[0] += z, total[1] += second(z);
            z = mix(i + j, bits_of(u.m));
            total[2] += z, total[3] += second(z);
            z = mix(i + j, bits_of(u.v));
            total[4] += z, total[5] += second(z);
        }
        *(float4 *)(w + at) = make_float4(f.w[0], f.w[1], f.w[2], f.w[3]);
        *(float4 *)(m + at) = make_float4(f.m[0], f.m[1], f.m[2], f.m[3]);
        *(float4 *)(v + at) = make_float4(f.v[0], f.v[1], f.v[2], f.v[3]);
    }
#pragma unroll
    for (int j = 0; j < 6; j++) {
        uint64 sum = warp_sum(total[j]);
        if (lane_of_thread() == 0) parts[threadIdx.x / WARP][j] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 6) {
        uint64 sum = 0;
        for (int warp = 0; warp < (int)(blockDim.x / WARP); warp++) sum += parts[warp][threadIdx.x];
        atomicAdd(&sums[piece.parameter * 6 + threadIdx.x], sum);
    }
}
