// Shared by the rungs of the GEMM ladder: C (M, N) = op(A) op(B) + beta C, row by row in memory.
//
// op(A) is (M, K): A as it is stored, or with TransA the transpose of what is stored, (K, M). op(B)
// is (K, N), with TransB the transpose of what is stored, (N, K). lda, ldb, ldc: elements from one
// stored row to the next. Sums are float. All rungs have the same parameters.
//
// Rows of op(A) and columns of op(B) are treated in the same way. Below, "extent" is M or N.
// "KContiguous" says that neighbours along k are neighbours in memory (A as it is, or B
// transposed).
#pragma once

#include "common.cuh"

// Element (i, k) of an operand; zero outside, which adds nothing to any sum.
template <bool KContiguous, typename T>
__device__ inline T operand(const T *x, int ld, int i, int k, int extent, int K) {
    if (i >= extent || k >= K) return from_float<T>(0.0f);
    return KContiguous ? x[size_t(i) * ld + k] : x[size_t(k) * ld + i];
}

// tile[k][i] = operand (first_i + i, first_k + k), read by all threads along the memory's rows.
template <int Threads, bool KContiguous, int BK, int Extent, int Width, typename T>
__device__ inline void load_tile(float (&tile)[BK][Width], const T *x, int ld, int first_i,
                                 int first_k, int extent, int K, int thread) {
    for (int e = thread; e < Extent * BK; e += Threads) {
        int i = KContiguous ? e / BK : e % Extent;
        int k = KContiguous ? e % BK : e / Extent;
        tile[k][i] = to_float(operand<KContiguous>(x, ld, first_i + i, first_k + k, extent, K));
    }
}

// load_tile with four values per load where memory allows (16-byte addresses, away from the edges).
template <int Threads, bool KContiguous, int BK, int Extent, int Width>
__device__ inline void load_tile_by_4(float (&tile)[BK][Width], const float *x, int ld, int first_i,
                                      int first_k, int extent, int K, int thread) {
    static_assert(BK % 4 == 0 && Extent % 4 == 0 && Width % 4 == 0, "pieces of four");
    bool aligned = ld % 4 == 0 && reinterpret_cast<size_t>(x) % 16 == 0;
    for (int e = 4 * thread; e < Extent * BK; e += 4 * Threads) {
        int i = KContiguous ? e / BK : e % Extent, from_i = first_i + i;
        int k = KContiguous ? e % BK : e / Extent, from_k = first_k + k;
        bool inside = KContiguous ? from_i < extent && from_k + 4 <= K
                                  : from_i + 4 <= extent && from_k < K;
        __align__(16) float four[4];
        if (aligned && inside)
            copy_4(four, x + (KContiguous ? size_t(from_i) * ld + from_k
                                          : size_t(from_k) * ld + from_i));
        else
            for (int n = 0; n < 4; ++n)
                four[n] = operand<KContiguous>(x, ld, from_i + (KContiguous ? 0 : n),
                                               from_k + (KContiguous ? n : 0), extent, K);
        if (KContiguous)
            for (int n = 0; n < 4; ++n) tile[k + n][i] = four[n];
        else
            copy_4(&tile[k][i], four);
    }
}

// C[row][column] = sum + beta C[row][column]. beta = 0 must not read C: it may hold NaN.
template <typename Out>
__device__ inline void store(Out *C, int ldc, int row, int column, int M, int N, float sum,
                             float beta) {
    if (row >= M || column >= N) return;
    Out *c = C + size_t(row) * ldc + column;
    *c = from_float<Out>(beta == 0.0f ? sum : sum + beta * to_float(*c));
}
