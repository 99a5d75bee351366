// AdamW over flat float32 buffers, in place and in one launch (Loshchilov and Hutter, arXiv
// 1711.05101).
//
//     m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//     data = decay data - rate m / (sqrt(v) root + eps)
//
// decay = 1 - lr weight_decay, rate = lr / (1 - beta1^step), root = (1 - beta2^step)^(-1/2): from
// the host, in double precision. Matrices decay, biases and norms do not, so the buffers consist of
// runs of one kind. Each row of the grid takes a run, whose line in the table has its first
// element, its end, and whether it decays.
//
// Bytes per parameter: 28 (read data, g, m, v; write data, m, v), 30 with a 16-bit copy; about 15
// FLOPs: 0.5 FLOP/byte. Separate operations move more than 100 bytes.
#include "rows.cuh"

// The constants of one update; 1 - beta comes from the host, where it is exact.
struct Moments { float beta1, rest1, beta2, rest2, decay, rate, root, eps; };

template <int Width, typename Index>
__device__ inline Pack<Width> update(At<Width, Index> at, float *data, const float *grad, float *m,
                                     float *v, const Moments &by) {
    auto g = load(grad, at), old = load(data, at), old_m = load(m, at), old_v = load(v, at);
    auto first = store(m, at, [&](int i) { return by.beta1 * old_m[i] + by.rest1 * g[i]; });
    auto second = store(v, at, [&](int i) {
        return by.beta2 * old_v[i] + by.rest2 * (g[i] * g[i]);
    });
    return store(data, at, [&](int i) {
        return by.decay * old[i] - by.rate * first[i] / (sqrtf(second[i]) * by.root + by.eps);
    });
}

// A run of the buffers; `copies` receive the new parameters, rounded to their type.
template <typename... Copy>
__device__ inline void update_run(const long long *run, float *data, const float *grad, float *m,
                                  float *v, Moments by, Copy *...copies) {
    long long first = run[0], count = run[1] - first;
    if (!run[2]) by.decay = 1.0f;
    data += first, grad += first, m += first, v += first;
    bool wide = fits<WIDE<float>>(count, data, grad, m, v, copies + first...);
    for_each_of_grid<WIDE<float>>(wide, count, [&](auto at) {
        [[maybe_unused]] auto now = update(at, data, grad, m, v, by);
        (store(copies + first, at, [&](int i) { return now[i]; }), ...);
    });
}

__global__ void adamw(const long long *runs, float *data, const float *grad, float *m, float *v,
                      float beta1, float rest1, float beta2, float rest2, float decay, float rate,
                      float root, float eps) {
    update_run(runs + 3 * blockIdx.y, data, grad, m, v,
               {beta1, rest1, beta2, rest2, decay, rate, root, eps});
}

template <typename Copy>
__global__ void adamw_with_copy(const long long *runs, float *data, const float *grad, float *m,
                                float *v, float beta1, float rest1, float beta2, float rest2,
                                float decay, float rate, float root, float eps, Copy *copy) {
    update_run(runs + 3 * blockIdx.y, data, grad, m, v,
               {beta1, rest1, beta2, rest2, decay, rate, root, eps}, copy);
}
