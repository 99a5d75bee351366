// Small kernels that do one thing each, for test_cuda_shim.py.
#include "rows.cuh"
#include "mma.cuh"

// Reverses each block's piece of x through shared memory.
template <int Threads> __global__ void reverse(float *x) {
    __shared__ float piece[Threads];
    int i = threadIdx.x;
    piece[i] = x[blockIdx.x * Threads + i];
    __syncthreads();
    x[blockIdx.x * Threads + i] = piece[Threads - 1 - i];
}

// What shared memory holds at the start: anything.
template <int Threads> __global__ void unwritten(float *fixed, float *dynamic) {
    __shared__ float piece[Threads];
    float *other = static_cast<float *>(dynamic_shared());
    fixed[threadIdx.x] = piece[threadIdx.x];
    dynamic[threadIdx.x] = other[threadIdx.x];
    __syncthreads();
    piece[threadIdx.x] = other[threadIdx.x] = 1.0f;
}

template <int Threads> __global__ void half_waits(float *x) {
    if (threadIdx.x < Threads / 2) __syncthreads();
    x[threadIdx.x] = 1.0f;
}

template <int Threads> __global__ void sums(const float *x, float *block, float *warp, float *top) {
    int i = blockIdx.x * Threads + threadIdx.x;
    float once = block_sum<Threads>(x[i]);  // some threads read it while others begin anew
    block[i] = block_sum<Threads>(once) / Threads;
    warp[i] = warp_sum(x[i]);
    top[i] = warp_max(x[i]);
}

// D (16, 8) = A (16, 16) B (16, 8), by one warp; A and B row by row.
template <typename T> __global__ void one_mma(const T *A, const T *B, float *D) {
    __shared__ __align__(16) T a[16][16], b[16][8];
    int lane = threadIdx.x;
    start_copy_16(&a[lane / 2][lane % 2 * 8], A + lane * 8, true);
    start_copy_16(&b[lane % 16][0], B + lane % 16 * 8, true);
    close_copies();
    wait_copies<0>();
    __syncwarp();
    unsigned left[4], right[4];
    load_matrices<false>(left, &a[lane % 16][lane / 16 * 8]);
    load_matrices<true>(right, &b[lane % 16][0]);
    float d[4] = {};
    unsigned column[2] = {right[0], right[1]};
    mma_16x8x16<T>(d, left, column);
    for (int i = 0; i < 4; ++i) D[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
