// Philox 4x32-10 and the dropout mask as a function of an address. See random.py.
#pragma once
#include "common.cuh"

// What changes from step to step, and the seed: kernels read it from memory, so that a captured step can be replayed.
struct StepValues {
    uint32 key_low, key_high, step;
    float loss_scale; // of the tier prod: what gradients are multiplied by on their way to the optimizer
    float rate, decay, correction1, correction2;
};

struct Mask {
    uint32 site, threshold; // threshold 0 keeps everything
    float factor;
};

__device__ __forceinline__ uint4 random_words4(uint32 key0, uint32 key1, uint32 step, uint32 site, uint64 block) {
    uint4 c = make_uint4((uint32)block, (uint32)(block >> 32), site, step);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32 high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
        uint32 high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
        c = make_uint4(high1 ^ c.y ^ key0, low1, high0 ^ c.w ^ key1, low0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

__device__ __forceinline__ uint4 random_words4(const StepValues *values, uint32 site, uint64 block) {
    return random_words4(values->key_low, values->key_high, values->step, site, block);
}

// x * factor where the word keeps it, else 0.
__device__ __forceinline__ float dropped(float x, uint32 word, uint32 threshold, float factor) {
    return word >= threshold ? x * factor : 0.0f;
}
