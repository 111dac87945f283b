// Kernels of the cross-entropy; see loss.py. A warp takes a row, lane j its elements j, j+32, ... in that order.
#include "elementary.cuh"
#include "sums.cuh"

extern "C" __global__ void k_loss_fwd(const float *logits, const int *targets, int rows, int width, float *losses,
                                      float *maxima, float *sums) {
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = lane_of_thread();
    if (row >= rows) return;
    logits += (int64)row * width;
    float m = logits[0];
    for (int v = lane; v < width; v += WARP) m = logits[v] > m ? logits[v] : m;
    m = warp_max(m);
    float sum = 0.0f;
    for (int v = lane; v < width; v += WARP) sum = sum + exp32(logits[v] - m);
    float total = lanes_total(sum);
    if (lane == 0) {
        maxima[row] = m;
        sums[row] = total;
        losses[row] = log32(total) - (logits[targets[row]] - m);
    }
}

// The logits become their gradient; scale = fp32(1 / tokens in the whole batch). gridDim.y pieces of the vocabulary.
extern "C" __global__ void k_loss_bwd(float *logits, const int *targets, int width, const float *maxima,
                                      const float *sums, float scale) {
    int64 row = blockIdx.x;
    int v = blockIdx.y * blockDim.x + threadIdx.x;
    if (v >= width) return;
    float p = exp32(logits[row * width + v] - maxima[row]) / sums[row];
    if (v == targets[row]) p = p - 1.0f;
    logits[row * width + v] = p * scale;
}

// total += sum of rint(loss * 2**30); the flag is set where a loss is not finite or above 2**20.
extern "C" __global__ void k_loss_total(const float *losses, int rows, uint64 *total, int *flag) {
    __shared__ uint64 scratch[32];
    uint64 sum = 0;
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < rows; t += gridDim.x * blockDim.x) {
        float loss = losses[t];
        if (magnitude_bits(loss) >= INFINITY_BITS || loss > 1048576.0f)
            *flag = 1;
        else
            sum += (uint64)__double2ll_rn((double)loss * 1073741824.0);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) atomicAdd(total, sum);
}
