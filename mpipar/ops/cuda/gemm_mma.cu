// GEMM of bf16 or half operands on tensor cores, sums in float32: the ladder's last rung.
//
// Four levels of tiles: the grid divides C into BM x BN per block; a block steps along K in steps
// of BK, whose operands wait in shared memory; a warp computes WM x WN of it; one instruction
// multiplies 16 x 16 by 16 x 8. Global traffic of a step: (BM + BN) BK values of 2 bytes per 2 BM
// BN BK FLOPs: 64 FLOP/byte at 128 x 128, apart from what the L2 cache keeps. Stages - 1 steps are
// fetched ahead in the background, so that the tensor cores need not wait for memory.
//
// Tiles have the same layout in shared memory as in global memory (16-byte pieces are copied as
// they are); load_matrices transposes them where k is not the contiguous side. Rows are 8 values
// longer than the tile, so that the 8 rows of a matrix begin in different banks.
#include "gemm.cuh"
#include "mma.cuh"

// One operand's tile: Extent rows of op(A) or columns of op(B), BK values along k.
template <typename T, int Extent, int BK, bool KContiguous> struct OperandTile {
    static constexpr int ROWS = KContiguous ? Extent : BK, COLUMNS = KContiguous ? BK : Extent;
    static constexpr int WIDTH = COLUMNS + 8, VALUES = ROWS * WIDTH;
    T *values;

    // Starts to copy the tile at (first_i, first_k), in pieces of 8 values.
    template <int Threads>
    __device__ void fetch(const T *x, int ld, int first_i, int first_k, int extent, int K) {
        bool aligned = ld % 8 == 0 && reinterpret_cast<size_t>(x) % 16 == 0;
        for (int e = 8 * threadIdx.x; e < ROWS * COLUMNS; e += 8 * Threads) {
            int row = e / COLUMNS, column = e % COLUMNS;
            int i = first_i + (KContiguous ? row : column);
            int k = first_k + (KContiguous ? column : row);
            int from_row = KContiguous ? i : k, from_column = KContiguous ? k : i;
            int rows = KContiguous ? extent : K, columns = KContiguous ? K : extent;
            T *to = values + row * WIDTH + column;
            bool outside = from_row >= rows || from_column >= columns;
            if (aligned && (outside || from_column + 8 <= columns)) {
                const T *from = x + (outside ? 0 : size_t(from_row) * ld + from_column);
                start_copy_16(to, from, !outside);
            } else {
                for (int n = 0; n < 8; ++n)
                    to[n] = operand<KContiguous>(x, ld, i + (KContiguous ? 0 : n),
                                                 k + (KContiguous ? n : 0), extent, K);
            }
        }
    }

    // Loads four 8 x 8 matrices at (i, k); the lane's own matrix is (di, dk) away.
    __device__ void load(unsigned (&r)[4], int i, int k, int di, int dk) const {
        int row = threadIdx.x % 8 + (KContiguous ? i + di : k + dk);
        int column = KContiguous ? k + dk : i + di;
        load_matrices<!KContiguous>(r, values + row * WIDTH + column);
    }
};

// Grid (ceil(M / BM), ceil(N / BN)), block (32 * BM / WM * BN / WN), dynamic shared memory: Stages
// tiles of each operand.
template <typename T, typename Out, bool TransA, bool TransB, int BM, int BN, int BK, int WM,
          int WN, int Stages>
__global__ void __launch_bounds__(32 * (BM / WM) * (BN / WN))
gemm_mma(int M, int N, int K, const T *A, int lda, const T *B, int ldb, float beta, Out *C,
         int ldc) {
    constexpr int THREADS = 32 * (BM / WM) * (BN / WN), ROWS = WM / 16, COLUMNS = WN / 8;
    static_assert(BM % WM == 0 && BN % WN == 0, "the warps' tiles make up the block's");
    static_assert(WM % 16 == 0 && WN % 16 == 0 && BK % 16 == 0, "whole instructions, B in pairs");
    static_assert(Stages >= 2 && THREADS <= 1024, "something to fetch ahead; at most 1024 threads");
    using TileA = OperandTile<T, BM, BK, !TransA>;
    using TileB = OperandTile<T, BN, BK, TransB>;
    T *shared = static_cast<T *>(dynamic_shared());
    auto tile_a = [&](int slot) { return TileA{shared + slot * TileA::VALUES}; };
    auto tile_b = [&](int slot) {
        return TileB{shared + Stages * TileA::VALUES + slot * TileB::VALUES};
    };
    int first_row = blockIdx.x * BM, first_column = blockIdx.y * BN, steps = ceil_div(K, BK);
    auto fetch = [&](int step) {
        if (step < steps) {
            tile_a(step % Stages).template fetch<THREADS>(A, lda, first_row, step * BK, M, K);
            tile_b(step % Stages).template fetch<THREADS>(B, ldb, first_column, step * BK, N, K);
        }
        close_copies();  // an empty group too: wait_copies counts groups
    };
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, upper = lane / 16, odd = lane / 8 % 2;
    int row = warp / (BN / WN) * WM, column = warp % (BN / WN) * WN;
    float sum[ROWS][COLUMNS][4] = {};
    for (int step = 0; step < Stages - 1; ++step) fetch(step);
    for (int step = 0; step < steps; ++step) {
        wait_copies<Stages - 2>();
        __syncthreads();  // this step's tiles are complete; the last step's are free for a new one
        fetch(step + Stages - 1);
        auto a = tile_a(step % Stages);
        auto b = tile_b(step % Stages);
        for (int k = 0; k < BK; k += 16) {
            unsigned left[ROWS][4], right[COLUMNS / 2][4];
            for (int i = 0; i < ROWS; ++i) a.load(left[i], row + 16 * i, k, 8 * odd, 8 * upper);
            for (int j = 0; j < COLUMNS / 2; ++j)
                b.load(right[j], column + 16 * j, k, 8 * upper, 8 * odd);
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < COLUMNS; ++j) {
                    unsigned pair[2] = {right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]};
                    mma_16x8x16<T>(sum[i][j], left[i], pair);
                }
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COLUMNS; ++j)
            for (int n = 0; n < 4; ++n)
                store(C, ldc, first_row + row + 16 * i + lane / 4 + n / 2 * 8,
                      first_column + column + 8 * j + lane % 4 * 2 + n % 2, M, N, sum[i][j][n],
                      beta);
}
