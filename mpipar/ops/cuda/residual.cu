// The end of a residual branch: y (rows, columns) += bias (columns) + residual (rows, columns).
//
// A warp takes a row. Bytes per element of s bytes: 3s, where separate bias and residual move 5s. 2
// FLOPs, less than 1 FLOP/byte: memory-bound.
#include "rows.cuh"

template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
bias_residual_forward(int rows, int columns, const T *bias, const T *residual, T *y) {
    int row = row_of_warp();
    if (row >= rows) return;
    residual += size_t(row) * columns;
    y += size_t(row) * columns;
    for_each_of_warp<WIDE<T>>(fits<WIDE<T>>(columns, bias, residual, y), columns, [&](auto at) {
        auto branch = load(y, at), b = load(bias, at), around = load(residual, at);
        store(y, at, [&](int i) { return branch[i] + b[i] + around[i]; });
    });
}
