// Shared by kernels in which a block of threads takes one row, or a thread takes single elements.
#pragma once

#include "common.cuh"

// The elements that belong to this thread when all threads of a row of the grid share those from
// `first` to before `end`.
template <typename Use>
__device__ inline void for_each_element(long long first, long long end, Use use) {
    long long step = (long long)(gridDim.x) * blockDim.x;
    first += (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long i = first; i < end; i += step) use(i);
}
template <typename Use> __device__ inline void for_each_element(long long count, Use use) {
    for_each_element(0, count, use);
}

// One value of a whole block of Threads threads (one-dimensional), in every thread: of_warp reduces
// each warp's values, and both combines two of these results. Two barriers: the first lets an
// earlier call's readers finish.
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

// The largest value; a NaN is not seen.
template <int Threads> __device__ inline float block_max(float x) {
    return block_fold<Threads>(x, [](float one) { return warp_max(one); },
                               [](float one, float other) { return fmaxf(one, other); });
}
