// Cross-entropy of the tier prod: the loss and the logits' gradient in one pass; see loss.py.
#include "half.cuh"

struct Running {
    float top, sum; // largest logit so far, and the sum of exp(logit - top)
};

#define LOWEST -3.0e38f

__device__ __forceinline__ Running joined(Running a, Running b) {
    float top = fmaxf(a.top, b.top);
    Running r = {top, a.sum * __expf(a.top - top) + b.sum * __expf(b.top - top)};
    return r;
}

// `mine` with the eight logits from column c on; notes the target's.
__device__ __forceinline__ Running with_eight(Running mine, Eight l, int c, int vocab, int target, float *target_logit) {
    if (c + 8 > vocab)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (c + j >= vocab) l.x[j] = LOWEST;
    float top = mine.top;
#pragma unroll
    for (int j = 0; j < 8; j++) top = fmaxf(top, l.x[j]);
    float sum = mine.sum * __expf(mine.top - top);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += __expf(l.x[j] - top);
    if (target - c >= 0 && target - c < 8)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (c + j == target) *target_logit = l.x[j];
    Running r = {top, sum};
    return r;
}

__device__ __forceinline__ void put_gradient(uint16 *logits, Eight l, int c, int vocab, int target, float top,
                                             float factor, float scale) {
#pragma unroll
    for (int j = 0; j < 8; j++) l.x[j] = __expf(l.x[j] - top) * factor;
    if (target - c >= 0 && target - c < 8)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (c + j == target) l.x[j] -= scale;
    if (c + 8 > vocab)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (c + j >= vocab) l.x[j] = 0.0f;
    store8(logits + c, l);
}

// Logits from `column` on: those that this thread copied to `kept`, or where KEPT is 0 the row in memory.
template <int KEPT> __device__ __forceinline__ Eight logits_at(const uint4 *kept, const uint16 *logits, int column) {
    return KEPT ? widened(kept[column / 8]) : load8(logits + column);
}

template <int KEPT>
__device__ __forceinline__ void classify(uint4 *kept, uint16 *logits, const int *targets, int vocab, int padded,
                                         float *losses, float scale, const StepValues *values) {
    __shared__ Running parts[32];
    __shared__ float target_logit;
    int64 row = gridDim.x - 1 - blockIdx.x; // the last tokens first: their logits are in the cache
    int target = targets[row], lane = lane_of_thread(), first = 8 * threadIdx.x, step = 8 * blockDim.x;
    logits += row * padded;
    if (KEPT) {
        // A thread reads back only what it copied itself.
        for (int c = first; c < padded; c += step) copy16(kept + c / 8, (const uint4 *)(logits + c));
        copies_arrived();
    }
    Running mine = {LOWEST, 0.0f};
#pragma unroll 2
    for (int c = first; c < padded; c += step)
        mine = with_eight(mine, logits_at<KEPT>(kept, logits, c), c, vocab, target, &target_logit);
    for (int apart = 16; apart > 0; apart >>= 1) {
        Running other = {__shfl_xor_sync(ALL_LANES, mine.top, apart), __shfl_xor_sync(ALL_LANES, mine.sum, apart)};
        mine = joined(mine, other);
    }
    if (lane == 0) parts[threadIdx.x / WARP] = mine;
    __syncthreads();
    mine = lane < (int)(blockDim.x / WARP) ? parts[lane] : parts[0];
    if (lane >= (int)(blockDim.x / WARP)) mine.sum = 0.0f;
    for (int apart = 16; apart > 0; apart >>= 1) {
        Running other = {__shfl_xor_sync(ALL_LANES, mine.top, apart), __shfl_xor_sync(ALL_LANES, mine.sum, apart)};
        mine = joined(mine, other);
    }
    if (threadIdx.x == 0) losses[row] = logf(mine.sum) + (mine.top - target_logit);
    if (scale == 0.0f) return;
    scale *= values->loss_scale;
    float factor = scale / mine.sum;
#pragma unroll 2
    for (int c = first; c < padded; c += step)
        put_gradient(logits, logits_at<KEPT>(kept, logits, c), c, vocab, target, mine.top, factor, scale);
}

// A block takes a row of `padded` logits, of which `vocab` count. With `scale` not 0 they become their gradient times
// scale and the step's loss scale, and the padding becomes zeros. padded % 8 == 0. The row stays in dynamic shared memory
// of 2 * padded bytes from its only reading on.
extern "C" __global__ void __launch_bounds__(1024, 2)
k_classifier(uint16 *logits, const int *targets, int vocab, int padded, float *losses, float scale,
             const StepValues *values) {
    extern __shared__ uint4 kept[];
    classify<1>(kept, logits, targets, vocab, padded, losses, scale, values);
}

// The same for rows that do not fit: the second reading finds some of the row in the card's cache.
extern "C" __global__ void __launch_bounds__(1024, 2)
k_classifier_long(uint16 *logits, const int *targets, int vocab, int padded, float *losses, float scale,
                  const StepValues *values) {
    classify<0>(nullptr, logits, targets, vocab, padded, losses, scale, values);
}
