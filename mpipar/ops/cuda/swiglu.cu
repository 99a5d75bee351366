// SwiGLU y = silu(gate) up, silu(g) = g / (1 + exp(-g)), of h (rows, 2, columns), which is gate and
// up (arXiv 2002.05202); and its gradient, which recomputes y.
//
// A warp takes a row. Bytes per element of y, of s bytes: swiglu_forward 3s (read gate and up,
// write y), swiglu_backward 6s (read dy, gate and up, write both gradients and y). About 5 and 15
// FLOPs, 0.5 FLOP/byte in float32, 1 in 16 bits: memory-bound.
#include "rows.cuh"

template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
swiglu_forward(int rows, int columns, const T *h, T *y) {
    int row = row_of_warp();
    if (row >= rows) return;
    h += size_t(row) * 2 * columns;
    y += size_t(row) * columns;
    for_each_of_warp<WIDE<T>>(fits<WIDE<T>>(columns, h, y), columns, [&](auto at) {
        auto gate = load(h, at), up = load(h + columns, at);
        store(y, at, [&](int i) { return gate[i] * logistic(gate[i]) * up[i]; });
    });
}

// With s = 1 / (1 + exp(-gate)): silu' = s + silu (1 - s).
template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
swiglu_backward(int rows, int columns, const T *dy, const T *h, T *dh, T *y) {
    int row = row_of_warp();
    if (row >= rows) return;
    h += size_t(row) * 2 * columns;
    dh += size_t(row) * 2 * columns;
    dy += size_t(row) * columns;
    y += size_t(row) * columns;
    for_each_of_warp<WIDE<T>>(fits<WIDE<T>>(columns, dy, h, dh, y), columns, [&](auto at) {
        auto gate = load(h, at), up = load(h + columns, at), d = load(dy, at);
        auto s = each(at, [&](int i) { return logistic(gate[i]); });
        auto silu = each(at, [&](int i) { return gate[i] * s[i]; });
        store(dh, at, [&](int i) { return d[i] * up[i] * (s[i] + silu[i] * (1.0f - s[i])); });
        store(dh + columns, at, [&](int i) { return d[i] * silu[i]; });
        store(y, at, [&](int i) { return silu[i] * up[i]; });
    });
}
