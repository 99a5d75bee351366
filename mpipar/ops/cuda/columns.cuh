// Sums over the rows of a matrix without atomics: the same bits in every run.
//
// The rows are cut into slabs. A block of 32 x 8 threads sums 32 columns of one slab and writes
// them to `partial` (slabs, columns); a second kernel, add_slabs, adds the slabs up in order.
#pragma once

#include "common.cuh"

constexpr int SLAB_THREADS = 8;  // threads above each other in a column

// partial[slab][column] = sum of value(row, column) over the rows of this block's slab.
// Grid (ceil(columns / 32), slabs), block (32, SLAB_THREADS).
template <typename Value>
__device__ inline void sum_slab(int rows, int columns, float *partial, Value value) {
    __shared__ float sums[SLAB_THREADS][32];
    int column = blockIdx.x * 32 + threadIdx.x, height = ceil_div(rows, gridDim.y);
    int first = blockIdx.y * height, stop = min(first + height, rows);
    float sum = 0.0f;
    if (column < columns)
        for (int row = first + threadIdx.y; row < stop; row += SLAB_THREADS)
            sum += value(row, column);
    __syncthreads();  // an earlier call's readers have finished
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // all sums are there
    if (threadIdx.y > 0 || column >= columns) return;
    for (int i = 1; i < SLAB_THREADS; ++i) sum += sums[i][threadIdx.x];
    partial[size_t(blockIdx.y) * columns + column] = sum;
}
