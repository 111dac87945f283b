// Activations of the tier prod where the product does not compute them itself; see activation.py.
#include "half.cuh"

__device__ __forceinline__ float tanh_inside(float x) {
    return tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x));
}

__device__ __forceinline__ float activated(float x) {
#if RELU
    return fmaxf(x, 0.0f);
#else
    return 0.5f * x * (1.0f + tanh_inside(x));
#endif
}

__device__ __forceinline__ float derivative(float x) {
#if RELU
    return x > 0.0f ? 1.0f : 0.0f;
#else
    float t = tanh_inside(x), inner = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
#endif
}

// y = f(x); size % 8 == 0.
extern "C" __global__ void k_activation_fwd(const uint16 *x, int64 size, uint16 *y) {
    int64 i = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size) return;
    Eight v = load8(x + i);
#pragma unroll
    for (int j = 0; j < 8; j++) v.x[j] = activated(v.x[j]);
    store8(y + i, v);
}

// dy becomes dy * f'(x).
extern "C" __global__ void k_activation_bwd(const uint16 *x, int64 size, uint16 *dy) {
    int64 i = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size) return;
    Eight v = load8(x + i), d = load8(dy + i);
#pragma unroll
    for (int j = 0; j < 8; j++) d.x[j] *= derivative(v.x[j]);
    store8(dy + i, d);
}
