// Kernels of the activation; see activation.py. Flat arrays of `size` elements; a thread takes four.
#include "elementary.cuh"

__device__ __forceinline__ float relu32(float x) { return x <= 0.0f ? 0.0f : x; }

// y = f(x); storage of tensors is padded and aligned, so whole groups of four are read and written as one where the
// array reaches that far.
#define FORWARD(NAME, FUNCTION)                                                                                        \
    extern "C" __global__ void NAME(const float *x, int64 size, float *y) {                                            \
        int64 i = 4 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);                                                  \
        if (i + 3 < size) {                                                                                            \
            float4 v = *(const float4 *)(x + i);                                                                       \
            *(float4 *)(y + i) = make_float4(FUNCTION(v.x), FUNCTION(v.y), FUNCTION(v.z), FUNCTION(v.w));              \
        } else                                                                                                         \
            for (; i < size; i++) y[i] = FUNCTION(x[i]);                                                               \
    }

// `gradient` holds dy and becomes dx = FUNCTION(x, dy).
#define BACKWARD(NAME, FUNCTION)                                                                                       \
    extern "C" __global__ void NAME(const float *x, int64 size, float *gradient) {                                     \
        int64 i = 4 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);                                                  \
        if (i + 3 < size) {                                                                                            \
            float4 v = *(const float4 *)(x + i), g = *(const float4 *)(gradient + i);                                  \
            *(float4 *)(gradient + i) =                                                                                \
                make_float4(FUNCTION(v.x, g.x), FUNCTION(v.y, g.y), FUNCTION(v.z, g.z), FUNCTION(v.w, g.w));           \
        } else                                                                                                         \
            for (; i < size; i++) gradient[i] = FUNCTION(x[i], gradient[i]);                                           \
    }

__device__ __forceinline__ float gelu_backward(float x, float dy) { return dy * gelu_grad32(x); }
__device__ __forceinline__ float relu_backward(float x, float dy) { return x <= 0.0f ? 0.0f : dy; }

FORWARD(k_gelu_fwd, gelu32)
FORWARD(k_relu_fwd, relu32)
BACKWARD(k_gelu_bwd, gelu_backward)
BACKWARD(k_relu_bwd, relu_backward)
