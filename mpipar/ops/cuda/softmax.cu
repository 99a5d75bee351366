// Causal softmax over the rows of attention's scores (matrices, queries, keys), in place, a block
// per row. It serves heads for which flash_forward.cu has no tile. Query i sees key j if k_pos[j]
// <= q_pos[i].
//
// Forward: three passes over a row, which after the first comes from a cache; 2s bytes per element
// of s bytes from global memory. Backward: 3s. Below 3 FLOP/byte: memory-bound. Compare with the
// tiles of flash_forward.cu, which never write the scores at all.
#include "rows.cuh"

// scores = softmax(factor scores) over the visible keys, 0 elsewhere and where none is visible.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
causal_softmax_forward(int keys, int queries, const long long *q_pos, const long long *k_pos,
                       float factor, T *scores) {
    T *row = scores + size_t(blockIdx.x) * keys;
    long long query = q_pos[blockIdx.x % queries];
    auto each_score = [&](auto use) {  // use(at, the scores there)
        bool wide = fits<WIDE<T>>(keys, row, k_pos);
        for_each_of_block<WIDE<T>, Threads>(wide, keys, [&](auto at) {
            auto x = load(row, at);
            auto place = fetch(k_pos, at);
            use(at, each(at, [&](int i) {
                return place.values[i] <= query ? factor * x[i] : -infinity();
            }));
        });
    };
    float top = lowest(), total = 0.0f;
    each_score([&](auto, auto x) {
        for (float one : x.values) top = fmaxf(top, one);
    });
    top = block_max<Threads>(top);
    each_score([&](auto at, auto x) {
        total += sum(at, [&](int i) { return expf(x[i] - top); });
    });
    total = block_sum<Threads>(total);
    if (total == 0.0f) total = 1.0f;
    each_score([&](auto at, auto x) {
        store(row, at, [&](int i) { return expf(x[i] - top) / total; });
    });
}

// dprobs = factor probs (dprobs - sum(probs dprobs)): the gradient of the scores. Hidden: 0.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
causal_softmax_backward(int keys, float factor, const T *probs, T *dprobs) {
    probs += size_t(blockIdx.x) * keys;
    dprobs += size_t(blockIdx.x) * keys;
    bool wide = fits<WIDE<T>>(keys, probs, dprobs);
    float total = 0.0f;
    for_each_of_block<WIDE<T>, Threads>(wide, keys, [&](auto at) {
        auto p = load(probs, at), dp = load(dprobs, at);
        total += sum(at, [&](int i) { return p[i] * dp[i]; });
    });
    total = block_sum<Threads>(total);
    for_each_of_block<WIDE<T>, Threads>(wide, keys, [&](auto at) {
        auto p = load(probs, at), dp = load(dprobs, at);
        store(dprobs, at, [&](int i) { return factor * p[i] * (dp[i] - total); });
    });
}
