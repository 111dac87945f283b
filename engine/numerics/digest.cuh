// The words of the step digest. See engine/digest.py.
#pragma once
#include "common.cuh"

#define DIGEST_FACTOR 0xD6E8FEB86659FD93ull
#define DIGEST_GROUP 8 // numbers that are taken together, four and those four that stand GROUP_APART further on
#define GROUP_APART 128

__device__ __forceinline__ uint64 mix(uint64 index, uint64 value) {
    uint64 z = (index + 1) * 0x9E3779B97F4A7C15ull + value;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

__device__ __forceinline__ uint64 second(uint64 z) {
    uint64 y = z * DIGEST_FACTOR;
    return y ^ (y >> 32);
}

__device__ __forceinline__ uint64 bits_of(float x) { return (uint64)(uint32)__float_as_int(x); }

// The group of numbers that begins with number `first` of the tensor.
__device__ __forceinline__ uint64 mix_group(uint64 first, const float (&x)[DIGEST_GROUP]) {
    uint64 value = 0, power = 1;
#pragma unroll
    for (int j = 0; j < DIGEST_GROUP; j++) value += power * bits_of(x[j]), power *= DIGEST_FACTOR;
    return mix(first / (2 * GROUP_APART) * (GROUP_APART / 4) + first % GROUP_APART / 4, value);
}
