// Sums over the rows of a matrix (rows, columns): the gradient of a bias.
//
// Every element is read once: s bytes and 1 FLOP per element, and 8 / (rows per slab) bytes of
// partial sums.
#include "columns.cuh"

// out (columns) += the sum over the rows of x (rows, columns). Grid, block, partial, done:
// columns.cuh.
template <typename T, typename Out>
__global__ void __launch_bounds__(SLAB_THREADS)
column_sums(int rows, int columns, const T *x, float *partial, int *done, Out *out) {
    bool wide = fits<WIDE<T>>(columns, x);
    sum_slab<T, 1>(wide, rows, columns, partial, [&](int row, auto at, auto &sums) {
        auto values = load(x + size_t(row) * columns, at);
        for (int i = 0; i < values.width; ++i) sums[0][i] += values[i];
    });
    if (is_last_slab(done))
        add_slabs<T, 1>(columns, partial, [&](int, int column, float sum) {
            out[column] = from_float<Out>(to_float(out[column]) + sum);
        });
}
