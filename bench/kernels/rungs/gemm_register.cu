// GEMM, rung 3: a thread computes TM x TN elements of C, so that what it reads from shared memory
// is used several times from registers: TM + TN reads for TM * TN multiplications.
//
// Global traffic of a block's step: (BM + BN) BK elements per 2 BM BN BK FLOPs: at 64 x 64 this is
// 16 FLOP/byte in float32. Shared memory: 4 bytes per FLOP on rung 2, 0.5 at TM = TN = 8.
#include "ladder.cuh"

// Grid (ceil(M / BM), ceil(N / BN)), block (BM / TM * BN / TN).
template <typename T, typename Out, bool TransA, bool TransB, int BM, int BN, int BK, int TM,
          int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN))
gemm_register(int M, int N, int K, const T *A, int lda, const T *B, int ldb, float beta, Out *C,
              int ldc) {
    constexpr int THREADS = (BM / TM) * (BN / TN);
    static_assert(BM % TM == 0 && BN % TN == 0, "the threads' pieces make up the block's");
    static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps, at most 1024 threads");
    __shared__ float a[BK][BM + 4], b[BK][BN + 4];
    int row = threadIdx.x / (BN / TN) * TM, column = threadIdx.x % (BN / TN) * TN;
    int first_row = blockIdx.x * BM, first_column = blockIdx.y * BN;
    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        load_tile<THREADS, !TransA, BK, BM>(a, A, lda, first_row, k0, M, K, threadIdx.x);
        load_tile<THREADS, TransB, BK, BN>(b, B, ldb, first_column, k0, N, K, threadIdx.x);
        __syncthreads();
        for (int k = 0; k < BK; ++k) {
            float left[TM], right[TN];
            for (int i = 0; i < TM; ++i) left[i] = a[k][row + i];
            for (int j = 0; j < TN; ++j) right[j] = b[k][column + j];
            for (int i = 0; i < TM; ++i)
                for (int j = 0; j < TN; ++j) sum[i][j] += left[i] * right[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j)
            store(C, ldc, first_row + row + i, first_column + column + j, M, N, sum[i][j], beta);
}
