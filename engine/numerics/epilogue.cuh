// What a product does with its results before it writes them: bias, then adding to what is there, or dropout and the
// residual sum. The latter are kernels of their own (RESIDUAL): registers of a product are scarce.
#pragma once
#include "random.cuh"

struct Epilogue {
    const float *bias;        // [columns] or null
    const float *residual;    // [rows, columns]: result = residual + dropped(result), where RESIDUAL
    const StepValues *values; // of dropout; element 0 of the result has address `base`
    int64 base;
    Mask mask;
    int add; // to what stands there, where not RESIDUAL
};

// Out of line where results are finished one by one: unrolled, it would be most of a kernel's code.
__device__ __noinline__ uint32 random_word_apart(const StepValues *values, uint32 site, uint64 element) {
    uint4 w = random_words4(values, site, element / 4);
    return element & 2 ? (element & 1 ? w.w : w.z) : (element & 1 ? w.y : w.x);
}

// Write y, the result of element `at` in column `column`, to `target`.
template <bool RESIDUAL>
__device__ __forceinline__ void finish(const Epilogue &e, float y, int64 at, int column, float *target) {
    if (e.bias) y = y + e.bias[column];
    if (RESIDUAL) {
        if (e.mask.threshold) {
            uint32 word = random_word_apart(e.values, e.mask.site, e.base + at);
            y = dropped(y, word, e.mask.threshold, e.mask.factor);
        }
        y = e.residual[at] + y;
    } else if (e.add)
        y = *target + y;
    *target = y;
}
