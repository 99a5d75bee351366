// GEMM, rung 1: one thread computes one element of C, straight from global memory.
//
// Per element of C: 2 K FLOPs, 2 K elements read. Intensity without caches: 1 FLOP per element
// read, 0.25 FLOP/byte in float32. A GPU needs 10 to 200, so only caches lift this above memory's
// speed: the threads of a warp share a row of op(A), and read neighbouring columns of op(B).
#include "gemm.cuh"

// Grid (ceil(M / 8), ceil(N / 32)), block (32, 8).
template <typename T, typename Out, bool TransA, bool TransB>
__global__ void gemm_naive(int M, int N, int K, const T *A, int lda, const T *B, int ldb,
                           float beta, Out *C, int ldc) {
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= M || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k)
        sum += to_float(operand<!TransA>(A, lda, row, k, M, K)) *
               to_float(operand<TransB>(B, ldb, column, k, N, K));
    store(C, ldc, row, column, M, N, sum, beta);
}
