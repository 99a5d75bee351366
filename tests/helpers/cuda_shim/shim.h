// Runs CUDA C++ kernels on a CPU: what a kernel source needs of the language, as plain C++.
//
// A block's threads are fibers of one OS thread that switch only at barriers: the first that can run
// goes on, counted from thread 0 or (order = -1) from the last. So one warp runs ahead as far as
// barriers let it, and code that lacks a barrier gives wrong results in one of the orders. Shared
// memory is filled with NaN before each block.
//
// What it cannot show: speed, memory ordering finer than barriers, and registers.
#pragma once

#include <limits.h>
#include <link.h>
#include <setjmp.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // all in one piece of memory, which is then known: see poison()

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// For the edit of a test: what it counts here, the test reads.
extern "C" __attribute__((visibility("default"))) inline long long counted = 0;

namespace shim {

constexpr int WARP = 32;
constexpr unsigned POISON = 0xff;  // four or two such bytes are a NaN in float32 and bfloat16
constexpr size_t STACK = 256 << 10;

[[noreturn]] void fail(const char *message);

class Barrier {
    int expected;
    std::vector<int> waiting;  // numbers of threads

  public:
    explicit Barrier(int expected) : expected(expected) {}
    void wait();
};

struct Copy { void *to; const void *from; bool valid; };  // of 16 bytes: cp.async

struct Thread {
    uint3 index;
    int lane, warp;
    bool started = false;
    int turn = 0;  // which slots of its warp are next
    std::vector<std::vector<Copy>> groups = std::vector<std::vector<Copy>>(1);
    jmp_buf state;
    ucontext_t first;
};

// What the lanes of a warp exchange. Two sets of slots in turn: who writes one of them has met
// everybody behind the reading of what it held before.
struct Warp {
    Barrier barrier;
    alignas(16) unsigned char slots[2][WARP][32];
    explicit Warp(int threads) : barrier(threads) {}
};

struct Block {
    uint3 index;
    Barrier barrier;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<Thread> threads;
    std::unique_ptr<void, decltype(&free)> shared{nullptr, free};
    std::vector<uint64_t> ready;  // bits of the threads that wait for nothing
    size_t done = 0;

    Block(uint3 index, dim3 size, size_t shared_bytes)
        : index(index), barrier(size.x * size.y * size.z), threads(size.x * size.y * size.z) {
        int count = int(threads.size());
        for (int i = 0; i < count; i += WARP)
            warps.push_back(std::make_unique<Warp>(std::min(WARP, count - i)));
        for (unsigned i = 0; i < threads.size(); ++i) {
            threads[i].index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
            threads[i].lane = i % WARP;
            threads[i].warp = i / WARP;
        }
        ready.resize((count + 63) / 64);
        for (int i = 0; i < count; ++i) set_ready(i);
        void *bytes = nullptr;
        if (posix_memalign(&bytes, 128, shared_bytes + 1)) abort();
        shared.reset(bytes);
        memset(bytes, POISON, shared_bytes);
    }
    void set_ready(int i) { ready[i / 64] |= uint64_t(1) << i % 64; }
    void clear_ready(int i) { ready[i / 64] &= ~(uint64_t(1) << i % 64); }
};

inline dim3 grid_size, block_size;
inline Block *block;
inline Thread *current;
inline char error[200];

inline Warp &warp() { return *block->warps[current->warp]; }

// The values of all lanes, until the next exchange but one.
template <typename T> struct Lanes {
    const unsigned char (*slots)[32];
    T operator[](int lane) const {
        T value;
        memcpy(&value, slots[lane], sizeof(T));
        return value;
    }
};

// Every thread of the warp calls this; returns what all have given.
template <typename T> Lanes<T> exchange(const T &value) {
    static_assert(sizeof(T) <= sizeof(Warp::slots[0][0]));
    auto &slots = warp().slots[current->turn ^= 1];
    memcpy(slots[current->lane], &value, sizeof(T));
    warp().barrier.wait();
    return {slots};
}

}  // namespace shim

#include "shim_launch.h"

#define threadIdx (shim::current->index)
#define blockIdx (shim::block->index)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)
constexpr int warpSize = shim::WARP;

inline void __syncthreads() { shim::block->barrier.wait(); }

inline void shim_full_mask(unsigned mask) {
    if (mask != 0xffffffffu) shim::fail("a mask that leaves out lanes");
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    shim_full_mask(mask);
    shim::warp().barrier.wait();
}
template <typename T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    shim_full_mask(mask);
    int lane = shim::current->lane;
    return shim::exchange(value)[lane / width * width + source % width];
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    int lane = shim::current->lane, other = lane ^ flip;
    return __shfl_sync(mask, value, other / width > lane / width ? lane : other);
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32) {
    int lane = shim::current->lane;
    return __shfl_sync(mask, value, lane % width + delta < width ? lane + delta : lane);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32) {
    int lane = shim::current->lane;
    return __shfl_sync(mask, value, lane % width >= delta ? lane - delta : lane);
}
inline int __any_sync(unsigned mask, int condition) {
    shim_full_mask(mask);
    auto all = shim::exchange(int(condition != 0));
    for (int i = 0; i < shim::WARP; ++i)
        if (all[i] == 1) return 1;
    return 0;
}
inline void __threadfence() {}  // blocks run one after another
template <typename T> T atomicAdd(T *at, T value) {
    return std::atomic_ref<T>(*at).fetch_add(value);
}

template <typename T> T __ldg(const T *at) { return *at; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
using std::max;
using std::min;
