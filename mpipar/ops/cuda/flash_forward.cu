// Causal attention y = softmax(factor q k^T) v without the (Tq, Tk) scores in memory, a tile of
// queries of one head per block. Query i sees key j if k_pos[j] <= q_pos[i]; one that sees no key
// gets y = 0. Query head h uses key head h / (heads / kv_heads).
//
// A block walks over the tiles of keys that any of its queries sees: in training about half of
// them. Scores exist for one tile of keys at a time, in registers. A row's softmax starts with the
// first keys; a new largest score `top` then shrinks the sum so far (online softmax, Milakov and
// Gimelshein 2018; Dao et al. 2022). lse = log of the sum of exp(score), -infinity without keys.
// Backward needs it, and so does a merge of the results for several sets of keys.
//
// Global traffic of a step: 2 Keys Width values of k and v per 4 Queries Keys Width FLOPs, so
// 2 Queries / s FLOP/byte for values of s bytes: 32 in float32 with 64 queries, 128 in bf16 with
// 128. Memory: B H Tq floats in place of B H Tq Tk scores. k of the next step arrives while p v is
// summed, and v while the scores are, so there is one place for each.
#include "flash.cuh"

// q (B, Tq, H, d) with q_stride values from token to token; k and v (B, Tk, Hkv, d) with kv_stride,
// and kv_apart from sequence to sequence; y (B, Tq, H, d) without gaps, values of T or, if wide, of
// float; lse (B, H, Tq); d <= Width. Grid (ceil(Tq / Queries) * B * H), block (2 * Queries): a warp
// has 16 queries. Dynamic shared memory: tiles of q, k and v; for float32 scratch memory. Blocks:
// how many a processor's registers must be enough for.
template <typename T, int Width, int Queries, int Keys, int Blocks>
__global__ void __launch_bounds__(2 * Queries, Blocks)
flash_forward(int queries, int keys, int heads, int kv_heads, int width, int q_stride,
              int kv_stride, long long kv_apart, const T *q, const T *k, const T *v,
              const long long *q_pos, const long long *k_pos, float factor, int wide, T *y,
              float *lse) {
    static_assert(Width % 32 == 0 && Queries % 16 == 0 && Keys % 16 == 0, "whole pieces");
    constexpr int THREADS = 2 * Queries;
    using Scores = Piece<T, Keys, 1>;
    constexpr int SLOTS = Scores::SLOTS;
    Job job(queries, heads, Queries, true);  // the last queries see most
    int kv_head = job.head / (heads / kv_heads);
    auto of_keys = [&](const T *x) {
        return Heads<const T>{x, kv_apart, kv_stride, keys, width}.of(job.sequence, kv_head);
    };
    Heads<const T> all_q{q, (long long)(queries) * q_stride, q_stride, queries, width};
    HeadRows<const T> k_rows = of_keys(k), v_rows = of_keys(v);
    RowTile<T, Queries, Width> q_tile{static_cast<T *>(dynamic_shared())};
    RowTile<T, Keys, Width> k_tile{q_tile.values + q_tile.VALUES};
    RowTile<T, Keys, Width> v_tile{k_tile.values + k_tile.VALUES};

    Span span = span_of<Queries, 1>(q_pos, job.first, queries);
    Visit now = next_visit<Keys, 1>(k_pos, 0, keys, span);
    if (now.first < keys) {
        q_tile.template fetch<THREADS>(all_q.of(job.sequence, job.head), job.first);
        k_tile.template fetch<THREADS>(k_rows, now.first);
    }
    close_copies();
    Piece<T, Width, 4> out;
    float top[SLOTS], sum[SLOTS], shrink[SLOTS];
    int row[SLOTS];
    long long at[SLOTS];
    for (int slot = 0; slot < SLOTS; ++slot) {
        row[slot] = job.first + threadIdx.x / 32 * 16 + Scores::row(slot);
        at[slot] = row[slot] < queries ? q_pos[row[slot]] : -LAST;
        top[slot] = -1e30f;  // finite: hidden scores are -infinity, and inf - inf is NaN
        sum[slot] = 0.0f;
    }
    while (now.first < keys) {
        wait_copies<0>();
        __syncthreads();  // k is whole; the last step's v is no longer read
        v_tile.template fetch<THREADS>(v_rows, now.first);
        close_copies();
        Scores p;
        p.add_dots(q_tile, k_tile);
        float largest[SLOTS];
        for (int slot = 0; slot < SLOTS; ++slot) largest[slot] = top[slot];
        for (int n = 0; n < Keys / 8; ++n)
            for (int e = 0; e < 4; ++e) {
                int key = now.first + p.column(n, e), slot = p.slot(e);
                bool seen = now.whole || (key < keys && k_pos[key] <= at[slot]);
                p.sum[n][e] = seen ? factor * LOG2_E * p.sum[n][e] : -infinity();
                largest[slot] = fmaxf(largest[slot], p.sum[n][e]);
            }
        for (int slot = 0; slot < SLOTS; ++slot) {
            largest[slot] = warp_max<Scores::LANES>(largest[slot]);
            shrink[slot] = exp2f(top[slot] - largest[slot]);
            sum[slot] *= shrink[slot];
            top[slot] = largest[slot];
        }
        for (int n = 0; n < Keys / 8; ++n)
            for (int e = 0; e < 4; ++e) {
                p.sum[n][e] = exp2f(p.sum[n][e] - top[p.slot(e)]);
                sum[p.slot(e)] += p.sum[n][e];
            }
        for (int n = 0; n < Width / 8; ++n)
            for (int e = 0; e < 4; ++e) out.sum[n][e] *= shrink[out.slot(e)];
        now = next_visit<Keys, 1>(k_pos, now.first + Keys, keys, span);
        wait_copies<0>();
        __syncthreads();  // v is whole; k is no longer read
        if (now.first < keys) k_tile.template fetch<THREADS>(k_rows, now.first);
        close_copies();
        out.add_product(p, v_tile, v_tile.values + v_tile.VALUES);
    }
    for (int slot = 0; slot < SLOTS; ++slot) {
        sum[slot] = warp_sum<Scores::LANES>(sum[slot]);
        if (row[slot] < queries && lane_id() % Scores::LANES == 0)
            lse[(size_t(job.sequence) * heads + job.head) * queries + row[slot]] =
                LN_2 * (top[slot] + log2f(sum[slot]));
        if (sum[slot] == 0.0f) sum[slot] = 1.0f;  // it saw no key
    }
    for (int n = 0; n < Width / 8; ++n)
        for (int e = 0; e < 4; ++e) out.sum[n][e] /= sum[out.slot(e)];
    Heads<T> all_y{y, (long long)(queries) * heads * width, heads * width, queries, width};
    store(out, job, all_y, wide, 1.0f);
}
