// GELU, tanh form: y = 0.5 x (1 + tanh(u)), u = A x + B x^3 (arXiv 1606.08415); and its gradient.
// It equals x s(2u) with the logistic function s, whose small values keep their digits; 1 + tanh(u)
// would lose them.
//
// All threads share the elements. Bytes per element of s bytes: gelu_forward 2s (read x, write y),
// gelu_backward 3s. About 15 FLOPs each, that is 2 FLOP/byte in float32, 3 to 4 in 16 bits:
// memory-bound.
#include "rows.cuh"

constexpr float GELU_A = 0.7978845608028654f;   // sqrt(2 / pi)
constexpr float GELU_B = 0.03567740813630014f;  // 0.044715 A

__device__ inline float gelu_gate(float x, float square) {
    return logistic(2.0f * x * (GELU_A + GELU_B * square));
}

__device__ inline float gelu(float x) { return x * gelu_gate(x, x * x); }

// With s = s(2u): s + s (1 - s) x 2u'.
__device__ inline float gelu_slope(float x) {
    float square = x * x, s = gelu_gate(x, square);
    return s + s * (1.0f - s) * x * (2.0f * GELU_A + 6.0f * GELU_B * square);
}

template <typename T>
__global__ void __launch_bounds__(ELEMENT_THREADS)
gelu_forward(long long count, const T *x, T *y) {
    for_each_of_grid<WIDE<T>>(fits<WIDE<T>>(count, x, y), count, [&](auto at) {
        auto old = load(x, at);
        store(y, at, [&](int i) { return gelu(old[i]); });
    });
}

// dx = dy GELU'(x). The gradient of the bias is the sum of dx over the rows: columns.cu.
template <typename T>
__global__ void __launch_bounds__(ELEMENT_THREADS)
gelu_backward(long long count, const T *dy, const T *x, T *dx) {
    for_each_of_grid<WIDE<T>>(fits<WIDE<T>>(count, dy, x, dx), count, [&](auto at) {
        auto d = load(dy, at), old = load(x, at);
        store(dx, at, [&](int i) { return d[i] * gelu_slope(old[i]); });
    });
}
