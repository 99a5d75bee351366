// Causal softmax over the rows of attention's scores (matrices, queries, keys), in place, a block
// per row. It serves heads for which flash_forward.cu has no tile. Query i sees key j if
// k_pos[j] <= q_pos[i].
//
// Forward: three passes over a row, which after the first comes from a cache; 2s bytes per element
// of s bytes from global memory. Backward: 3s. Below 3 FLOP/byte: memory decides. Compare with the
// tiles of flash_forward.cu, which never write the scores at all.
#include "rows.cuh"

// scores = softmax(factor scores) over the visible keys, 0 elsewhere and where none is visible.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
causal_softmax_forward(int keys, int queries, const long long *q_pos, const long long *k_pos,
                       float factor, T *scores) {
    T *row = scores + size_t(blockIdx.x) * keys;
    long long query = q_pos[blockIdx.x % queries];
    auto score = [&](int j) {
        return k_pos[j] <= query ? factor * to_float(row[j]) : -infinity();
    };
    float top = lowest(), sum = 0.0f;
    for (int j = threadIdx.x; j < keys; j += Threads) top = fmaxf(top, score(j));
    top = block_max<Threads>(top);
    for (int j = threadIdx.x; j < keys; j += Threads) sum += expf(score(j) - top);
    sum = block_sum<Threads>(sum);
    if (sum == 0.0f) sum = 1.0f;
    for (int j = threadIdx.x; j < keys; j += Threads)
        row[j] = from_float<T>(expf(score(j) - top) / sum);
}

// dprobs = factor probs (dprobs - sum(probs dprobs)): the gradient of the scores. Hidden: 0.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
causal_softmax_backward(int keys, float factor, const T *probs, T *dprobs) {
    probs += size_t(blockIdx.x) * keys;
    dprobs += size_t(blockIdx.x) * keys;
    float sum = 0.0f;
    for (int j = threadIdx.x; j < keys; j += Threads)
        sum += to_float(probs[j]) * to_float(dprobs[j]);
    sum = block_sum<Threads>(sum);
    for (int j = threadIdx.x; j < keys; j += Threads)
        dprobs[j] = from_float<T>(factor * to_float(probs[j]) * (to_float(dprobs[j]) - sum));
}
