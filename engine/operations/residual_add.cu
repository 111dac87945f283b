// Kernels of the residual sum; see residual_add.py. Flat arrays of `size` elements; `base` addresses the mask.
#include "random.cuh"

// The values of group `group` of four addresses of x through the mask; threshold 0 keeps everything.
__device__ __forceinline__ void masked_group(const float *x, int64 start, int64 size, int64 group, const Mask &mask,
                                             const StepValues *values, float (&v)[4]) {
    uint4 w = make_uint4(0, 0, 0, 0);
    if (mask.threshold) w = random_words4(values, mask.site, (uint64)group);
    uint32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[j] = start + j >= 0 && start + j < size ? x[start + j] : 0.0f;
        if (mask.threshold) v[j] = dropped(v[j], words[j], mask.threshold, mask.factor);
    }
}

// y holds the branch and becomes x + branch, the branch through dropout.
extern "C" __global__ void k_residual_add_fwd(const float *x, int64 size, float *y, int64 base, Mask mask,
                                              const StepValues *values) {
    int64 group = base / 4 + (int64)blockIdx.x * blockDim.x + threadIdx.x;
    int64 start = 4 * group - base;
    if (start >= size) return;
    float v[4];
    if (!mask.threshold && start >= 0 && start + 3 < size && base % 4 == 0) {
        float4 a = *(const float4 *)(x + start), b = *(const float4 *)(y + start);
        *(float4 *)(y + start) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
        return;
    }
    masked_group(y, start, size, group, mask, values, v);
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (start + j >= 0 && start + j < size) y[start + j] = x[start + j] + v[j];
}

// dbranch = dy through dropout; dx += dy where `dx` is not null.
extern "C" __global__ void k_residual_add_bwd(const float *dy, int64 size, float *dbranch, float *dx, int64 base, Mask mask,
                                              const StepValues *values) {
    int64 group = base / 4 + (int64)blockIdx.x * blockDim.x + threadIdx.x;
    int64 start = 4 * group - base;
    if (start >= size) return;
    float v[4];
    if (!mask.threshold && !dx && start >= 0 && start + 3 < size && base % 4 == 0) {
        *(float4 *)(dbranch + start) = *(const float4 *)(dy + start);
        return;
    }
    masked_group(dy, start, size, group, mask, values, v);
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (start + j >= 0 && start + j < size) {
            if (dx) dx[start + j] = dx[start + j] + dy[start + j];
            dbranch[start + j] = v[j];
        }
}
