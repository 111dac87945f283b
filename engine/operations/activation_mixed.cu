// Activations of the tier prod where the product does not compute them itself; see activation.py.
#include "activations.cuh"

// y = f(x); size % 8 == 0.
extern "C" __global__ void k_activation_fwd(const uint16 *x, int64 size, uint16 *y) {
    int64 i = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size) return;
    Eight v = load8(x + i);
#pragma unroll
    for (int j = 0; j < 8; j++) v.x[j] = activated(v.x[j]);
    store8(y + i, v);
}

#define BLOCK_ROWS 64
#define ROWS_AT_ONCE 4 // of a warp: all are read before the first is written, so that enough bytes are on their way

// dy becomes dy * f'(x); where `partial` is not null, partial [shards, blocks, width] = its sums over the BLOCK_ROWS rows
// of a block. x and dy [shards, tokens, width]; width % 8 == 0. A block has 8 warps; a lane takes eight columns.
// Grid: 256 columns, blocks, shards.
extern "C" __global__ void __launch_bounds__(256, 4)
k_activation_bwd(const uint16 *x, int tokens, int width, uint16 *dy, float *partial) {
    int c = blockIdx.x * 256 + 8 * lane_of_thread();
    Eight sums = {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}};
    if (c < width) {
        int first = blockIdx.y * BLOCK_ROWS, last = min(first + BLOCK_ROWS, tokens);
        int64 start = (int64)blockIdx.z * tokens * width + c;
        for (int t = first + threadIdx.x / WARP; t < last; t += 8 * ROWS_AT_ONCE) {
            uint4 v[ROWS_AT_ONCE], d[ROWS_AT_ONCE];
#pragma unroll
            for (int k = 0; k < ROWS_AT_ONCE; k++) {
                int64 at = start + (int64)(t + 8 * k) * width;
                if (t + 8 * k >= last) continue;
                v[k] = *(const uint4 *)(x + at);
                d[k] = *(const uint4 *)(dy + at);
            }
#pragma unroll
            for (int k = 0; k < ROWS_AT_ONCE; k++) {
                if (t + 8 * k >= last) continue;
                Eight slope = widened(v[k]), g = widened(d[k]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    g.x[j] *= derivative(slope.x[j]);
                    sums.x[j] += g.x[j];
                }
                store8(dy + start + (int64)(t + 8 * k) * width, g);
            }
        }
    }
    if (partial) put_column_sums(sums, blockIdx.x * 256, width, partial + ((int64)blockIdx.z * gridDim.y + blockIdx.y) * width);
}
