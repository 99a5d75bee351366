// Cross-entropy over one vocabulary shard, a block per row of the logits (rows, columns).
//
// The logits are read once for the statistics and once more for the gradient, which replaces them:
// 3 s bytes per element of s bytes in all, and no second copy of the logits. Two exponentials and
// about 10 FLOPs per element, that is 1 to 2 FLOP/byte: memory-bound.
//
// Only the first `valid` columns count; the others are padding. Column j has the id start + j.
#include "rows.cuh"

// stats[row] = maximum, sum of exp(logit - maximum), logit of the target (0 if in another shard).
// One pass: a thread keeps the maximum of what it has seen and the sum relative to that.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
cross_entropy_stats(int columns, int valid, const T *logits, const long long *targets,
                    long long start, float *stats) {
    const T *row = logits + size_t(blockIdx.x) * columns;
    float top = lowest(), total = 0.0f;
    for_each_of_block<WIDE<T>, Threads>(fits<WIDE<T>>(columns, row), columns, [&](auto at) {
        auto stored = load(row, at);
        auto x = each(at, [&](int i) { return at.first + i < valid ? stored[i] : -infinity(); });
        float above = top;
        for (float one : x.values) above = fmaxf(above, one);
        if (above > top) total *= quick_exp(top - above);
        top = above;
        total += sum(at, [&](int i) { return quick_exp(x[i] - top); });
    });
    float row_top = block_max<Threads>(top);
    float row_sum = block_sum<Threads>(total * quick_exp(top - row_top));
    if (threadIdx.x > 0) return;
    long long target = targets[blockIdx.x] - start;
    bool inside = target >= 0 && target < valid;
    stats += 3 * size_t(blockIdx.x);
    stats[0] = row_top;
    stats[1] = row_sum;
    stats[2] = inside ? to_float(row[target]) : 0.0f;
}

// loss (rows) and sums (rows, 2), maximum and sum of exp(logit - maximum) over all shards, from the
// stats (shards, rows, 3) of each. A thread takes a row.
__global__ void cross_entropy_combine(long long rows, int shards, const float *stats, float *loss,
                                      float *sums) {
    for_each_of_grid<1, 1>(false, rows, [&](auto at) {
        long long row = at.first;
        float top = stats[3 * row], total = 0.0f, target = 0.0f;
        for (int i = 1; i < shards; ++i) {
            float one = stats[3 * (i * rows + row)];
            top = one > top || one != one ? one : top;
        }
        for (int i = 0; i < shards; ++i) {
            const float *own = stats + 3 * (i * rows + row);
            total += own[1] * quick_exp(own[0] - top);
            target += own[2];
        }
        loss[row] = top - target + logf(total);
        sums[2 * row] = top;
        sums[2 * row + 1] = total;
    });
}

// logits = (softmax - onehot(target)) scale, in place; padding becomes 0. sums (rows, 2): maximum
// and sum of exp(logit - maximum) over all shards.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
cross_entropy_backward(int columns, int valid, T *logits, const long long *targets,
                       const float *sums, long long start, float scale) {
    T *row = logits + size_t(blockIdx.x) * columns;
    long long target = targets[blockIdx.x] - start;
    float top = sums[2 * size_t(blockIdx.x)], share = 1.0f / sums[2 * size_t(blockIdx.x) + 1];
    for_each_of_block<WIDE<T>, Threads>(fits<WIDE<T>>(columns, row), columns, [&](auto at) {
        auto x = load(row, at);
        store(row, at, [&](int i) {
            int j = at.first + i;
            float prob = j < valid ? share * quick_exp(x[i] - top) : 0.0f;
            float hit = j < valid && j == target ? 1.0f : 0.0f;
            return (prob - hit) * scale;
        });
    });
}
