// Shared by the kernels of a product: C (M, N) = op(A) op(B) + beta C, row by row in memory.
//
// op(A) is (M, K): A as it is stored, or with TransA the transpose of what is stored, (K, M). op(B)
// is (K, N), with TransB the transpose of what is stored, (N, K). lda, ldb, ldc: elements from one
// stored row to the next. Sums are float. All of them have the same parameters.
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

// C[row][column] = sum + beta C[row][column]. beta = 0 must not read C: it may hold NaN.
template <typename Out>
__device__ inline void store(Out *C, int ldc, int row, int column, int M, int N, float sum,
                             float beta) {
    if (row >= M || column >= N) return;
    Out *c = C + size_t(row) * ldc + column;
    *c = from_float<Out>(beta == 0.0f ? sum : sum + beta * to_float(*c));
}
