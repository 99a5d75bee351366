// Sums over the rows of a matrix, in one launch, without atomic sums: the same bits in every run.
//
// The rows are divided into slabs, the columns into strips of 128 bytes. A block sums a strip of
// one slab and writes its sums to `partial` (sums, slabs, columns). The last block of a strip to
// finish adds up the slabs in their order, whichever block that is.
#pragma once

#include "packs.cuh"

constexpr int SLAB_THREADS = 256;
template <typename T> constexpr int STRIP = 128 / sizeof(T);  // columns of a block

// Sums over the rows from `first` to before `stop`, Sums for each of this block's columns.
// add(row, at, sums): adds to sums[Sums][Width] what the row has `at` these columns.
// use(k, column, sum): is called once for each sum, by one of the threads.
template <int Strip, int Sums, int Width, typename Add, typename Use>
__device__ inline void sum_rows(int first, int stop, int columns, Add add, Use use) {
    constexpr int LANES = Strip / Width, HEIGHT = SLAB_THREADS / LANES;
    __shared__ float all[HEIGHT][Sums][Strip];
    int begin = blockIdx.x * Strip, own = threadIdx.x % LANES * Width, height = threadIdx.x / LANES;
    float sums[Sums][Width] = {};
    if (begin + own < columns)
        for (int row = first + height; row < stop; row += HEIGHT)
            add(row, At<Width, int>{begin + own}, sums);
    __syncthreads();  // an earlier call's readers have finished
    for (int k = 0; k < Sums; ++k)
        for (int i = 0; i < Width; ++i) all[height][k][own + i] = sums[k][i];
    __syncthreads();  // all sums have been written
    for (int i = threadIdx.x; i < Sums * Strip; i += SLAB_THREADS) {
        float sum = 0.0f;
        for (int h = 0; h < HEIGHT; ++h) sum += all[h][i / Strip][i % Strip];
        if (begin + i % Strip < columns) use(i / Strip, begin + i % Strip, sum);
    }
}

// partial[k][slab][column] = sums over the rows of this block's slab of what `add` adds for them.
// wide: what `fits` says about the matrix. Grid (ceil(columns / STRIP), slabs), block
// (SLAB_THREADS).
template <typename T, int Sums, typename Add>
__device__ inline void sum_slab(bool wide, int rows, int columns, float *partial, Add add) {
    int height = ceil_div(rows, gridDim.y), first = blockIdx.y * height;
    int stop = min(first + height, rows);
    auto write = [&](int k, int column, float sum) {
        partial[(size_t(k) * gridDim.y + blockIdx.y) * columns + column] = sum;
    };
    if (wide) sum_rows<STRIP<T>, Sums, WIDE<T>>(first, stop, columns, add, write);
    else sum_rows<STRIP<T>, Sums, 1>(first, stop, columns, add, write);
}

// Whether all other blocks of these columns have written their slabs, which is true only for the
// last one. done: a 0 for each strip of columns; it is 0 again at the end.
__device__ inline bool is_last_slab(int *done) {
    __shared__ bool last;
    __threadfence();  // the slab is in memory before it counts
    __syncthreads();  // and so are those of all threads
    if (threadIdx.x == 0) {
        last = atomicAdd(done + blockIdx.x, 1) == int(gridDim.y) - 1;
        if (last) done[blockIdx.x] = 0;
    }
    __syncthreads();
    return last;
}

// Call use(k, column, sum of the slabs), in the last block of its columns.
template <typename T, int Sums, typename Use>
__device__ inline void add_slabs(int columns, const float *partial, Use use) {
    // Other blocks have written these numbers, so an older copy in this processor's cache is wrong.
    const volatile float *now = partial;
    sum_rows<STRIP<T>, Sums, 1>(0, gridDim.y, columns, [&](int slab, auto at, auto &sums) {
        for (int k = 0; k < Sums; ++k)
            sums[k][0] += now[(size_t(k) * gridDim.y + slab) * columns + at.first];
    }, use);
}
