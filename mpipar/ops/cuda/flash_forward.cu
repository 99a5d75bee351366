// Causal attention y = softmax(factor q k^T) v without the (T, T) scores in memory, a tile of
// queries of one head per block. Query i sees key j if positions[j] <= positions[i].
//
// A block walks over the tiles of keys that any of its queries sees: about half of them. Scores
// exist for one tile of keys at a time, in registers. A row's softmax is begun with the keys so
// far: a new largest score `top` shrinks what was summed before (online softmax, Milakov and
// Gimelshein 2018; Dao et al. 2022). lse = log of the sum of exp(score), which backward needs.
//
// Global traffic of a step: 2 Keys Width values of k and v per 4 Queries Keys Width FLOPs, so
// 2 Queries / s FLOP/byte for values of s bytes: 32 in float32 with 64 queries, 128 in bf16 with
// 128. Memory: B H T floats in place of B H T T scores. k of the next step comes while p v is
// summed, v while the scores are, so there is one place for each.
#include "flash.cuh"

// q, k, v (B, T, H, d) with `stride` values from token to token, y (B, T, H, d) without gaps,
// lse (B, H, T); d <= Width. Grid (ceil(T / Queries) * B * H), block (2 * Queries): a warp has 16
// queries. Dynamic shared memory: tiles of q, k and v; for float32 scratch memory. Blocks: how many
// a processor's registers must be enough for.
template <typename T, int Width, int Queries, int Keys, int Blocks>
__global__ void __launch_bounds__(2 * Queries, Blocks)
flash_forward(int tokens, int heads, int width, int stride, const T *q, const T *k, const T *v,
              const long long *positions, float factor, T *y, float *lse) {
    static_assert(Width % 32 == 0 && Queries % 16 == 0 && Keys % 16 == 0, "whole pieces");
    constexpr int THREADS = 2 * Queries;
    using Scores = Piece<T, Keys, 1>;
    constexpr int SLOTS = Scores::SLOTS;
    Job job(tokens, heads, width, Queries, true);  // the last queries see most
    HeadRows<const T> k_rows = job.rows(k, stride), v_rows = job.rows(v, stride);
    RowTile<T, Queries, Width> q_tile{static_cast<T *>(dynamic_shared())};
    RowTile<T, Keys, Width> k_tile{q_tile.values + q_tile.VALUES};
    RowTile<T, Keys, Width> v_tile{k_tile.values + k_tile.VALUES};

    Span span = span_of<Queries, 1>(positions, job.first, tokens);
    Visit now = next_visit<Keys, 1>(positions, 0, tokens, span);
    q_tile.template fetch<THREADS>(job.rows(q, stride), job.first);
    k_tile.template fetch<THREADS>(k_rows, now.first);
    close_copies();
    Piece<T, Width, 4> out;
    float top[SLOTS], sum[SLOTS], shrink[SLOTS];
    int row[SLOTS];
    long long at[SLOTS];
    for (int slot = 0; slot < SLOTS; ++slot) {
        row[slot] = job.first + threadIdx.x / 32 * 16 + Scores::row(slot);
        at[slot] = row[slot] < tokens ? positions[row[slot]] : -LAST;
        top[slot] = -1e30f;  // not infinite: what is hidden is, and infinity less itself is NaN
        sum[slot] = 0.0f;
    }
    while (now.first < tokens) {
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
                bool seen = now.whole || (key < tokens && positions[key] <= at[slot]);
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
        now = next_visit<Keys, 1>(positions, now.first + Keys, tokens, span);
        wait_copies<0>();
        __syncthreads();  // v is whole; k is no longer read
        if (now.first < tokens) k_tile.template fetch<THREADS>(k_rows, now.first);
        close_copies();
        out.add_product(p, v_tile, v_tile.values + v_tile.VALUES);
    }
    for (int slot = 0; slot < SLOTS; ++slot) {
        sum[slot] = warp_sum<Scores::LANES>(sum[slot]);
        if (row[slot] < tokens && lane_id() % Scores::LANES == 0)
            job.of_head(lse)[row[slot]] = LN_2 * (top[slot] + log2f(sum[slot]));
    }
    for (int n = 0; n < Width / 8; ++n)
        for (int e = 0; e < 4; ++e) out.sum[n][e] /= sum[out.slot(e)];
    store_rows(out, job.rows(y, heads * width), job.first, 1.0f);
}
