// Sums along a row in one order (32 lanes, then a tree) and integer sums over tokens. See sums.py.
#pragma once
#include "common.cuh"

// The tree over 32 lanes, 16, 8, 4, 2, 1 apart; every lane gets the result.
template <typename T> __device__ __forceinline__ T lanes_total(T x) {
    for (int half = 16; half > 0; half >>= 1) x = x + __shfl_down_sync(ALL_LANES, x, half);
    return __shfl_sync(ALL_LANES, x, 0);
}

#define MOST_SHARDS 16 // that are taken together

template <int COUNT, typename Leaf> __device__ __forceinline__ float tree(Leaf leaf, int first) {
    if constexpr (COUNT == 1) return 0.0f + leaf(first); // gradients start from zeros
    else return tree<COUNT / 2>(leaf, first) + tree<COUNT / 2>(leaf, first + COUNT / 2);
}

// The tree over `count` (a power of two up to MOST_SHARDS) shards' gradients; leaf(z) is that of shard z.
template <typename Leaf> __device__ __forceinline__ float shard_tree(int count, Leaf leaf) {
    switch (count) {
    case 1: return tree<1>(leaf, 0);
    case 2: return tree<2>(leaf, 0);
    case 4: return tree<4>(leaf, 0);
    case 8: return tree<8>(leaf, 0);
    default: return tree<MOST_SHARDS>(leaf, 0);
    }
}

// floor(log2 |x|) for finite x != 0, subnormals included.
__device__ __forceinline__ int binary_exponent(float x) {
    return ((__double2hiint((double)x) >> 20) & 0x7ff) - 1023;
}

// The largest s with largest * 2**s < 2**30; 0 for zero. `top` is the encoding of a finite magnitude.
__device__ __forceinline__ int sum_exponent(int top) {
    return top == 0 ? 0 : 29 - binary_exponent(__int_as_float(top));
}

// Two fp32 factors whose product is 2**s, for -126 <= s <= 200: 2**s alone may overflow fp32. Multiplying by both, in
// order, is exact wherever the result can round to an integer other than 0.
struct Factor {
    float first, second;
};

__device__ __forceinline__ Factor factor_of(int s) {
    int first = min(s, 100);
    Factor f = {power_of_two32(first), power_of_two32(s - first)};
    return f;
}

// rint(x * 2**s), ties to even, where that lies within 2**30.
__device__ __forceinline__ int scaled_integer(float x, Factor f) { return __float2int_rn((x * f.first) * f.second); }

// fp32(total * 2**-s).
__device__ __forceinline__ float float_of_sum(int64 total, int s) {
    return (float)((double)total * power_of_two64(-s));
}
