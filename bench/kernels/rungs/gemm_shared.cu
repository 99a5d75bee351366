// GEMM, rung 2: a block computes a Tile x Tile piece of C, and reads its operands piece by piece
// into shared memory, from which each element is used Tile times.
//
// Global traffic: 2 Tile^2 elements per 2 Tile^3 FLOPs: Tile / 4 FLOP/byte in float32 (8 at 32).
// Every multiplication still reads two values from shared memory, which is the next limit.
#include "ladder.cuh"

// Grid (ceil(M / Tile), ceil(N / Tile)), block (Tile * Tile).
template <typename T, typename Out, bool TransA, bool TransB, int Tile>
__global__ void __launch_bounds__(Tile * Tile)
gemm_shared(int M, int N, int K, const T *A, int lda, const T *B, int ldb, float beta, Out *C,
            int ldc) {
    constexpr int THREADS = Tile * Tile;
    static_assert(THREADS % 32 == 0 && THREADS <= 1024, "one thread an element, whole warps");
    __shared__ float a[Tile][Tile + 1], b[Tile][Tile + 1];  // + 1: transposed writes hit all banks
    int row = threadIdx.x / Tile, column = threadIdx.x % Tile;
    int first_row = blockIdx.x * Tile, first_column = blockIdx.y * Tile;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += Tile) {
        load_tile<THREADS, !TransA, Tile, Tile>(a, A, lda, first_row, k0, M, K, threadIdx.x);
        load_tile<THREADS, TransB, Tile, Tile>(b, B, ldb, first_column, k0, N, K, threadIdx.x);
        __syncthreads();  // the tiles are complete
        for (int k = 0; k < Tile; ++k) sum += a[k][row] * b[k][column];
        __syncthreads();  // and no thread reads them any more
    }
    store(C, ldc, first_row + row, first_column + column, M, N, sum, beta);
}
