// Sums over the rows of a matrix (rows, columns), in two steps that need no atomics: the gradient
// of a bias, and the second step of every other sum over rows.
//
// column_sums reads every element once: s bytes and 1 FLOP per element, and 4 / (rows per slab)
// bytes of partial sums; add_slabs reads those again.
#include "columns.cuh"

// partial (slabs, columns) of x (rows, columns). Grid and block: columns.cuh.
template <typename T>
__global__ void __launch_bounds__(32 * SLAB_THREADS)
column_sums(int rows, int columns, const T *x, float *partial) {
    sum_slab(rows, columns, partial,
             [&](int row, int column) { return to_float(x[size_t(row) * columns + column]); });
}

// out[column] += the sum of partial[slab][column] over the slabs. A thread per column.
template <typename Out>
__global__ void add_slabs(int slabs, int columns, const float *partial, Out *out) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0.0f;
    for (int i = 0; i < slabs; ++i) sum += partial[size_t(i) * columns + column];
    out[column] = from_float<Out>(to_float(out[column]) + sum);
}
