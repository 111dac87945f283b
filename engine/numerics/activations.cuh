// The activation of the tier prod and its derivative, in fp32: ReLU where RELU, else GELU in its tanh form.
#pragma once
#include "half.cuh"

__device__ __forceinline__ float tanh_inside(float x) {
    float t, v = x * (0.7978845608028654f + 0.0356774081f * (x * x));
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(v)); // 2**-11 off at most: less than 16 bits tell apart
    return t;
}

__device__ __forceinline__ float activated(float x) {
#if RELU
    return fmaxf(x, 0.0f);
#else
    float half = 0.5f * x;
    return half + half * tanh_inside(x);
#endif
}

__device__ __forceinline__ float derivative(float x) {
#if RELU
    return x > 0.0f ? 1.0f : 0.0f;
#else
    // (1 + t)/2 + x/2 (1 - t^2) v', in few instructions
    float t = tanh_inside(x), half = 0.5f * t + 0.5f, rise = x * (0.7978845608028654f + 0.1070322243f * (x * x));
    return half + half * (rise - t * rise);
#endif
}
