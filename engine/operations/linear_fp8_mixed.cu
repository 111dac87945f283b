// Operands of the precision fp8 (tier prod): rows of 16-bit floats as E4M3 numbers with one scale each.
#include "half.cuh"

#define LARGEST_E4M3 448.0f

// |x| <= LARGEST_E4M3, rounded to nearest even: a sign, four bits of exponent (bias 7), three of mantissa. In integers, so
// that every card and the emulator do the same. Micikevicius et al. 2022, FP8 formats for deep learning.
__device__ __forceinline__ uint32 e4m3_of(float x) {
    uint32 bits = (uint32)__float_as_int(x), sign = bits >> 24 & 0x80;
    float size = fabsf(x);
    if (size < 0.015625f) return sign | (uint32)(int)rintf(size * 512.0f); // below 2**-6: multiples of 2**-9
    uint32 rest = bits & 0x7fffffff;
    rest += 0x7ffff + (rest >> 20 & 1);
    return sign | ((rest >> 20) - (120 << 3));
}

// out [rows, width] = x / scale, scales [rows] = the row's largest magnitude / 448, 1 for a row of zeros. A warp takes a
// row; width % 16 == 0. A row that is not finite has scale NaN, so that its products are not finite either.
extern "C" __global__ void k_rows_to_e4m3(const uint16 *x, int rows, int width, unsigned char *out, float *scales) {
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = lane_of_thread();
    if (row >= rows) return;
    const uint16 *from = x + (int64)row * width;
    float top = 0.0f, bad = 0.0f;
    for (int c = 8 * lane; c < width; c += 8 * WARP) {
        Eight v = load8(from + c);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            top = fmaxf(top, fabsf(v.x[j]));
            if (!(fabsf(v.x[j]) <= 3.4028234e38f)) bad = 1.0f;
        }
    }
    top = warp_max(top);
    bool finite = warp_max(bad) == 0.0f, usable = finite && top > 0.0f;
    // Not below the smallest normal number: its reciprocal would be infinite.
    float scale = usable ? fmaxf(top / LARGEST_E4M3, 1.1754944e-38f) : 1.0f, inverse = usable ? 1.0f / scale : 0.0f;
    uint2 *to = (uint2 *)(out + (int64)row * width);
    for (int c = 8 * lane; c < width; c += 8 * WARP) {
        Eight v = load8(from + c);
        uint32 words[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float y = finite ? fminf(fmaxf(v.x[j] * inverse, -LARGEST_E4M3), LARGEST_E4M3) : 0.0f;
            words[j / 4] |= e4m3_of(y) << 8 * (j % 4);
        }
        to[c / 8] = make_uint2(words[0], words[1]);
    }
    if (lane == 0) scales[row] = finite ? scale : __int_as_float(0x7fc00000);
}
