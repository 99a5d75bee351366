// AdamW over flat float32 buffers, in place and in one launch (Loshchilov and Hutter, arXiv
// 1711.05101).
//
//     m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//     data = decay data - rate m / (sqrt(v) root + eps)
//
// decay = 1 - lr weight_decay, rate = lr / (1 - beta1^step), root = (1 - beta2^step)^(-1/2): from
// the host, in double precision. Matrices decay, biases and norms do not: so the buffers consist of
// runs of one kind. Each row of the grid takes a run, whose line of the table has its first
// element, its end, and whether it decays.
//
// Bytes per parameter: 28 (read data, g, m, v; write data, m, v), with a copy in 16 bits 30; about
// 15 FLOPs: 0.5 FLOP/byte. Single operations move more than 100.
#include "rows.cuh"

// What one update changes; 1 - beta comes from the host, where it is exact.
struct Moments { float beta1, rest1, beta2, rest2, decay, rate, root, eps; };

__device__ inline float adamw_update(long long i, float *data, const float *grad, float *m,
                                     float *v, const Moments &by) {
    float g = grad[i];
    float first = by.beta1 * m[i] + by.rest1 * g, second = by.beta2 * v[i] + by.rest2 * (g * g);
    m[i] = first;
    v[i] = second;
    return data[i] = by.decay * data[i] - by.rate * first / (sqrtf(second) * by.root + by.eps);
}

__global__ void adamw(const long long *runs, float *data, const float *grad, float *m, float *v,
                      float beta1, float rest1, float beta2, float rest2, float decay, float rate,
                      float root, float eps) {
    const long long *run = runs + 3 * blockIdx.y;
    Moments by = {beta1, rest1, beta2, rest2, run[2] ? decay : 1.0f, rate, root, eps};
    for_each_element(run[0], run[1],
                     [&](long long i) { adamw_update(i, data, grad, m, v, by); });
}

// The same, and the new parameters rounded to a 16-bit type.
template <typename Copy>
__global__ void adamw_with_copy(const long long *runs, float *data, const float *grad, float *m,
                                float *v, float beta1, float rest1, float beta2, float rest2,
                                float decay, float rate, float root, float eps, Copy *copy) {
    const long long *run = runs + 3 * blockIdx.y;
    Moments by = {beta1, rest1, beta2, rest2, run[2] ? decay : 1.0f, rate, root, eps};
    for_each_element(run[0], run[1], [&](long long i) {
        copy[i] = from_float<Copy>(adamw_update(i, data, grad, m, v, by));
    });
}
