// C (M, N) = op(A) op(B) + beta C: one thread computes one element. The first rung: no tiles.
//
// Traffic: each thread reads a row of op(A) and a column of op(B), 2 K values for 2 K FLOPs: a
// quarter of a FLOP per byte in float32, unless a cache helps. Neighbouring threads share the row
// and read neighbouring columns, so that a warp's loads of B are one contiguous piece.
#include "common.cuh"

// op(A) is (M, K): A itself, or TransA: A is stored as (K, M). op(B) is (K, N), likewise. lda, ldb,
// ldc: elements from one stored row to the next.
// Grid (ceil(N / 32), ceil(M / 8)), block (32, 8).
template <typename T, typename Out, bool TransA, bool TransB>
__global__ void gemm_naive(int M, int N, int K, const T *A, int lda, const T *B, int ldb,
                           float beta, Out *C, int ldc) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) {
        T a = TransA ? A[size_t(k) * lda + row] : A[size_t(row) * lda + k];
        T b = TransB ? B[size_t(column) * ldb + k] : B[size_t(k) * ldb + column];
        sum += to_float(a) * to_float(b);
    }
    Out *c = C + size_t(row) * ldc + column;
    // beta = 0 must not read C: it may hold anything, NaN too.
    *c = from_float<Out>(beta == 0.0f ? sum : sum + beta * to_float(*c));
}
