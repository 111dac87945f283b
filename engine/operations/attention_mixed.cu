// Dropout's seeds for the tier prod's attention, which the library draws its own numbers from.
#include "random.cuh"

// seeds [shards] of one site: a function of key, step, site and shard.
extern "C" __global__ void k_attention_seeds(uint32 site, int shards, const StepValues *values, int64 *seeds) {
    int shard = blockIdx.x * blockDim.x + threadIdx.x;
    if (shard >= shards) return;
    uint4 w = random_words4(values, site, (uint64)shard);
    seeds[shard] = (int64)(((uint64)(w.y & 0x7fffffff) << 32) | w.x);
}
