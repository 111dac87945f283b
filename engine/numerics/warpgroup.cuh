// Hopper's warpgroup instructions on small tiles (compute capability 9.0 alone): the products of attention.
//
// A warpgroup holds 64 x 32 results as four warps hold 16 x 32 with `mma` of fixed_point.cuh: d[n] is what that has for
// columns 8n..8n+7.
#pragma once
#include "fixed_point.cuh"

// Descriptor of a tile whose rows are contiguous along the depth, WIDTH bytes each, swizzled over WIDTH bytes.
template <int WIDTH> __device__ __forceinline__ uint64 tile_descriptor(uint32 address) {
    static_assert(WIDTH == 32 || WIDTH == 64, "a swizzle that the hardware has");
    uint64 swizzle = WIDTH == 32 ? 3 : 2, eight_rows = 8 * WIDTH / 16;
    return (uint64)((address & 0x3ffff) >> 4) | (1ull << 16) | (eight_rows << 32) | (swizzle << 62);
}

// What this thread wrote to shared memory can be read by warpgroup instructions after the next barrier.
__device__ __forceinline__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Results can be read, and left operands overwritten, after this.
template <int COUNT> __device__ __forceinline__ void end_products(int (&high)[COUNT][4], int (&middle)[COUNT][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < COUNT; n++) // no read of a result may move before the wait
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(high[n][i]), "+r"(middle[n][i])::"memory");
}

#define PRODUCT32                                                                                                      \
    "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "                                                                \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define RESULTS32(C, d)                                                                                                \
    C(d[0][0]), C(d[0][1]), C(d[0][2]), C(d[0][3]), C(d[1][0]), C(d[1][1]), C(d[1][2]), C(d[1][3]), C(d[2][0]),        \
        C(d[2][1]), C(d[2][2]), C(d[2][3]), C(d[3][0]), C(d[3][1]), C(d[3][2]), C(d[3][3])

// d[64 x 32] = or, where ADD, += a[64 x 32] * b[32 x 32]. a is a tile in shared memory, or (as `mma` has it) in registers.
template <bool ADD> __device__ __forceinline__ void multiply32(int (*d)[4], uint64 a, uint64 b) {
    if constexpr (ADD)
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %18, 0;\n"
                     PRODUCT32 ", %16, %17, add;\n"
                     "}"
                     : RESULTS32("+r", d)
                     : "l"(a), "l"(b), "r"((int)ADD));
    else
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %18, 0;\n"
                     PRODUCT32 ", %16, %17, add;\n"
                     "}"
                     : RESULTS32("=r", d)
                     : "l"(a), "l"(b), "r"((int)ADD));
}

template <bool ADD> __device__ __forceinline__ void multiply32(int (*d)[4], const uint32 (&a)[4], uint64 b) {
    if constexpr (ADD)
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %21, 0;\n"
                     PRODUCT32 ", {%16, %17, %18, %19}, %20, add;\n"
                     "}"
                     : RESULTS32("+r", d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)ADD));
    else
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %21, 0;\n"
                     PRODUCT32 ", {%16, %17, %18, %19}, %20, add;\n"
                     "}"
                     : RESULTS32("=r", d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)ADD));
}
