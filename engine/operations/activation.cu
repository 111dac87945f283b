// Kernels of the activation; see activation.py. Flat arrays of `size` elements.
#include "elementary.cuh"

extern "C" __global__ void k_gelu_fwd(const float *x, int64 size, float *y) {
    int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) y[i] = gelu32(x[i]);
}

// `gradient` holds dy and becomes dx.
extern "C" __global__ void k_gelu_bwd(const float *x, int64 size, float *gradient) {
    int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) gradient[i] = gradient[i] * gelu_grad32(x[i]);
}

extern "C" __global__ void k_relu_fwd(const float *x, int64 size, float *y) {
    int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) y[i] = x[i] <= 0.0f ? 0.0f : x[i];
}

extern "C" __global__ void k_relu_bwd(const float *x, int64 size, float *gradient) {
    int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) gradient[i] = x[i] <= 0.0f ? 0.0f : gradient[i];
}
