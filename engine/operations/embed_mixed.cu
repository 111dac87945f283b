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

#define LISTED 1024

// dtoken[id] += the sum of dy over the tokens of a shard with that id: the block of the first of them adds them all.
// Grid: tokens, shards. dy [shards, tokens, width].
extern "C" __global__ void k_embed_bwd_token(const int *ids, int tokens, int width, const uint16 *dy, int64 base, Mask mask,
                                             const StepValues *values, float *dtoken, int64 shard_stride) {
    __shared__ int places[LISTED];
    __shared__ int counts[32];
    int first = blockIdx.x, thread = threadIdx.x, threads = blockDim.x;
    ids += (int64)blockIdx.y * tokens;
    int id = ids[first], earlier = 0;
    for (int t = thread; t < first && !earlier; t += threads) earlier = ids[t] == id;
    if (__syncthreads_or(earlier)) return;
    int64 shard = (int64)blockIdx.y * tokens * width;
    float *out = dtoken + blockIdx.y * shard_stride + (int64)id * width;
    int warps = threads / WARP;
    for (int start = first; start < tokens; start += LISTED) {
        // The places of this stretch in ascending order.
        int listed = 0;
        for (int at = start; at < min(start + LISTED, tokens); at += threads) {
            int t = at + thread;
            bool same = t < tokens && t < start + LISTED && ids[t] == id;
            uint32 votes = __ballot_sync(ALL_LANES, same);
            if (lane_of_thread() == 0) counts[thread / WARP] = __popc(votes);
            __syncthreads();
            int before = listed;
            for (int w = 0; w < warps; w++) {
                if (w < thread / WARP) before += counts[w];
                listed += counts[w];
            }
            if (same) places[before + __popc(votes & ((1u << lane_of_thread()) - 1))] = t;
            __syncthreads();
        }
        for (int c = 8 * thread; c < width; c += 8 * threads) {
            Eight sum = load8(out + c);
#pragma unroll 4
            for (int n = 0; n < listed; n++) {
                int64 at = shard + (int64)places[n] * width + c;
                Eight d = load8(dy + at);
                drop8(d, mask, values, base + at);
#pragma unroll
                for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
            }
            store8(out + c, sum);
        }
        __syncthreads();
    }
}

// dposition[t] (+)= the sum of dy over the rows of each shard, joined by the tree over shards (a power of two, at most 64).
extern "C" __global__ void k_embed_bwd_position(int shards, int tokens, int context, int width, const uint16 *dy,
                                                int64 base, Mask mask, const StepValues *values, float *dposition,
                                                int add) {
    int i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= context * width) return;
    Eight pending[7];
    int depth = 0;
    for (int s = 0; s < shards; s++) {
        Eight sum = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
        for (int row = 0; row < tokens / context; row++) {
            int64 at = (int64)s * tokens * width + (int64)row * context * width + i;
            Eight d = load8(dy + at);
            drop8(d, mask, values, base + at);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
        }
        for (int n = s; n & 1; n >>= 1) {
            Eight p = pending[--depth];
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] = p.x[j] + sum.x[j];
        }
        pending[depth++] = sum;
    }
    Eight sum = pending[0];
    if (add) {
        Eight before = load8(dposition + i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] = before.x[j] + sum.x[j];
    }
    store8(dposition + i, sum);
}
