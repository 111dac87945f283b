// What kernels for compute capability 9.0 share: barriers in shared memory, the bulk copy engine, and products of a
// warpgroup (128 threads) of 16-bit floats with fp32 sums.
#pragma once
#include "shared.cuh"

struct __align__(64) TensorMap {
    uint64 words[16];
};

__device__ __forceinline__ void barrier_init(uint32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Threads whose `acts` is 0 do nothing. No branch: between products of a warpgroup there must be no divergent ones.
__device__ __forceinline__ void barrier_expect(uint32 barrier, int bytes, int acts = 1) {
    asm volatile("{\n.reg .pred acts;\nsetp.ne.b32 acts, %2, 0;\n"
                 "@acts mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier), "r"(bytes), "r"(acts)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier, int acts = 1) {
    asm volatile("{\n.reg .pred acts;\nsetp.ne.b32 acts, %1, 0;\n"
                 "@acts mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier), "r"(acts) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier), "r"(parity) : "memory");
}

// A box of a tensor to shared memory; what is outside of the tensor becomes zeros.
__device__ __forceinline__ void copy_box(uint32 to, const TensorMap *map, int x, int y, int z, int w, uint32 barrier, int acts = 1) {
    asm volatile("{\n.reg .pred acts;\nsetp.ne.b32 acts, %7, 0;\n"
                 "@acts cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];\n}" ::
                     "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "r"(acts) : "memory");
}

// The same to the same place in shared memory of all blocks of the cluster in `blocks` (a bit for each rank), each of
// which has it counted by its own barrier at the same place.
__device__ __forceinline__ void copy_box_to(uint32 to, const TensorMap *map, int x, int y, int z, int w, uint32 barrier, uint16 blocks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::
                     "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(blocks) : "memory");
}

// A box from shared memory to a tensor; what is outside of the tensor is not written. One of the thread's stores.
__device__ __forceinline__ void store_box(const TensorMap *map, int x, int y, int z, int w, uint32 from) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(x),
                 "r"(y), "r"(z), "r"(w), "r"(from) : "memory");
}

// Wait until all stores of this thread have read shared memory.
__device__ __forceinline__ void stores_read() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// This block's number in its cluster.
__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Address, in the cluster's shared memory, of what stands at `address` of this block's in the block `rank`.
__device__ __forceinline__ uint32 address_in(uint32 address, uint32 rank) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Arrive at a barrier of another block, by its address in the cluster.
__device__ __forceinline__ void barrier_arrive_there(uint32 barrier, int acts = 1) {
    asm volatile("{\n.reg .pred acts;\nsetp.ne.b32 acts, %1, 0;\n"
                 "@acts mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(barrier), "r"(acts) : "memory");
}

// All threads of all blocks of the cluster are here, and see what any of them has written.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Bytes in a row to shared memory; addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bytes(uint32 to, const void *from, int bytes, uint32 barrier, int acts = 1) {
    asm volatile("{\n.reg .pred acts;\nsetp.ne.b32 acts, %4, 0;\n"
                 "@acts cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "r"(acts) : "memory");
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING committed groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
