// What kernels share that give a block of threads one row, or a thread one element of many.
#pragma once

#include "common.cuh"

// The elements that belong to this thread when all threads of the grid share `count` of them.
template <typename Use> __device__ inline void for_each_element(long long count, Use use) {
    long long step = (long long)(gridDim.x) * blockDim.x;
    for (long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        use(i);
}

// The largest value over a block of Threads threads (one-dimensional), in every thread. Two
// barriers, like block_sum; a NaN is not seen.
template <int Threads> __device__ inline float block_max(float x) {
    static_assert(Threads % 32 == 0 && Threads <= 1024, "whole warps, at most 32 of them");
    __shared__ float largest[Threads / 32];
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = x;
    __syncthreads();
    float top = largest[0];
    for (int i = 1; i < Threads / 32; ++i) top = fmaxf(top, largest[i]);
    return top;
}
