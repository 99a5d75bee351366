// GEMM, rung 5: between the block's tile and the thread's there is the warp's, WM x WN.
//
// The 32 lanes of a warp are arranged as 8 x 4 over its tile, so that one step along k reads WM +
// WN different values of shared memory for WM * WN multiplications: fewer than 32 threads in one or
// two long rows would read. There are two tiles of each operand, so that a step needs one barrier:
// while some warps wait for global memory, others still multiply. Global traffic is that of rung 4.
#include "ladder.cuh"

// Grid (ceil(M / BM), ceil(N / BN)), block (32 * BM / WM * BN / WN).
template <bool TransA, bool TransB, int BM, int BN, int BK, int WM, int WN>
__global__ void __launch_bounds__(32 * (BM / WM) * (BN / WN))
gemm_warp(int M, int N, int K, const float *A, int lda, const float *B, int ldb, float beta,
          float *C, int ldc) {
    constexpr int THREADS = 32 * (BM / WM) * (BN / WN);
    static_assert(BM % WM == 0 && BN % WN == 0, "the warps' tiles make up the block's");
    static_assert(WM % 32 == 0 && WN % 16 == 0, "8 x 4 lanes, each with whole quads");
    static_assert(THREADS <= 1024, "at most 1024 threads");
    constexpr int TM = WM / 8, TN = WN / 4;
    __shared__ __align__(16) float a[2][BK][BM + 4], b[2][BK][BN + 4];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row = warp / (BN / WN) * WM + lane / 4 * 4, column = warp % (BN / WN) * WN + lane % 4 * 4;
    int first_row = blockIdx.x * BM, first_column = blockIdx.y * BN;
    auto load = [&](int slot, int k0) {
        load_tile_by_4<THREADS, !TransA, BK, BM>(a[slot], A, lda, first_row, k0, M, K,
                                                 threadIdx.x);
        load_tile_by_4<THREADS, TransB, BK, BN>(b[slot], B, ldb, first_column, k0, N, K,
                                                threadIdx.x);
    };
    float sum[TM][TN] = {};
    load(0, 0);
    for (int k0 = 0, slot = 0; k0 < K; k0 += BK, slot ^= 1) {
        __syncthreads();  // this slot is written, and the other one is no longer read
        if (k0 + BK < K) load(slot ^ 1, k0 + BK);
        for (int k = 0; k < BK; ++k) {
            __align__(16) float left[TM], right[TN];
            for (int i = 0; i < TM / 4; ++i) copy_4(left + 4 * i, &a[slot][k][row + i * 32]);
            for (int j = 0; j < TN / 4; ++j) copy_4(right + 4 * j, &b[slot][k][column + j * 16]);
            for (int i = 0; i < TM; ++i)
                for (int j = 0; j < TN; ++j) sum[i][j] += left[i] * right[j];
        }
    }
    for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j)
            store(C, ldc, first_row + row + i / 4 * 32 + i % 4,
                  first_column + column + j / 4 * 16 + j % 4, M, N, sum[i][j], beta);
}
