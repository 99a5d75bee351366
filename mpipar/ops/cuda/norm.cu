// LayerNorm y = (x - mean) rstd w + b and RMSNorm y = x rstd w over the rows of x (rows, columns),
// rstd = 1 / sqrt(variance + eps) or 1 / sqrt(mean of squares + eps); and their gradients.
//
// A warp takes a row, in two passes or three (LayerNorm forward). The passes after the first find
// the row in the L1 cache. From global memory, per element of s bytes: forward 2s and about 8
// FLOPs, backward_input 3s (4s with what flows around the norm) and 14, slabs 2s and 6. That is 1
// to 3 FLOP/byte: memory-bound. Statistics are float32.
#include "columns.cuh"
#include "rows.cuh"

// The sum over a row of value(at), itself a sum over what is `at` a place, in every thread of the
// row's warp. Errors grow with the number of summands that are added one after another, so packs
// are added up first.
template <int Wide, typename Value>
__device__ inline float row_sum(bool wide, int columns, Value value) {
    float total = 0.0f;
    for_each_of_warp<Wide>(wide, columns, [&](auto at) { total += value(at); });
    return warp_sum(total);
}

template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
layernorm_forward(int rows, int columns, const T *x, const T *w, const T *b, float eps, T *y,
                  float *mean, float *rstd) {
    int row = row_of_warp();
    if (row >= rows) return;
    x += size_t(row) * columns;
    y += size_t(row) * columns;
    bool wide = fits<WIDE<T>>(columns, x, w, b, y);
    // x - first is exact where all of a row is equal; its mean then has all digits.
    float first = to_float(x[0]);
    float mu = row_sum<WIDE<T>>(wide, columns, [&](auto at) {
        auto in = load(x, at);
        return sum(at, [&](int i) { return in[i] - first; });
    }) / columns;
    float square = row_sum<WIDE<T>>(wide, columns, [&](auto at) {
        auto in = load(x, at);
        return sum(at, [&](int i) { return (in[i] - first - mu) * (in[i] - first - mu); });
    });
    float scale = 1.0f / sqrtf(square / columns + eps);
    for_each_of_warp<WIDE<T>>(wide, columns, [&](auto at) {
        auto in = load(x, at), factor = load(w, at), shift = load(b, at);
        store(y, at, [&](int i) {
            return (in[i] - first - mu) * scale * factor[i] + shift[i];
        });
    });
    if (threadIdx.x > 0) return;
    mean[row] = first + mu;
    rstd[row] = scale;
}

template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
rmsnorm_forward(int rows, int columns, const T *x, const T *w, float eps, T *y, float *rstd) {
    int row = row_of_warp();
    if (row >= rows) return;
    x += size_t(row) * columns;
    y += size_t(row) * columns;
    bool wide = fits<WIDE<T>>(columns, x, w, y);
    float square = row_sum<WIDE<T>>(wide, columns, [&](auto at) {
        auto in = load(x, at);
        return sum(at, [&](int i) { return in[i] * in[i]; });
    });
    float scale = 1.0f / sqrtf(square / columns + eps);
    for_each_of_warp<WIDE<T>>(wide, columns, [&](auto at) {
        auto in = load(x, at), factor = load(w, at);
        store(y, at, [&](int i) { return in[i] * scale * factor[i]; });
    });
    if (threadIdx.x == 0) rstd[row] = scale;
}

// dx = scale (g - mean(g) - xhat mean(g xhat)), with g = dy w, xhat = (x - mu) scale; RMSNorm does
// not centre: mu = 0, and mean(g) is left out of dx. around: what is added to it, or nullptr.
template <bool Centered, typename T>
__device__ inline void backward_row(int row, int columns, const T *dy, const T *x, const T *w,
                                    float mu, float scale, const T *around, T *dx) {
    dy += size_t(row) * columns;
    x += size_t(row) * columns;
    dx += size_t(row) * columns;
    if (around) around += size_t(row) * columns;
    bool wide = fits<WIDE<T>>(columns, dy, x, w, around, dx);
    float level = 0.0f;
    float slope = row_sum<WIDE<T>>(wide, columns, [&](auto at) {
        auto d = load(dy, at), in = load(x, at), factor = load(w, at);
        if (Centered) level += sum(at, [&](int i) { return d[i] * factor[i]; });
        return sum(at, [&](int i) { return d[i] * factor[i] * ((in[i] - mu) * scale); });
    }) / columns;
    if (Centered) level = warp_sum(level) / columns;
    for_each_of_warp<WIDE<T>>(wide, columns, [&](auto at) {
        auto d = load(dy, at), in = load(x, at), factor = load(w, at);
        auto of_norm = [&](int i) {
            float xhat = (in[i] - mu) * scale;
            return scale * (d[i] * factor[i] - level - xhat * slope);
        };
        if (around) {
            auto more = load(around, at);
            store(dx, at, [&](int i) { return of_norm(i) + more[i]; });
        } else {
            store(dx, at, of_norm);
        }
    });
}

template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
layernorm_backward(int rows, int columns, const T *dy, const T *x, const T *w, const float *mean,
                   const float *rstd, const T *around, T *dx) {
    int row = row_of_warp();
    if (row < rows) backward_row<true>(row, columns, dy, x, w, mean[row], rstd[row], around, dx);
}

template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
rmsnorm_backward(int rows, int columns, const T *dy, const T *x, const T *w, const float *rstd,
                 const T *around, T *dx) {
    int row = row_of_warp();
    if (row < rows) backward_row<false>(row, columns, dy, x, w, 0.0f, rstd[row], around, dx);
}

// dw += sum of dy xhat and db += sum of dy. partial (2, slabs, columns), done: columns.cuh.
template <typename T>
__global__ void __launch_bounds__(SLAB_THREADS)
layernorm_slabs(int rows, int columns, const T *dy, const T *x, const float *mean,
                const float *rstd, float *partial, int *done, float *dw, float *db) {
    bool wide = fits<WIDE<T>>(columns, dy, x);
    sum_slab<T, 2>(wide, rows, columns, partial, [&](int row, auto at, auto &sums) {
        auto d = load(dy + size_t(row) * columns, at), in = load(x + size_t(row) * columns, at);
        float mu = mean[row], scale = rstd[row];
        for (int i = 0; i < d.width; ++i) {
            sums[0][i] += d[i] * (in[i] - mu) * scale;
            sums[1][i] += d[i];
        }
    });
    if (is_last_slab(done))
        add_slabs<T, 2>(columns, partial, [&](int k, int column, float sum) {
            (k == 0 ? dw : db)[column] += sum;
        });
}

template <typename T>
__global__ void __launch_bounds__(SLAB_THREADS)
rmsnorm_slabs(int rows, int columns, const T *dy, const T *x, const float *rstd, float *partial,
              int *done, float *dw) {
    bool wide = fits<WIDE<T>>(columns, dy, x);
    sum_slab<T, 1>(wide, rows, columns, partial, [&](int row, auto at, auto &sums) {
        auto d = load(dy + size_t(row) * columns, at), in = load(x + size_t(row) * columns, at);
        float scale = rstd[row];
        for (int i = 0; i < d.width; ++i) sums[0][i] += d[i] * in[i] * scale;
    });
    if (is_last_slab(done))
        add_slabs<T, 1>(columns, partial, [&](int, int column, float sum) {
            dw[column] += sum;
        });
}
