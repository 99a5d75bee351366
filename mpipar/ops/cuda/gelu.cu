// GELU, tanh form: y = 0.5 x (1 + tanh(u)), u = A x + B x^3 (arXiv 1606.08415), alone and with the
// bias before it; and its gradient.
//
// A thread's elements are as far apart as the grid has threads; neighbours take neighbours.
// Bytes per element of s bytes: gelu_forward 2s (read x, write y), gelu_backward 3s,
// bias_gelu_forward 3s where bias and GELU apart move 4s. About 20 FLOPs each: 2 to 3 FLOP/byte in
// float32, 3 to 5 in 16 bits, so memory decides.
#include "rows.cuh"

constexpr float GELU_A = 0.7978845608028654f;   // sqrt(2 / pi)
constexpr float GELU_B = 0.03567740813630014f;  // 0.044715 A

__device__ inline float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(x * (GELU_A + GELU_B * x * x)));
}

// With t = tanh(u): 0.5 (1 + t) + 0.5 x (1 - t^2) u'.
__device__ inline float gelu_slope(float x) {
    float square = x * x, t = tanhf(x * (GELU_A + GELU_B * square));
    return 0.5f * ((1.0f + t) + x * (1.0f - t * t) * (GELU_A + 3.0f * GELU_B * square));
}

template <typename T> __global__ void gelu_forward(long long count, const T *x, T *y) {
    for_each_element(count, [&](long long i) { y[i] = from_float<T>(gelu(to_float(x[i]))); });
}

// x (rows, columns) += bias (columns), rounded; y = GELU of that. The gradient needs the new x.
template <typename T>
__global__ void bias_gelu_forward(long long count, int columns, const T *bias, T *x, T *y) {
    for_each_element(count, [&](long long i) {
        T sum = from_float<T>(to_float(x[i]) + to_float(bias[i % columns]));
        x[i] = sum;
        y[i] = from_float<T>(gelu(to_float(sum)));
    });
}

// dx = dy GELU'(x). The bias has the sum of dx over the rows: columns.cu.
template <typename T>
__global__ void gelu_backward(long long count, const T *dy, const T *x, T *dx) {
    for_each_element(count, [&](long long i) {
        dx[i] = from_float<T>(to_float(dy[i]) * gelu_slope(to_float(x[i])));
    });
}
