// AdamW of one element, and what its kernels are told and leave behind; see optimizer.py.
#pragma once
#include "random.cuh"

// What a step leaves for the host, and what later kernels of the step ask.
struct Outcome {
    double norm;
    int64 loss_total;
    float clip;
    int stop; // not 0: something was not finite, so nothing may be updated
};

struct Piece {
    int64 start;       // of the parameter, in the flat arrays
    int parameter, decayed;
    int64 first, last; // elements of the parameter
};

struct Constants {
    float beta1, rest1, beta2, rest2, epsilon;
};

// One element's update, each operation rounded to fp32 in this order.
struct Update {
    float w, m, v;
};

__device__ __forceinline__ Update updated(const float *w, const float *g, const float *m, const float *v, int64 at,
                                          const Constants &k, const StepValues &s, float clip, float decay) {
    float x = g[at] * clip;
    float mi = k.beta1 * m[at] + k.rest1 * x;
    float vi = k.beta2 * v[at] + k.rest2 * (x * x);
    Update u = {w[at] * decay - s.rate * ((mi / s.correction1) / (sqrtf(vi / s.correction2) + k.epsilon)), mi, vi};
    return u;
}
