// Shared by all kernels: types, powers of two, and the lanes of a warp. Compiled with --fmad=false, -ftz=false and
// exactly rounded division and square root, so that `+ - * /` on float mean IEEE-754 and nothing else.
#pragma once

typedef signed char int8;
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;

#define WARP 32
#define ALL_LANES 0xffffffffu
#define INFINITY_BITS 0x7f800000

// 2**e as fp32, for -126 <= e <= 127.
__device__ __forceinline__ float power_of_two32(int e) { return __int_as_float((e + 127) << 23); }

// 2**e as float64, for -1022 <= e <= 1023.
__device__ __forceinline__ double power_of_two64(int e) { return __hiloint2double((e + 1023) << 20, 0); }

// The encoding of |x|: ordered like the magnitudes, infinity and then NaN above every finite one.
__device__ __forceinline__ int magnitude_bits(float x) { return __float_as_int(x) & 0x7fffffff; }

__device__ __forceinline__ int lane_of_thread() { return threadIdx.x & (WARP - 1); }

__device__ __forceinline__ int warp_max(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL_LANES, x);
#endif
    for (int apart = 16; apart > 0; apart >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, apart));
    return x;
}

__device__ __forceinline__ int warp_min(int x) { return -warp_max(-x); }

__device__ __forceinline__ float warp_max(float x) {
    for (int apart = 16; apart > 0; apart >>= 1) {
        float other = __shfl_xor_sync(ALL_LANES, x, apart);
        x = other > x ? other : x;
    }
    return x;
}

__device__ __forceinline__ uint64 warp_sum(uint64 x) {
    for (int apart = 16; apart > 0; apart >>= 1) x += __shfl_xor_sync(ALL_LANES, x, apart);
    return x;
}

// A block's sum of integers, valid in thread 0; `scratch` holds one number for each warp.
__device__ __forceinline__ uint64 block_sum(uint64 x, uint64 *scratch) {
    x = warp_sum(x);
    __syncthreads();
    if (lane_of_thread() == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    uint64 total = 0;
    if (threadIdx.x == 0)
        for (int w = 0; w < (int)(blockDim.x / WARP); w++) total += scratch[w];
    return total;
}
