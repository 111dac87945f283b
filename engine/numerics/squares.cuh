// Squares of the gradient of a weight, [M, N] with N even, added up block by block of 64 x 64 and always in the same order:
// who computes the gradient can do it on the way, and who reads it later comes to the same bits.
//
// A block is four warps', in the places that sums of a product have in registers (half_products.cuh): warp w has rows
// 16 w to 16 w + 15, and a thread 16 pairs of neighbouring columns.
#pragma once
#include "sums.cuh"

#define SQUARES 64
#define SQUARE_PAIRS (SQUARES / 4) // of a thread

// Where a thread's pair number n stands in its block, or further to the right.
__device__ __forceinline__ int pair_row(int n) { return 16 * (threadIdx.x / WARP % 4) + lane_of_thread() / 4 + 8 * (n & 1); }
__device__ __forceinline__ int pair_column(int n) { return 8 * (n / 2) + 2 * (lane_of_thread() & 3); }

// A pair's squares in fp32, in which those of numbers below 1e-19 are zeros. It has no room for those above 1e19: then
// their sum is not finite, and all pairs are added again in fp64. Rounded as it is written, whatever the compiler may do
// elsewhere.
__device__ __forceinline__ double pair_squares(float2 x) { return __fadd_rn(__fmul_rn(x.x, x.x), __fmul_rn(x.y, x.y)); }
__device__ __forceinline__ double wide_pair_squares(float2 x) {
    return __dadd_rn(__dmul_rn((double)x.x, (double)x.x), __dmul_rn((double)x.y, (double)x.y));
}
__device__ __forceinline__ bool has_room(double sum) { return sum < __hiloint2double(0x7ff00000, 0); }

// A block's sum from those of its four warps, which stand `apart` numbers from each other.
__device__ __forceinline__ double block_squares(const double *warps, int apart) {
    return warps[0] + warps[apart] + warps[2 * apart] + warps[3 * apart];
}
