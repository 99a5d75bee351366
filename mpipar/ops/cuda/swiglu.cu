// SwiGLU y = silu(gate) up, silu(g) = g / (1 + exp(-g)), of h (rows, 2, columns), which is gate and
// up (arXiv 2002.05202); and its gradient, which makes y once more.
//
// A thread's elements are as far apart as the grid has threads; neighbours take neighbours.
// Bytes per element of y, of s bytes: swiglu_forward 3s (read gate and up, write y),
// swiglu_backward 6s (read dy, gate and up, write both gradients and y). About 5 and 15 FLOPs, 0.5
// FLOP/byte in float32, 1 in 16 bits, so memory decides.
#include "rows.cuh"

__device__ inline float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T>
__global__ void swiglu_forward(long long count, int columns, const T *h, T *y) {
    for_each_element(count, [&](long long i) {
        long long at = i / columns * 2 * columns + i % columns;
        float gate = to_float(h[at]), up = to_float(h[at + columns]);
        y[i] = from_float<T>(gate * logistic(gate) * up);
    });
}

// With s = 1 / (1 + exp(-gate)): silu' = s + silu (1 - s).
template <typename T>
__global__ void swiglu_backward(long long count, int columns, const T *dy, const T *h, T *dh,
                                T *y) {
    for_each_element(count, [&](long long i) {
        long long at = i / columns * 2 * columns + i % columns;
        float gate = to_float(h[at]), up = to_float(h[at + columns]), d = to_float(dy[i]);
        float s = logistic(gate), silu = gate * s;
        dh[at] = from_float<T>(d * up * (s + silu * (1.0f - s)));
        dh[at + columns] = from_float<T>(d * silu);
        y[i] = from_float<T>(silu * up);
    });
}
