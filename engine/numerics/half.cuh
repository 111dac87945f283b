// 16-bit floats of the tier prod: HALF_BF16 chooses bfloat16, else IEEE half. Eight at a time, 16 bytes, in fp32.
#pragma once
#include "random.cuh"
#include "sums.cuh"

struct Eight {
    float x[8];
};

__device__ __forceinline__ float widened(uint16 h) {
#if HALF_BF16
    return __int_as_float((int)((uint32)h << 16));
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
#endif
}

// Both rounded to nearest even; `low` in the lower half of the word.
__device__ __forceinline__ uint32 narrowed(float low, float high) {
    uint32 word;
#if HALF_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

__device__ __forceinline__ Eight widened(const uint4 &words) {
    Eight e;
    uint32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        e.x[2 * j] = widened((uint16)(w[j] & 0xffff));
        e.x[2 * j + 1] = widened((uint16)(w[j] >> 16));
    }
    return e;
}

__device__ __forceinline__ uint4 narrowed(const Eight &e) {
    return make_uint4(narrowed(e.x[0], e.x[1]), narrowed(e.x[2], e.x[3]), narrowed(e.x[4], e.x[5]),
                      narrowed(e.x[6], e.x[7]));
}

__device__ __forceinline__ Eight load8(const uint16 *p) { return widened(*(const uint4 *)p); }

__device__ __forceinline__ void store8(uint16 *p, const Eight &e) { *(uint4 *)p = narrowed(e); }

__device__ __forceinline__ Eight load8(const float *p) {
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    Eight e = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    return e;
}

__device__ __forceinline__ void store8(float *p, const Eight &e) {
    ((float4 *)p)[0] = make_float4(e.x[0], e.x[1], e.x[2], e.x[3]);
    ((float4 *)p)[1] = make_float4(e.x[4], e.x[5], e.x[6], e.x[7]);
}

__device__ __forceinline__ float4 operator+(const float4 &a, const float4 &b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The end of a sum over rows by a block of eight warps, each lane with eight columns: out [width] gets the warps' sums of
// 256 columns from `first` on, added in the order of warps.
__device__ __forceinline__ void put_column_sums(const Eight &sums, int first, int width, float *out) {
    __shared__ __align__(16) float columns[8][256];
    store8(&columns[threadIdx.x / WARP][8 * lane_of_thread()], sums);
    __syncthreads();
    int column = first + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += columns[w][threadIdx.x];
    out[column] = sum;
}

// Sixteen bytes from memory to shared memory, past the registers; they are there for this thread after copies_arrived.
__device__ __forceinline__ void copy16(uint4 *to, const uint4 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32)__cvta_generic_to_shared(to)), "l"(from));
}

__device__ __forceinline__ void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Dropout of eight elements from address `at` on, a multiple of 8.
__device__ __forceinline__ void drop8(Eight &e, const Mask &mask, const StepValues *values, int64 at) {
    if (!mask.threshold) return;
    uint4 a = random_words4(values, mask.site, (uint64)(at / 4)), b = random_words4(values, mask.site, (uint64)(at / 4 + 1));
    uint32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 8; j++) e.x[j] = dropped(e.x[j], words[j], mask.threshold, mask.factor);
}
