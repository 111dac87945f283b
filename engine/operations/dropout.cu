// Dropout as a function of an address; see dropout.py.
#include "random.cuh"

// x[i] becomes x[i] * factor or 0 as element base + i says; a thread takes one group of four addresses.
extern "C" __global__ void k_dropout(float *x, int64 size, int64 base, Mask mask, const StepValues *values) {
    int64 group = base / 4 + (int64)blockIdx.x * blockDim.x + threadIdx.x;
    int64 start = 4 * group - base;
    if (start >= size) return;
    uint4 w = random_words4(values, mask.site, (uint64)group);
    uint32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (start + j >= 0 && start + j < size)
            x[start + j] = dropped(x[start + j], words[j], mask.threshold, mask.factor);
}
