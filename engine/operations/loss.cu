// Kernels of the cross-entropy; see loss.py. A warp takes a row, lane j its elements j, j+32, ... in that order.
#include "elementary.cuh"
#include "logits.cuh"
#include "sums.cuh"

// others [rows] (or null) = the largest logit but for the target's.
extern "C" __global__ void k_loss_fwd(const float *logits, const int *targets, int rows, int width, float *losses,
                                      float *maxima, float *others, float *sums) {
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = lane_of_thread();
    if (row >= rows) return;
    logits += (int64)row * width;
    float m = logits[0], other = -infinity();
    int target = targets[row];
    for (int v = lane; v < width; v += WARP) {
        float logit = logits[v];
        m = logit > m ? logit : m;
        other = logit > other && v != target ? logit : other;
    }
    m = warp_max(m);
    if (others) other = warp_max(other);
    float sum = 0.0f;
    for (int v = lane; v < width; v += WARP) sum = sum + exp32(logits[v] - m);
    float total = lanes_total(sum);
    if (lane == 0) {
        maxima[row] = m;
        if (others) others[row] = other;
        sums[row] = total;
        losses[row] = log32(total) - (logits[target] - m);
    }
}

// The logits become their gradient; scale = fp32(1 / tokens in the whole batch). A block takes a row.
extern "C" __global__ void k_loss_bwd(float *logits, const int *targets, int width, const float *maxima,
                                      const float *sums, float scale) {
    int64 row = blockIdx.x;
    float m = maxima[row], sum = sums[row];
    int target = targets[row];
    logits += row * width;
    if (width % 4 == 0) {
        for (int v = 4 * threadIdx.x; v < width; v += 4 * blockDim.x) {
            float4 l = *(float4 *)(logits + v);
            l.x = logit_gradient(l.x, m, sum, scale, v == target);
            l.y = logit_gradient(l.y, m, sum, scale, v + 1 == target);
            l.z = logit_gradient(l.z, m, sum, scale, v + 2 == target);
            l.w = logit_gradient(l.w, m, sum, scale, v + 3 == target);
            *(float4 *)(logits + v) = l;
        }
    } else
        for (int v = threadIdx.x; v < width; v += blockDim.x)
            logits[v] = logit_gradient(logits[v], m, sum, scale, v == target);
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
