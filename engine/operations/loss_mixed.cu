// Cross-entropy of the tier prod: the loss and the logits' gradient in one pass; see loss.py.
#include "half.cuh"

struct Running {
    float top, sum; // largest logit so far, and the sum of exp(logit - top)
};

__device__ __forceinline__ Running joined(Running a, Running b) {
    float top = fmaxf(a.top, b.top);
    Running r = {top, a.sum * __expf(a.top - top) + b.sum * __expf(b.top - top)};
    return r;
}

// `mine` with the eight logits from column c on; notes the target's.
__device__ __forceinline__ Running with_eight(Running mine, const Eight &l, int c, int vocab, int target,
                                              float *target_logit) {
    float top = mine.top;
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (c + j < vocab) top = fmaxf(top, l.x[j]);
    float sum = mine.sum * __expf(mine.top - top);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (c + j < vocab) sum += __expf(l.x[j] - top);
        if (c + j == target) *target_logit = l.x[j];
    }
    Running r = {top, sum};
    return r;
}

__device__ __forceinline__ void put_gradient(uint16 *logits, Eight l, int c, int vocab, int target, float top,
                                             float factor, float scale) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float p = __expf(l.x[j] - top) * factor;
        l.x[j] = c + j < vocab ? (c + j == target ? p - scale : p) : 0.0f;
    }
    store8(logits + c, l);
}

// A block takes a row of `padded` logits, of which `vocab` count. With `scale` not 0 they become their gradient times
// scale and the step's loss scale, and the padding becomes zeros. padded % 8 == 0. A thread keeps its first KEPT groups
// of eight in registers, so that most rows are read once.
#define KEPT 7

extern "C" __global__ void __launch_bounds__(1024)
k_classifier(uint16 *logits, const int *targets, int vocab, int padded, float *losses, float scale,
             const StepValues *values) {
    __shared__ Running parts[32];
    __shared__ float target_logit;
    int64 row = blockIdx.x;
    int target = targets[row], lane = lane_of_thread(), first = 8 * threadIdx.x, step = 8 * blockDim.x;
    int groups = first < padded ? (padded - first + step - 1) / step : 0;
    logits += row * padded;
    uint4 kept[KEPT];
#pragma unroll
    for (int n = 0; n < KEPT; n++)
        if (n < groups) kept[n] = *(const uint4 *)(logits + first + n * step);
    Running mine = {-3.0e38f, 0.0f};
#pragma unroll
    for (int n = 0; n < KEPT; n++)
        if (n < groups) mine = with_eight(mine, widened(kept[n]), first + n * step, vocab, target, &target_logit);
    for (int n = KEPT; n < groups; n++)
        mine = with_eight(mine, load8(logits + first + n * step), first + n * step, vocab, target, &target_logit);
    for (int apart = 16; apart > 0; apart >>= 1) {
        Running other = {__shfl_xor_sync(ALL_LANES, mine.top, apart), __shfl_xor_sync(ALL_LANES, mine.sum, apart)};
        mine = joined(mine, other);
    }
    if (lane == 0) parts[threadIdx.x / WARP] = mine;
    __syncthreads();
    mine = parts[0];
    for (int w = 1; w < (int)(blockDim.x / WARP); w++) mine = joined(mine, parts[w]);
    if (threadIdx.x == 0) losses[row] = logf(mine.sum) + (mine.top - target_logit);
    if (scale == 0.0f) return;
    scale *= values->loss_scale;
    float factor = scale / mine.sum;
#pragma unroll
    for (int n = 0; n < KEPT; n++)
        if (n < groups) put_gradient(logits, widened(kept[n]), first + n * step, vocab, target, mine.top, factor, scale);
    for (int n = KEPT; n < groups; n++) {
        int c = first + n * step;
        put_gradient(logits, load8(logits + c), c, vocab, target, mine.top, factor, scale);
    }
}
