// Shared by the rungs of the GEMM ladder that keep tiles in shared memory: how these are loaded.
#pragma once

#include "gemm.cuh"

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
