// The elementary functions over a range of encodings, for comparison with the CPU's.
#include "elementary.cuh"

// out[i] = function of the fp32 number with encoding first + i: 0 exp, 1 log, 2 tanh, 3 gelu, 4 its derivative,
// 5 square root, 6 reciprocal.
extern "C" __global__ void k_elementary(int function, uint32 first, uint32 count, float *out) {
    uint32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float x = __int_as_float((int)(first + i)), y;
    switch (function) {
    case 0: y = exp32(x); break;
    case 1: y = log32(x); break;
    case 2: y = tanh32(x); break;
    case 3: y = gelu32(x); break;
    case 4: y = gelu_grad32(x); break;
    case 5: y = sqrtf(x); break;
    default: y = 1.0f / x;
    }
    out[i] = y != y ? canonical_nan() : y;
}
