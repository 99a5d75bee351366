// GEMM, rung 4: rung 3 with four float values per load, from global and from shared memory.
//
// The same bytes in a quarter of the instructions. A thread's TM rows are quads that are BM /
// (TM / 4) rows apart, and likewise its columns, so that the threads of a warp read neighbouring
// quads of shared memory, each bank once. Odd row lengths and edges take the slow path inside
// load_tile_by_4.
#include "ladder.cuh"

// Grid (ceil(M / BM), ceil(N / BN)), block (BM / TM * BN / TN).
template <bool TransA, bool TransB, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN))
gemm_vector(int M, int N, int K, const float *A, int lda, const float *B, int ldb, float beta,
            float *C, int ldc) {
    constexpr int THREADS = (BM / TM) * (BN / TN);
    static_assert(TM % 4 == 0 && TN % 4 == 0, "a thread computes whole quads");
    static_assert(BM % TM == 0 && BN % TN == 0, "the threads' pieces make up the block's");
    static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps, at most 1024 threads");
    __shared__ __align__(16) float a[BK][BM + 4], b[BK][BN + 4];
    int row = threadIdx.x / (BN / TN) * 4, column = threadIdx.x % (BN / TN) * 4;
    constexpr int ROW_STEP = BM / (TM / 4), COLUMN_STEP = BN / (TN / 4);
    int first_row = blockIdx.x * BM, first_column = blockIdx.y * BN;
    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        load_tile_by_4<THREADS, !TransA, BK, BM>(a, A, lda, first_row, k0, M, K, threadIdx.x);
        load_tile_by_4<THREADS, TransB, BK, BN>(b, B, ldb, first_column, k0, N, K, threadIdx.x);
        __syncthreads();
        for (int k = 0; k < BK; ++k) {
            __align__(16) float left[TM], right[TN];
            for (int i = 0; i < TM / 4; ++i) copy_4(left + 4 * i, &a[k][row + i * ROW_STEP]);
            for (int j = 0; j < TN / 4; ++j) copy_4(right + 4 * j, &b[k][column + j * COLUMN_STEP]);
            for (int i = 0; i < TM; ++i)
                for (int j = 0; j < TN; ++j) sum[i][j] += left[i] * right[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j)
            store(C, ldc, first_row + row + i / 4 * ROW_STEP + i % 4,
                  first_column + column + j / 4 * COLUMN_STEP + j % 4, M, N, sum[i][j], beta);
}
