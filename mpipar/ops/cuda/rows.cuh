// Shared by kernels in which a warp or a block of threads takes one row, or all threads share the
// elements.
#pragma once

#include "packs.cuh"

// exp(x) in few instructions. Its error grows with |x|, like that of any product x log2(e) in
// float, so it is for x <= 0: where |x| is large, the result is small compared with others.
__device__ inline float quick_exp(float x) { return exp2f(1.4426950408889634f * x); }

// 1 / (1 + exp(-x)), exact to a few units in the last place, because SwiGLU shows its relative
// error.
__device__ inline float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

// All threads of a row of the grid share `count` elements: a block takes ELEMENT_THREADS Each at
// once. Block (ELEMENT_THREADS).
constexpr int ELEMENT_THREADS = 256;

template <int Wide, int Each = 8, typename Use>
__device__ inline void for_each_of_grid(bool wide, long long count, Use use) {
    constexpr int OF_BLOCK = ELEMENT_THREADS * Each;
    for (long long first = (long long)(blockIdx.x) * OF_BLOCK; first < count;
         first += (long long)(gridDim.x) * OF_BLOCK)
        for_each_pack<Wide>(wide, threadIdx.x, ELEMENT_THREADS, first,
                            min(first + OF_BLOCK, count), use);
}

// A warp takes a row. Grid (ceil(rows / WARPS)), block (32, WARPS).
constexpr int WARPS = 4;

__device__ inline int row_of_warp() { return blockIdx.x * WARPS + threadIdx.y; }

template <int Wide, typename Use>
__device__ inline void for_each_of_warp(bool wide, int columns, Use use) {
    for_each_pack<Wide>(wide, threadIdx.x, 32, 0, columns, use);
}

// A block takes a row. Grid (rows), block (Threads).
template <int Wide, int Threads, typename Use>
__device__ inline void for_each_of_block(bool wide, int columns, Use use) {
    for_each_pack<Wide>(wide, threadIdx.x, Threads, 0, columns, use);
}

// Returns one value of a whole block of Threads threads (one-dimensional) in every thread: of_warp
// reduces each warp's values, and both combines two of these results. There are two barriers, the
// first of which lets an earlier call's readers finish.
template <int Threads, typename OfWarp, typename Both>
__device__ inline float block_fold(float x, OfWarp of_warp, Both both) {
    static_assert(Threads % 32 == 0 && Threads <= 1024, "whole warps, at most 32 of them");
    __shared__ float parts[Threads / 32];
    x = of_warp(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float whole = parts[0];
    for (int i = 1; i < Threads / 32; ++i) whole = both(whole, parts[i]);
    return whole;
}

template <int Threads> __device__ inline float block_sum(float x) {
    return block_fold<Threads>(x, [](float one) { return warp_sum(one); },
                               [](float one, float other) { return one + other; });
}

// The largest value; NaN is ignored.
template <int Threads> __device__ inline float block_max(float x) {
    return block_fold<Threads>(x, [](float one) { return warp_max(one); },
                               [](float one, float other) { return fmaxf(one, other); });
}
