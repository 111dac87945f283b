// The per-element words of the step digest. See engine/digest.py.
#pragma once
#include "common.cuh"

__device__ __forceinline__ uint64 mix(uint64 index, float x) {
    uint64 z = (index + 1) * 0x9E3779B97F4A7C15ull + (uint64)(uint32)__float_as_int(x);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

__device__ __forceinline__ uint64 second(uint64 z) {
    uint64 y = z * 0xD6E8FEB86659FD93ull;
    return y ^ (y >> 32);
}
