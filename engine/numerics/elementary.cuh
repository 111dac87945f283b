// The elementary functions of elementary.py, step by step. Its constants come in as constants.cuh, made from that
// module, so they are written down once.
#pragma once
#include "common.cuh"
#include "constants.cuh"

__device__ __forceinline__ float canonical_nan() { return __int_as_float(0x7fc00000); }
__device__ __forceinline__ float infinity() { return __int_as_float(INFINITY_BITS); }
__device__ __forceinline__ float absolute32(float x) { return __int_as_float(__float_as_int(x) & 0x7fffffff); }

// r with x = k ln 2 + r; `exponent` is k, shifted into the place of an exponent.
__device__ __forceinline__ float split_by_ln2(float x, uint32 &exponent) {
    float shifted = x * LOG2_E + ROUNDER;
    float k = shifted - ROUNDER;
    exponent = (uint32)__float_as_int(shifted) << 23;
    return (x - k * LN2_HIGH) - k * LN2_LOW;
}

__device__ __forceinline__ float expm1_reduced(float r) {
    float q = ((((EXP_5 * r + EXP_4) * r + EXP_3) * r + EXP_2) * r + EXP_1) * r + EXP_0;
    return r + (r * r) * q;
}

__device__ __forceinline__ float exp32(float x) {
    uint32 exponent;
    float r = split_by_ln2(x, exponent);
    float y = 1.0f + expm1_reduced(r);
    y = __int_as_float((int)((uint32)__float_as_int(y) + exponent));
    y = x < EXP_SMALLEST ? 0.0f : y;
    y = x > EXP_LARGEST ? infinity() : y;
    return x == x ? y : canonical_nan();
}

// exp32 for x that is neither positive nor NaN.
__device__ __forceinline__ float exp32_of_nonpositive(float x) {
    uint32 exponent;
    float r = split_by_ln2(x, exponent);
    float y = 1.0f + expm1_reduced(r);
    y = __int_as_float((int)((uint32)__float_as_int(y) + exponent));
    return x < EXP_SMALLEST ? 0.0f : y;
}

__device__ __forceinline__ float log32(float x) {
    bool subnormal = x < SMALLEST_NORMAL;
    float scaled = subnormal ? x * SUBNORMAL_SCALE : x;
    float offset = subnormal ? SUBNORMAL_EXPONENT : 0.0f;
    int bits = (int)((uint32)__float_as_int(scaled) - (uint32)BITS_OF_SQRT_HALF);
    float k = (float)(bits >> 23) - offset;
    float f = __int_as_float((bits & 0x007fffff) + BITS_OF_SQRT_HALF) - 1.0f;
    float q = LOG_7 * f + LOG_6;
    q = q * f + LOG_5;
    q = q * f + LOG_4;
    q = q * f + LOG_3;
    q = q * f + LOG_2;
    q = q * f + LOG_1;
    q = q * f + LOG_0;
    float square = f * f;
    float tail = ((square * f) * q + k * LN2_LOW) - 0.5f * square;
    float y = (f + tail) + k * LN2_HIGH;
    y = x == infinity() ? x : y;
    y = x == 0.0f ? -infinity() : y;
    return x >= 0.0f ? y : canonical_nan();
}

__device__ __forceinline__ float tanh32(float x) {
    float magnitude = absolute32(x);
    float clamped = magnitude < TANH_CLAMP ? magnitude : TANH_CLAMP;
    uint32 exponent;
    float r = split_by_ln2(clamped + clamped, exponent);
    float scale = __int_as_float((int)(exponent + 0x3f800000u));
    float e = scale * expm1_reduced(r) + (scale - 1.0f);
    float y = e / (e + 2.0f);
    y = __int_as_float(__float_as_int(y) | (__float_as_int(x) & (int)0x80000000));
    return x == x ? y : canonical_nan();
}

__device__ __forceinline__ float gelu32(float x) {
    float v = x * (GELU_LINEAR + GELU_CUBIC * (x * x));
    float e = exp32_of_nonpositive(-absolute32(v)); // v is NaN only where x is not finite
    float numerator = x >= 0.0f ? x : x * e;
    float y = numerator / (1.0f + e);
    return absolute32(x) <= LARGEST ? y : canonical_nan();
}

__device__ __forceinline__ float gelu_grad32(float x) {
    float clamped = x < GELU_CLAMP ? x : GELU_CLAMP;
    clamped = clamped > -GELU_CLAMP ? clamped : -GELU_CLAMP;
    float square = clamped * clamped;
    float v = clamped * (GELU_LINEAR + GELU_CUBIC * square);
    float slope = GELU_LINEAR + GELU_CUBIC_SLOPE * square;
    float e = exp32_of_nonpositive(-absolute32(v));
    float larger = 1.0f / (1.0f + e);
    float smaller = e * larger;
    float s = clamped >= 0.0f ? larger : smaller;
    float complement = clamped >= 0.0f ? smaller : larger;
    float y = s * (1.0f + (clamped * slope) * complement);
    return absolute32(x) <= LARGEST ? y : canonical_nan();
}
