// Causal attention y = softmax(factor q k^T) v without the (Tq, Tk) scores in memory, one tile of
// queries of one head per block. Query i sees key j if k_pos[j] <= q_pos[i]; one that sees no key
// gets y = 0. Query head h uses key head h / (heads / kv_heads).
//
// A block loops over the tiles of keys that any of its queries sees, in training about half of
// them. Scores exist for one tile of keys at a time, in registers. A row's softmax starts with the
// first keys; a new largest score `top` then shrinks the sum so far (online softmax, Milakov and
// Gimelshein 2018; Dao et al. 2022). Backward needs the largest score and the sum of
// exp(score - largest), and so does a merge of the results for several sets of keys.
//
// Global traffic of a step: 2 Keys Width values of k and v per 4 Queries Keys Width FLOPs, so 2
// Queries / s FLOP/byte for values of s bytes: 32 in float32 with 64 queries, 128 in bf16 with 128.
// Memory: 2 B H Tq floats instead of B H Tq Tk scores. The next k and v arrive while the current
// ones are used: there are two places, and one barrier per step. 16-bit queries stay in registers:
// a step reads Keys Width values of k and of v from shared memory for each warp, and no queries.
#include "flash.cuh"

// q (B, Tq, H, d) with q_stride values from token to token; k and v (B, Tk, Hkv, d) with kv_stride,
// and kv_apart from sequence to sequence; y (B, Tq, H, d) without gaps, values of T or, if wide, of
// float; stats (B, H, Tq, 2): largest score and sum; d <= Width. Grid (ceil(Tq / Queries) * B * H),
// block (2 * Queries): a warp has 16 queries. Dynamic shared memory: a tile of q, two of k and two
// of v; for float32 also scratch memory. Blocks: the number for which a processor's registers must
// suffice.
template <typename T, int Width, int Queries, int Keys, int Blocks>
__global__ void __launch_bounds__(2 * Queries, Blocks)
flash_forward(int queries, int keys, int heads, int kv_heads, int width, int q_stride,
              int kv_stride, long long kv_apart, const T *q, const T *k, const T *v,
              const long long *q_pos, const long long *k_pos, float factor, int wide, T *y,
              float *stats) {
    static_assert(Width % 32 == 0 && Queries % 16 == 0 && Keys % 16 == 0, "whole pieces");
    constexpr int THREADS = 2 * Queries;
    using Scores = Piece<T, Keys, 1>;
    using Keyed = RowTile<T, Keys, Width>;
    constexpr int SLOTS = Scores::SLOTS;
    Job job(queries, heads, Queries, true);  // the last queries see most keys
    int kv_head = job.head / (heads / kv_heads);
    auto of_keys = [&](const T *x) {
        return Heads<const T>{x, kv_apart, kv_stride, keys, width}.of(job.sequence, kv_head);
    };
    Heads<const T> all_q{q, (long long)(queries) * q_stride, q_stride, queries, width};
    HeadRows<const T> k_rows = of_keys(k), v_rows = of_keys(v);
    RowTile<T, Queries, Width> q_tile{static_cast<T *>(dynamic_shared())};
    T *passing = q_tile.values + q_tile.VALUES, *scratch = passing + 4 * Keyed::VALUES;
    auto k_tile = [&](int place) { return Keyed{passing + 2 * place * Keyed::VALUES}; };
    auto v_tile = [&](int place) { return Keyed{k_tile(place).values + Keyed::VALUES}; };
    auto fetch = [&](int first, int place) {
        k_tile(place).template fetch<THREADS>(k_rows, first);
        v_tile(place).template fetch<THREADS>(v_rows, first);
    };

    Visits<Queries, Keys, 1> visits{q_pos, job.first, queries, k_pos, keys};
    q_tile.template fetch<THREADS>(all_q.of(job.sequence, job.head), job.first);
    close_copies();
    Visit now = visits.next();
    if (now.first < keys) fetch(now.first, 0);
    close_copies();
    Piece<T, Width, 4> out;
    float top[SLOTS], sum[SLOTS], shrink[SLOTS];
    int row[SLOTS];
    for (int slot = 0; slot < SLOTS; ++slot) {
        row[slot] = job.first + threadIdx.x / 32 * 16 + Scores::row(slot);
        top[slot] = lowest();
        sum[slot] = 0.0f;
    }
    wait_copies<1>();
    __syncthreads();  // q is complete, while k and v are on their way
    HeldRows<T, Width> q_rows(q_tile);
    for (int place = 0; now.first < keys; place ^= 1) {
        wait_copies<0>();
        __syncthreads();  // this place is complete; the other one is no longer read
        Visit next = visits.next();
        if (next.first < keys) fetch(next.first, place ^ 1);
        close_copies();
        Scores p;
        p.add_dots(q_rows, k_tile(place));
        float largest[SLOTS];
        for (int slot = 0; slot < SLOTS; ++slot) largest[slot] = top[slot];
        for (int n = 0; n < Keys / 8; ++n)
            for (int e = 0; e < 4; ++e) p.sum[n][e] = score_of(p.sum[n][e], factor);
        if (!now.whole)
            for (int n = 0; n < Keys / 8; ++n)
                for (int e = 0; e < 4; ++e) {
                    int key = now.first + p.column(n, e), query = row[p.slot(e)];
                    if (query >= queries || key >= keys || !sees(q_pos[query], k_pos[key]))
                        p.sum[n][e] = -infinity();
                }
        for (int n = 0; n < Keys / 8; ++n)
            for (int e = 0; e < 4; ++e)
                largest[p.slot(e)] = fmaxf(largest[p.slot(e)], p.sum[n][e]);
        for (int slot = 0; slot < SLOTS; ++slot) {
            largest[slot] = warp_max<Scores::LANES>(largest[slot]);
            shrink[slot] = exp2f(LOG2_E * (top[slot] - largest[slot]));
            sum[slot] *= shrink[slot];
            top[slot] = largest[slot];
        }
        for (int n = 0; n < Keys / 8; ++n)
            for (int e = 0; e < 4; ++e) {
                p.sum[n][e] = exp2f(LOG2_E * (p.sum[n][e] - top[p.slot(e)]));
                sum[p.slot(e)] += p.sum[n][e];
            }
        for (int n = 0; n < Width / 8; ++n)
            for (int e = 0; e < 4; ++e) out.sum[n][e] *= shrink[out.slot(e)];
        out.add_product(p, v_tile(place), scratch);
        now = next;
    }
    for (int slot = 0; slot < SLOTS; ++slot) {
        sum[slot] = warp_sum<Scores::LANES>(sum[slot]);
        if (row[slot] < queries && lane_id() % Scores::LANES == 0) {
            size_t of_head = size_t(job.sequence) * heads + job.head;
            float *to = stats + 2 * (of_head * queries + row[slot]);
            to[0] = top[slot];
            to[1] = sum[slot];
        }
        if (sum[slot] == 0.0f) sum[slot] = 1.0f;  // it saw no key
    }
    for (int n = 0; n < Width / 8; ++n)
        for (int e = 0; e < 4; ++e) out.sum[n][e] /= sum[out.slot(e)];
    Heads<T> all_y{y, (long long)(queries) * heads * width, heads * width, queries, width};
    store(out, all_y, job, job.first + threadIdx.x / 32 * 16, 0, wide, 1.0f);
}
