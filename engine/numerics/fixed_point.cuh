// The fixed-point product on int8 tensor cores. The definition is in fixed_point.py.
//
// An operand is kept as two int8 planes, hi and lo, both contiguous along the depth, plus one exponent for each row:
// int32 sums of hi*hi' and of hi*lo' + lo*hi' give P/256 = 256*sum(hi*hi') + sum(hi*lo' + lo*hi') exactly.
#pragma once
#include "shared.cuh"
#include "sums.cuh"

#define ZERO_ROW 1000 // exponent of an all-zero row where exponents are compared: above any real one

// The largest s with rint(largest * 2**s) <= 32639; 0 for zero. `top` is the encoding of a finite magnitude.
__device__ __forceinline__ int exponent_for(int top) {
    if (top == 0) return 0;
    double value = (double)__int_as_float(top);
    int s = 14 - (((__double2hiint(value) >> 20) & 0x7ff) - 1023);
    return rint(value * power_of_two64(s)) > 32639.0 ? s - 1 : s;
}

// Exponent of a row whose largest magnitude has encoding `top`; sets the flag if that is not finite.
__device__ __forceinline__ int row_exponent(int top, int *flag) {
    if (top >= INFINITY_BITS) {
        *flag = 1;
        return 0;
    }
    return exponent_for(top);
}

// As row_exponent, but ZERO_ROW for a row of zeros (and for one that is not finite).
__device__ __forceinline__ int token_exponent(int top, int *flag) {
    if (top >= INFINITY_BITS) {
        *flag = 1;
        return ZERO_ROW;
    }
    return top == 0 ? ZERO_ROW : exponent_for(top);
}

__device__ __forceinline__ int high_part(int q) { return (q + 128) >> 8; }
__device__ __forceinline__ int low_part(int q) { return q - (((q + 128) >> 8) << 8); }

// The integers of x under `f`, 0 for tokens of exponent ZERO_ROW.
__device__ __forceinline__ Factor token_factor(int s) {
    Factor none = {0.0f, 0.0f};
    return s == ZERO_ROW ? none : factor_of(s);
}

// The hi and lo bytes of four integers. With u = q + 128, hi is the second byte of u and lo its first, less 128.
__device__ __forceinline__ void split4(int a, int b, int c, int d, uint32 &hi, uint32 &lo) {
    uint32 ab = __byte_perm(a + 128, b + 128, 0x5140), cd = __byte_perm(c + 128, d + 128, 0x5140);
    lo = __byte_perm(ab, cd, 0x5410) ^ 0x80808080u;
    hi = __byte_perm(ab, cd, 0x7632);
}

// fp32(v * 2**e), rounded once.
__device__ __forceinline__ float scaled_float(int v, int e) {
    if (e >= -126 && e <= 127) return (float)v * power_of_two32(e); // the product is exact, or overflows as it should
    if (v == 0) return 0.0f;
    return (float)((double)v * power_of_two64(e));
}

__device__ __forceinline__ float scaled_float(int64 v, int e) {
    if (e >= -126 && e <= 127) return (float)v * power_of_two32(e);
    if (v == 0) return 0.0f;
    return (float)((double)v * power_of_two64(e));
}

// Whether 2**e is a normal fp32 number, so that one multiplication by it is exact (or overflows as it should).
__device__ __forceinline__ bool is_plain(int e) { return e >= -126 && e <= 127; }

// The same for any e, out of line: called where exponents are unusual, and kept out of the way of the common path.
__device__ __noinline__ float scaled_float_rare(int64 v, int e) {
    if (is_plain(e)) return (float)v * power_of_two32(e);
    return v == 0 ? 0.0f : (float)((double)v * power_of_two64(e));
}

// --- tensor cores ---------------------------------------------------------------------------------------------------

// c[16 x 8] += a[16 x 32] * b[32 x 8] in int8 with int32 sums. With g = lane / 4 and t = lane % 4, a thread holds rows g
// and g + 8 of a (registers 0, 2 and 1, 3) at depths 4t..4t+3 and 16+4t.., column g of b at the same depths, and
// columns 2t, 2t+1 of c in rows g (0, 1) and g + 8 (2, 3).
__device__ __forceinline__ void mma(int (&c)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int depth = 0; depth < 2; depth++)
            asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                         : "+r"(c[2 * half]), "+r"(c[2 * half + 1])
                         : "r"(a[half + 2 * depth]), "r"(b[depth]));
#endif
}

// Both products of a step: high += a_hi*b_hi, middle += a_hi*b_lo + a_lo*b_hi.
__device__ __forceinline__ void mma_pair(int (&high)[4], int (&middle)[4], const uint32 (&a_hi)[4],
                                         const uint32 (&a_lo)[4], const uint32 (&b_hi)[2], const uint32 (&b_lo)[2]) {
    mma(high, a_hi, b_hi);
    mma(middle, a_hi, b_lo);
    mma(middle, a_lo, b_hi);
}

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// 16 bytes from global to shared memory, or 16 zero bytes.
__device__ __forceinline__ void copy16(uint32 to, const void *from, bool present) {
#if __CUDA_ARCH__ >= 800
    int bytes = present ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
#else
    uint4 value = present ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w));
#endif
}

__device__ __forceinline__ void end_copy_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::);
#endif
}

// Wait until at most N copy groups of this thread are under way.
template <int N> __device__ __forceinline__ void wait_copy_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
#endif
}
