// Cross-entropy over one vocabulary shard, a block per row of the logits (rows, columns).
//
// The logits are read once for the statistics and once more for the gradient, which takes their
// place: 3 s bytes per element of s bytes in all, and no second copy of the logits. Two
// exponentials and about 10 FLOPs per element: 1 to 2 FLOP/byte, so memory decides.
//
// Only the first `valid` columns count; the others are padding. Column j has the id start + j.
#include "rows.cuh"

// Stands for the maximum over no columns: finite, so that no difference is inf - inf.
constexpr float EMPTY_MAX = -1e30f;

// stats[row] = maximum, sum of exp(logit - maximum), logit of the target (0 if not of this shard).
// One pass: a thread keeps the maximum of what it saw and the sum relative to that.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
cross_entropy_stats(int columns, int valid, const T *logits, const long long *targets,
                    long long start, float *stats) {
    const T *row = logits + size_t(blockIdx.x) * columns;
    float top = EMPTY_MAX, sum = 0.0f;
    for (int j = threadIdx.x; j < valid; j += Threads) {
        float x = to_float(row[j]);
        if (x > top) {
            sum *= expf(top - x);
            top = x;
        }
        sum += expf(x - top);
    }
    float row_top = block_max<Threads>(top);
    float row_sum = block_sum<Threads>(sum * expf(top - row_top));
    if (threadIdx.x > 0) return;
    long long target = targets[blockIdx.x] - start;
    bool inside = target >= 0 && target < valid;
    stats += 3 * size_t(blockIdx.x);
    stats[0] = row_top;
    stats[1] = row_sum;
    stats[2] = inside ? to_float(row[target]) : 0.0f;
}

// logits = (softmax - onehot(target)) scale, in place; padding becomes 0. lse (rows): log of the
// sum of exp(logit) over all shards.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
cross_entropy_backward(int columns, int valid, T *logits, const long long *targets,
                       const float *lse, long long start, float scale) {
    T *row = logits + size_t(blockIdx.x) * columns;
    long long target = targets[blockIdx.x] - start;
    float total = lse[blockIdx.x];
    for (int j = threadIdx.x; j < columns; j += Threads) {
        float prob = j < valid ? expf(to_float(row[j]) - total) : 0.0f;
        float hit = j < valid && j == target ? 1.0f : 0.0f;
        row[j] = from_float<T>((prob - hit) * scale);
    }
}
