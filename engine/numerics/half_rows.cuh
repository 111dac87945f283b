// Rows of WIDTH 16-bit floats, each over some threads of a block, in fp32 registers.
//
// A warp has a whole row where every lane can take as many groups of four columns of it and these are few, else as many
// warps share it as it has groups of 256 columns, and a lane takes eight.
#pragma once
#include "half.cuh"

#if WIDTH % (4 * WARP) == 0 && WIDTH <= 16 * WARP
#define PIECE 4 // columns that lie side by side
#define PIECES (WIDTH / (4 * WARP)) // of a thread
#define ROW_WARPS 1
typedef uint2 Words;
#else
#define PIECE 8
#define PIECES 1
#define ROW_WARPS ((WIDTH / 8 + WARP - 1) / WARP)
typedef uint4 Words;
#endif
#define ROW_THREADS (ROW_WARPS * WARP)
#define OWN (PIECE * PIECES)

// A thread's columns of a row: element PIECE * i + j is column_of(i) + j. Of the last warp some may lie beyond the row.
struct Own {
    float x[OWN];
};

struct OwnWords {
    Words w[PIECES];
};

__device__ __forceinline__ int column_of(int i) { return PIECE * (threadIdx.x % ROW_THREADS + ROW_THREADS * i); }

__device__ __forceinline__ Own filled(float value) {
    Own own;
#pragma unroll
    for (int i = 0; i < OWN; i++) own.x[i] = value;
    return own;
}

__device__ __forceinline__ Own widened(const OwnWords &words) {
    Own own;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const uint32 *w = &words.w[i].x;
#pragma unroll
        for (int j = 0; j < PIECE / 2; j++) {
            own.x[PIECE * i + 2 * j] = widened((uint16)(w[j] & 0xffff));
            own.x[PIECE * i + 2 * j + 1] = widened((uint16)(w[j] >> 16));
        }
    }
    return own;
}

__device__ __forceinline__ OwnWords narrowed(const Own &own) {
    OwnWords words;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        uint32 *w = &words.w[i].x;
#pragma unroll
        for (int j = 0; j < PIECE / 2; j++) w[j] = narrowed(own.x[PIECE * i + 2 * j], own.x[PIECE * i + 2 * j + 1]);
    }
    return words;
}

__device__ __forceinline__ OwnWords load_own(const uint16 *row) {
    OwnWords words;
#pragma unroll
    for (int i = 0; i < PIECES; i++) words.w[i] = *(const Words *)(row + column_of(i));
    return words;
}

__device__ __forceinline__ void store_own(uint16 *row, const OwnWords &words) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) *(Words *)(row + column_of(i)) = words.w[i];
}

__device__ __forceinline__ Own load_own(const float *row) {
    Own own;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
        float4 v = *(const float4 *)(row + column_of(i / PIECE) + i % PIECE);
        own.x[i] = v.x, own.x[i + 1] = v.y, own.x[i + 2] = v.z, own.x[i + 3] = v.w;
    }
    return own;
}

__device__ __forceinline__ void store_own(float *row, const Own &own) {
#pragma unroll
    for (int i = 0; i < OWN; i += 4)
        *(float4 *)(row + column_of(i / PIECE) + i % PIECE) = make_float4(own.x[i], own.x[i + 1], own.x[i + 2], own.x[i + 3]);
}

// Dropout of a row that begins at element `at`, a multiple of 4.
__device__ __forceinline__ void drop_own(Own &own, const Mask &mask, const StepValues *values, int64 at) {
    if (!mask.threshold) return;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
        uint4 r = random_words4(values, mask.site, (uint64)((at + column_of(i / PIECE) + i % PIECE) / 4));
        uint32 words[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int j = 0; j < 4; j++) own.x[i + j] = dropped(own.x[i + j], words[j], mask.threshold, mask.factor);
    }
}
