// Products of a warpgroup of 16-bit floats with fp32 sums (compute capability 9.0): d[64 x N] (+)= a[64 x 16] * b[16 x N].
//
// A thread holds rows g and g + 8 of its warp's 16, g = lane / 4, columns 8n + 2t and the next, t = lane % 4: sum 4n is
// row g, 4n + 2 row g + 8. The left operand in registers lies alike, so that sums of one product, narrowed, are the
// left operand of the next.
#pragma once
#include "half.cuh"
#include "asynchronous.cuh"

#if HALF_BF16
#define HALF_TYPE "bf16"
#else
#define HALF_TYPE "f16"
#endif

#define SUMS_16                                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64                                                                                                        \
    SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "    \
            "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_96                                                                                                        \
    SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "    \
            "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define EIGHT_SUMS(d, i)                                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KEPT_16(d) EIGHT_SUMS(d, 0), EIGHT_SUMS(d, 8)
#define KEPT_32(d) KEPT_16(d), EIGHT_SUMS(d, 16), EIGHT_SUMS(d, 24)
#define KEPT_64(d) KEPT_32(d), EIGHT_SUMS(d, 32), EIGHT_SUMS(d, 40), EIGHT_SUMS(d, 48), EIGHT_SUMS(d, 56)
#define KEPT_96(d) KEPT_64(d), EIGHT_SUMS(d, 64), EIGHT_SUMS(d, 72), EIGHT_SUMS(d, 80), EIGHT_SUMS(d, 88)

// ACROSS: b's columns lie next to each other in memory, else its depth does; LEFT_ACROSS: a's rows do. `add` 0 starts
// from zero. Asynchronous.
#define HALF_PRODUCTS(N, COUNT, A0, A1, A2, A3, A4, A5, A6)                                                            \
    template <int ACROSS>                                                                                              \
    __device__ __forceinline__ void half_product(float(&d)[COUNT], const uint32(&a)[4], uint64 b, int add) {           \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" A5 ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." HALF_TYPE "." HALF_TYPE " {" SUMS_##COUNT        \
                     "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" A4 ", add, 1, 1, %" A6 ";\n}"                        \
                     : KEPT_##COUNT(d)                                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ACROSS));                     \
    }                                                                                                                  \
    template <int ACROSS, int LEFT_ACROSS = 0>                                                                         \
    __device__ __forceinline__ void half_product(float(&d)[COUNT], uint64 a, uint64 b, int add) {                      \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" A2 ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." HALF_TYPE "." HALF_TYPE " {" SUMS_##COUNT        \
                     "}, %" A0 ", %" A1 ", add, 1, 1, %" A4 ", %" A3 ";\n}"                                            \
                     : KEPT_##COUNT(d)                                                                                 \
                     : "l"(a), "l"(b), "r"(add), "n"(ACROSS), "n"(LEFT_ACROSS));                                    \
    }

HALF_PRODUCTS("32", 16, "16", "17", "18", "19", "20", "21", "22")
HALF_PRODUCTS("64", 32, "32", "33", "34", "35", "36", "37", "38")
HALF_PRODUCTS("128", 64, "64", "65", "66", "67", "68", "69", "70")
HALF_PRODUCTS("192", 96, "96", "97", "98", "99", "100", "101", "102")

// Descriptor of boxes of 64 lines in shared memory, LINE bytes (64 or 128) each, swizzled over a line.
template <int LINE> __device__ __forceinline__ uint64 box_descriptor(uint32 address) {
    return (uint64)((address & 0x3ffff) >> 4) | ((uint64)(64 * LINE / 16) << 16) | ((uint64)(8 * LINE / 16) << 32) |
           (LINE == 128 ? 1ull : 2ull) << 62;
}

// Sums of products that were waited for: keeps the compiler from reading them earlier.
template <int COUNT>
__device__ __forceinline__ void products_done(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The left operand of depth 16 from sums of columns 16k to 16k + 15.
template <int COUNT>
__device__ __forceinline__ void left_operand(uint32 (&a)[4], const float (&d)[COUNT], int k) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = narrowed(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
}
