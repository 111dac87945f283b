// Runs CUDA kernels on a CPU, one block at a time: every thread of a block is a coroutine that stops where threads wait
// for each other. Only what the kernels under test use. Slow, and as exact as the host's fp32.
#pragma once
#include <setjmp.h>
#include <ucontext.h>
#if FLUSH
#include <xmmintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x, y, z;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct int2 {
    int x, y;
};
struct uint2 {
    unsigned x, y;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 700
using std::max;
using std::min;

static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
const size_t STACK = 64 * 1024;
// A coroutine that runs one thread after another, block after block; only its first start goes through ucontext.
struct Thread {
    ucontext_t context;
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    dim3 index;
    int waits = 0; // 0: runs, 1: for its warp, 2: for its block
    bool started = false, done = false;
};
static std::vector<std::unique_ptr<Thread>> pool;
static std::vector<Thread *> threads; // of this block
static jmp_buf scheduler;
static size_t current;
static uint64_t slots[1024]; // what each thread shows the others
static std::function<void()> body;

static void yield() {
    if (!_setjmp(threads[current]->place)) _longjmp(scheduler, 1);
}

static void enter() {
    for (;;) {
        body();
        threads[current]->done = true;
        yield();
    }
}

static void wait(int what) {
    threads[current]->waits = what;
    yield();
}

static void run(size_t n) {
    Thread &t = *threads[n];
    current = n;
    threadIdx = t.index;
    if (_setjmp(scheduler)) return;
    if (t.started) _longjmp(t.place, 1);
    t.started = true;
    setcontext(&t.context);
}

// Lets go on those that all of their group wait with. Threads that have ended are waited for by nobody.
static void release() {
    for (size_t first = 0; first < threads.size(); first += 32) {
        size_t last = min(first + 32, threads.size());
        bool all = true;
        for (size_t n = first; n < last; n++) all = all && (threads[n]->done || threads[n]->waits == 1);
        if (all)
            for (size_t n = first; n < last; n++)
                if (threads[n]->waits == 1) threads[n]->waits = 0;
    }
    bool all = true;
    for (Thread *t : threads) all = all && (t->done || t->waits == 2);
    if (all)
        for (Thread *t : threads) t->waits = 0;
}

static void run_block() {
    unsigned count = blockDim.x * blockDim.y * blockDim.z;
    while (pool.size() < count) {
        pool.emplace_back(new Thread);
        Thread &t = *pool.back();
        t.stack.reset(new char[STACK]);
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.get();
        t.context.uc_stack.ss_size = STACK;
        t.context.uc_link = nullptr;
        makecontext(&t.context, enter, 0);
    }
    threads.resize(count);
    for (unsigned n = 0; n < count; n++) {
        threads[n] = pool[n].get();
        threads[n]->index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / (blockDim.x * blockDim.y)};
        threads[n]->waits = 0;
        threads[n]->done = false;
    }
    for (bool running = true; running;) {
        running = false;
        for (size_t n = 0; n < count; n++)
            if (!threads[n]->done && !threads[n]->waits) run(n);
        release();
        for (Thread *t : threads) running = running || !t->done;
    }
}

template <typename... A, size_t... I> void launch(void (*kernel)(A...), void **values, std::index_sequence<I...>) {
    body = [=] { kernel(*(std::remove_reference_t<A> *)values[I]...); };
    for (unsigned z = 0; z < gridDim.z; z++)
        for (unsigned y = 0; y < gridDim.y; y++)
            for (unsigned x = 0; x < gridDim.x; x++) {
                blockIdx = {x, y, z};
                run_block();
            }
}

template <typename... A> void launch(void (*kernel)(A...), void **values) {
#if FLUSH // numbers below 2**-126 become zeros, as in the tier prod on a card; of x86-64 alone
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 0x40); // of results, and of operands
    launch(kernel, values, std::index_sequence_for<A...>());
    _mm_setcsr(before);
#else
    launch(kernel, values, std::index_sequence_for<A...>());
#endif
}

static inline size_t lane() { return current % 32; }
static inline size_t warp() { return current / 32 * 32; }

template <typename T> T of_lane(T x, size_t source) {
    uint64_t word = 0;
    memcpy(&word, &x, sizeof(T));
    size_t me = current;
    slots[me] = word;
    wait(1);
    word = slots[me / 32 * 32 + source];
    wait(1);
    T result;
    memcpy(&result, &word, sizeof(T));
    return result;
}
} // namespace emulated

static inline void __syncthreads() { emulated::wait(2); }
static inline int __syncthreads_or(int x) {
    static int any;
    if (emulated::current == 0) any = 0;
    emulated::wait(2);
    any |= x != 0;
    emulated::wait(2);
    int result = any;
    emulated::wait(2);
    return result;
}
template <typename T> T __shfl_xor_sync(unsigned, T x, int apart) { return emulated::of_lane(x, emulated::lane() ^ apart); }
template <typename T> T __shfl_down_sync(unsigned, T x, int apart) {
    size_t source = emulated::lane() + apart;
    return emulated::of_lane(x, source < 32 ? source : emulated::lane());
}
template <typename T> T __shfl_sync(unsigned, T x, int lane) { return emulated::of_lane(x, (size_t)lane); }
static inline unsigned __ballot_sync(unsigned, bool vote) {
    unsigned votes = 0;
    for (size_t n = 0; n < 32; n++) votes |= (unsigned)emulated::of_lane((int)vote, n) << n;
    return votes;
}

static inline int __float_as_int(float x) { return *(int *)&x; }
static inline float __int_as_float(int x) { return *(float *)&x; }
static inline int __double2hiint(double x) { return (int)(*(uint64_t *)&x >> 32); }
static inline double __hiloint2double(int high, int low) {
    uint64_t word = ((uint64_t)(uint32_t)high << 32) | (uint32_t)low;
    return *(double *)&word;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline long long __double2ll_rn(double x) { return (long long)rint(x); }
static inline float4 __ldcs(const float4 *p) { return *p; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
#define __expf expf
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline unsigned long long atomicAdd(unsigned long long *place, unsigned long long x) {
    unsigned long long before = *place;
    *place += x;
    return before;
}

// 16-bit floats, rounded to nearest even.
static inline float float_of_half(uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                                     : ldexpf((float)fraction, -24);
    return h >> 15 ? -magnitude : magnitude;
}
static inline uint16_t half_of_float(float x) {
    uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    float magnitude = fabsf(x);
    if (std::isnan(x)) return 0x7fff;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    int exponent = magnitude < 0x1p-14f ? -14 : ilogbf(magnitude);
    // In units of the last place; a carry goes on into the exponent.
    int units = (int)rintf(ldexpf(magnitude, 10 - exponent));
    return sign | (uint16_t)(((exponent + 14) << 10) + units);
}
static inline uint16_t bfloat_of_float(float x) {
    uint32_t word = (uint32_t)__float_as_int(x);
    if ((word & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}
