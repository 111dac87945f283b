// The gradient of the cross-entropy for one logit; see loss.py.
#pragma once
#include "elementary.cuh"

// m and sum are of the row: its largest logit, and the sum of exp(logit - m).
__device__ __forceinline__ float logit_gradient(float logit, float m, float sum, float scale, bool target) {
    float p = exp32(logit - m) / sum;
    if (target) p = p - 1.0f;
    return p * scale;
}
