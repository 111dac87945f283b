// Activations of the tier prod where the product does not compute them itself; see activation.py.
#include "half.cuh"

__device__ __forceinline__ float tanh_inside(float x) {
    float t, v = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(v)); // 2**-11 off at most: less than 16 bits tell apart
    return t;
}

__device__ __forceinline__ float activated(float x) {
#if RELU
    return fmaxf(x, 0.0f);
#else
    return 0.5f * x * (1.0f + tanh_inside(x));
#endif
}

__device__ __forceinline__ float derivative(float x) {
#if RELU
    return x > 0.0f ? 1.0f : 0.0f;
#else
    float t = tanh_inside(x), inner = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
#endif
}

// y = f(x); size % 8 == 0.
extern "C" __global__ void k_activation_fwd(const uint16 *x, int64 size, uint16 *y) {
    int64 i = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size) return;
    Eight v = load8(x + i);
#pragma unroll
    for (int j = 0; j < 8; j++) v.x[j] = activated(v.x[j]);
    store8(y + i, v);
}

#define SUM_ROWS 128

// dy becomes dy * f'(x); where `partial` is not null, partial [shards, blocks, width] = its sums over the SUM_ROWS rows of
// a block. x and dy [shards, tokens, width]; width % 8 == 0. A block has 8 warps; a lane takes eight columns.
// Grid: 256 columns, blocks, shards.
extern "C" __global__ void k_activation_bwd(const uint16 *x, int tokens, int width, uint16 *dy, float *partial) {
    __shared__ float columns[8][256];
    int warp = threadIdx.x / WARP, lane = lane_of_thread(), c = blockIdx.x * 256 + 8 * lane;
    float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (c < width) {
        int first = blockIdx.y * SUM_ROWS, last = min(first + SUM_ROWS, tokens);
        int64 start = (int64)blockIdx.z * tokens * width + c;
#pragma unroll 2
        for (int t = first + warp; t < last; t += 8) {
            int64 at = start + (int64)t * width;
            Eight v = load8(x + at), d = load8(dy + at);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                d.x[j] *= derivative(v.x[j]);
                sums[j] += d.x[j];
            }
            store8(dy + at, d);
        }
    }
    if (!partial) return;
#pragma unroll
    for (int j = 0; j < 8; j++) columns[warp][8 * lane + j] = sums[j];
    __syncthreads();
    int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += columns[w][threadIdx.x];
    partial[((int64)blockIdx.z * gridDim.y + blockIdx.y) * width + column] = sum;
}
