// Kernels of the embedding; see embed.py. Dropout is a kernel of its own.
#include "sums.cuh"

extern "C" __global__ void k_embed_fwd(const int *ids, int context, const float *token, const float *position,
                                       int64 size, int width, float *y) {
    int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    int64 t = i / width;
    int c = (int)(i % width);
    y[i] = token[(int64)ids[t] * width + c] + position[(t % context) * width + c];
}

// first[z, v] = the first token of shard z with id v; holds large numbers at first.
extern "C" __global__ void k_embed_first(const int *ids, int tokens, int vocab, int *first) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < tokens) atomicMin(&first[(int64)blockIdx.y * vocab + ids[(int64)blockIdx.y * tokens + t]], t);
}

__device__ __forceinline__ int finite_top(int top, int *flag) {
    if (top < INFINITY_BITS) return top;
    *flag = 1;
    return 0;
}

// sums[z, first token with the same id, c] += the integers of dy; zeros at first. tops [shards, width].
extern "C" __global__ void k_embed_bwd_sums(const int *ids, const int *first, int tokens, int vocab, int width,
                                            const float *dy, const int *tops, uint64 *sums, int *flag) {
    int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64)tokens * width) return;
    int t = (int)(i / width), c = (int)(i % width), z = blockIdx.y;
    int s = sum_exponent(finite_top(tops[z * width + c], flag));
    int owner = first[(int64)z * vocab + ids[(int64)z * tokens + t]];
    int q = scaled_integer(dy[(int64)z * tokens * width + i], factor_of(s));
    atomicAdd(&sums[((int64)z * tokens + owner) * width + c], (uint64)(int64)q);
}

// dtoken [shards, vocab, width] += the sums, once for each id.
extern "C" __global__ void k_embed_bwd_token(const int *ids, const int *first, int tokens, int vocab, int width,
                                             const int *tops, const int64 *sums, float *dtoken, int *flag) {
    int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64)tokens * width) return;
    int t = (int)(i / width), c = (int)(i % width), z = blockIdx.y;
    int id = ids[(int64)z * tokens + t];
    if (first[(int64)z * vocab + id] != t) return;
    int s = sum_exponent(finite_top(tops[z * width + c], flag));
    dtoken[((int64)z * vocab + id) * width + c] += float_of_sum(sums[(int64)z * tokens * width + i], s);
}

// dposition [context, width] (+)= the tree over shards of the sums over the rows of each.
extern "C" __global__ void k_embed_bwd_position(int tokens, int context, int width, int shards, const float *dy,
                                                const int *tops, float *dposition, int add, int *flag) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= context * width) return;
    float total = shard_tree(shards, [&](int z) {
        int s = sum_exponent(finite_top(tops[z * width + i % width], flag));
        Factor f = factor_of(s);
        int64 sum = 0;
        const float *shard = dy + (int64)z * tokens * width;
        for (int64 at = i; at < (int64)tokens * width; at += (int64)context * width) sum += scaled_integer(shard[at], f);
        return float_of_sum(sum, s);
    });
    dposition[i] = add ? dposition[i] + total : total;
}
