// LayerNorm y = (x - mean) rstd w + b and RMSNorm y = x rstd w over the rows of x (rows, columns),
// rstd = 1 / sqrt(variance + eps) or 1 / sqrt(mean of squares + eps); and their gradients.
//
// A block takes a row, in three passes (LayerNorm) or two. The passes after the first find the row
// in the L1 or L2 cache, and so does the sum for db, which reads dy again. From global memory, per
// element of s bytes: forward 2s and about 8 FLOPs, backward_input 3s and 14, slabs 2s and 6. That
// is 1 to 3 FLOP/byte, so memory decides. Statistics are float32.
#include "columns.cuh"
#include "rows.cuh"

// The sum of value(column) over a row, in every thread.
template <int Threads, typename Value>
__device__ inline float row_sum(int columns, Value value) {
    float sum = 0.0f;
    for (int j = threadIdx.x; j < columns; j += Threads) sum += value(j);
    return block_sum<Threads>(sum);
}

template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
layernorm_forward(int columns, const T *x, const T *w, const T *b, float eps, T *y, float *mean,
                  float *rstd) {
    size_t row = blockIdx.x;
    x += row * columns;
    y += row * columns;
    float mu = row_sum<Threads>(columns, [&](int j) { return to_float(x[j]); }) / columns;
    float square = row_sum<Threads>(columns, [&](int j) {
        return (to_float(x[j]) - mu) * (to_float(x[j]) - mu);
    });
    float scale = 1.0f / sqrtf(square / columns + eps);
    for (int j = threadIdx.x; j < columns; j += Threads)
        y[j] = from_float<T>((to_float(x[j]) - mu) * scale * to_float(w[j]) + to_float(b[j]));
    if (threadIdx.x > 0) return;
    mean[row] = mu;
    rstd[row] = scale;
}

template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
rmsnorm_forward(int columns, const T *x, const T *w, float eps, T *y, float *rstd) {
    size_t row = blockIdx.x;
    x += row * columns;
    y += row * columns;
    float square = row_sum<Threads>(columns, [&](int j) {
        return to_float(x[j]) * to_float(x[j]);
    });
    float scale = 1.0f / sqrtf(square / columns + eps);
    for (int j = threadIdx.x; j < columns; j += Threads)
        y[j] = from_float<T>(to_float(x[j]) * scale * to_float(w[j]));
    if (threadIdx.x == 0) rstd[row] = scale;
}

// dx = scale (g - mean(g) - xhat mean(g xhat)) with g = dy w, xhat = (x - mu) scale; RMSNorm does
// not centre: mu = 0, and mean(g) has no part in dx.
template <int Threads, bool Centered, typename T>
__device__ inline void backward_row(int columns, const T *dy, const T *x, const T *w, float mu,
                                    float scale, T *dx) {
    auto g = [&](int j) { return to_float(dy[j]) * to_float(w[j]); };
    auto xhat = [&](int j) { return (to_float(x[j]) - mu) * scale; };
    float slope = row_sum<Threads>(columns, [&](int j) { return g(j) * xhat(j); }) / columns;
    float level = Centered ? row_sum<Threads>(columns, g) / columns : 0.0f;
    for (int j = threadIdx.x; j < columns; j += Threads)
        dx[j] = from_float<T>(scale * (g(j) - level - xhat(j) * slope));
}

template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
layernorm_backward(int columns, const T *dy, const T *x, const T *w, const float *mean,
                   const float *rstd, T *dx) {
    size_t row = blockIdx.x, at = row * columns;
    backward_row<Threads, true>(columns, dy + at, x + at, w, mean[row], rstd[row], dx + at);
}

template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
rmsnorm_backward(int columns, const T *dy, const T *x, const T *w, const float *rstd, T *dx) {
    size_t row = blockIdx.x, at = row * columns;
    backward_row<Threads, false>(columns, dy + at, x + at, w, 0.0f, rstd[row], dx + at);
}

// Partial sums of dw = sum of dy xhat and db = sum of dy; add_slabs of columns.cu adds them up.
template <typename T>
__global__ void __launch_bounds__(32 * SLAB_THREADS)
layernorm_slabs(int rows, int columns, const T *dy, const T *x, const float *mean,
                const float *rstd, float *dw, float *db) {
    sum_slab(rows, columns, dw, [&](int row, int j) {
        size_t at = size_t(row) * columns + j;
        return to_float(dy[at]) * (to_float(x[at]) - mean[row]) * rstd[row];
    });
    sum_slab(rows, columns, db,
             [&](int row, int j) { return to_float(dy[size_t(row) * columns + j]); });
}

template <typename T>
__global__ void __launch_bounds__(32 * SLAB_THREADS)
rmsnorm_slabs(int rows, int columns, const T *dy, const T *x, const float *rstd, float *dw) {
    sum_slab(rows, columns, dw, [&](int row, int j) {
        size_t at = size_t(row) * columns + j;
        return to_float(dy[at]) * to_float(x[at]) * rstd[row];
    });
}
