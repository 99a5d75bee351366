// Gradients of causal attention (flash_forward.cu), without the scores in memory and without
// atomics: every run gives the same bits.
//
// Scores s and their gradient are computed again, tile by tile: p = exp(factor s - lse),
// ds = p (dp - delta) with dp = dy v^T and delta = sum of dy y over a row (Dao et al. 2022). There
// are two walks over all tiles that are seen. A block that keeps queries sums dq = factor ds k. A
// block that keeps keys sums dk = factor ds^T q and dv = p^T dy. Both are one function: rows (a, b)
// stay, and columns (c, d) pass by (q and dy, or k and v):
//     s = a c^T, dp = b d^T, first += ds c, second += p d.
// Only keys need the second sum. For keys, the columns are the queries of each head that uses this
// key head, one head after another. A warp's rows of ds and p are its own sums, so they can stay in
// place as the left side of the next product.
//
// Global traffic of a step: 2 Columns Width values of c and d per 6 (dq) or 8 (dk, dv) Rows Columns
// Width FLOPs, so 3 or 4 Rows / s FLOP/byte for values of s bytes: 48 and 64 in float32, 96 and 128
// in bf16, with 64 rows (wide heads in float32: 48 rows, more do not fit everywhere). The next
// columns come while these are used, so there are two places.
#include "flash.cuh"

// delta (B, H, T) = sum of y dy over the width, y and dy (B, T, H, d) without gaps. Grid
// (ceil(B T H / (Threads / 32))): a warp per row; 2 s bytes per 2 FLOPs: memory decides.
template <typename Y, typename T, int Threads>
__global__ void __launch_bounds__(Threads)
flash_delta(int rows, int tokens, int heads, int width, const Y *y, const T *dy, float *delta) {
    int row = blockIdx.x * (Threads / 32) + threadIdx.x / 32;
    if (row >= rows) return;  // the whole warp
    size_t at = size_t(row) * width;
    float sum = 0.0f;
    for (int i = lane_id(); i < width; i += 32) sum += to_float(y[at + i]) * to_float(dy[at + i]);
    sum = warp_sum(sum);
    int head = row % heads, token = row / heads % tokens, sequence = row / heads / tokens;
    if (lane_id() == 0) delta[(size_t(sequence) * heads + head) * tokens + token] = sum;
}

// The walk of one block over the columns of `members` heads, which lie side by side; c, d, lse and
// delta are those of the first.
template <bool OfKeys, int Columns, int Rows, typename T, int Width>
__device__ inline void walk(int first, int members, const HeadRows<const T> &a,
                            const HeadRows<const T> &b, const HeadRows<const T> &c,
                            const HeadRows<const T> &d, const long long *row_pos,
                            const long long *column_pos, float factor, const float *lse,
                            const float *delta, Piece<T, Width, 4> &first_sum,
                            Piece<T, Width, 4> &second_sum) {
    static_assert(Width % 32 == 0 && Rows % 16 == 0 && Columns % 16 == 0, "whole pieces");
    constexpr int THREADS = 2 * Rows, SIGN = OfKeys ? -1 : 1;
    using Scores = Piece<T, Columns, 1>;
    constexpr int SLOTS = Scores::SLOTS;
    using Kept = RowTile<T, Rows, Width>;
    using Passing = RowTile<T, Columns, Width>;
    int rows = a.tokens, columns = c.tokens, member = 0;
    Kept a_tile{static_cast<T *>(dynamic_shared())}, b_tile{a_tile.values + Kept::VALUES};
    T *passing = b_tile.values + Kept::VALUES, *scratch = passing + 4 * Passing::VALUES;
    auto c_tile = [&](int place) { return Passing{passing + 2 * place * Passing::VALUES}; };
    auto d_tile = [&](int place) { return Passing{c_tile(place).values + Passing::VALUES}; };
    auto fetch = [&](int column, int place) {
        HeadRows<const T> own_c = c, own_d = d;
        own_c.x += member * c.width;
        own_d.x += member * d.width;
        c_tile(place).template fetch<THREADS>(own_c, column);
        d_tile(place).template fetch<THREADS>(own_d, column);
    };

    Span span = span_of<Rows, SIGN>(row_pos, first, rows);
    Visit now = next_visit<Columns, SIGN>(column_pos, 0, columns, span);
    if (now.first < columns) {
        a_tile.template fetch<THREADS>(a, first);
        b_tile.template fetch<THREADS>(b, first);
        fetch(now.first, 0);
    }
    close_copies();
    float row_lse[SLOTS], row_delta[SLOTS];
    long long at[SLOTS];
    for (int slot = 0; slot < SLOTS; ++slot) {
        int row = first + threadIdx.x / 32 * 16 + Scores::row(slot);
        bool inside = row < rows;
        at[slot] = inside ? SIGN * row_pos[row] : -LAST;
        row_lse[slot] = inside && !OfKeys ? lse[row] : 0.0f;
        row_delta[slot] = inside && !OfKeys ? delta[row] : 0.0f;
    }
    for (int place = 0; now.first < columns; place ^= 1) {
        wait_copies<0>();
        __syncthreads();  // this place is whole; the other one is no longer read
        size_t of_member = size_t(member) * columns;
        Visit next = next_visit<Columns, SIGN>(column_pos, now.first + Columns, columns, span);
        if (OfKeys && next.first >= columns && ++member < members)
            next = next_visit<Columns, SIGN>(column_pos, 0, columns, span);
        if (next.first < columns) fetch(next.first, place ^ 1);
        close_copies();
        Scores p, ds;
        p.add_dots(a_tile, c_tile(place));
        ds.add_dots(b_tile, d_tile(place));
        for (int n = 0; n < Columns / 8; ++n)
            for (int e = 0; e < 4; ++e) {
                int column = now.first + p.column(n, e), slot = p.slot(e);
                int inside = min(column, columns - 1);
                bool seen = now.whole ||
                            (column < columns && SIGN * column_pos[inside] <= at[slot]);
                float l = OfKeys ? lse[of_member + inside] : row_lse[slot];
                float mean = OfKeys ? delta[of_member + inside] : row_delta[slot];
                float one = exp2f(LOG2_E * (factor * p.sum[n][e] - l));
                p.sum[n][e] = seen ? one : 0.0f;
                ds.sum[n][e] = seen ? one * (ds.sum[n][e] - mean) : 0.0f;
            }
        first_sum.add_product(ds, c_tile(place), scratch);
        if (OfKeys) second_sum.add_product(p, d_tile(place), scratch);
        now = next;
    }
}

// Both: q and dq (B, Tq, H, d), k, v, dk and dv (B, Tk, Hkv, d), whose strides are those of
// flash_forward; gradients have out_stride values from token to token, of T or, if wide, of float;
// dy (B, Tq, H, d) without gaps, lse and delta (B, H, Tq); d <= Width. Grid: ceil(Tq / Rows) * B *
// H for dq, ceil(Tk / Rows) * B * Hkv for dk and dv; block (2 * Rows): a warp has 16 rows. Dynamic
// shared memory: two tiles of rows, four of columns; for float32 scratch memory. Blocks: how many a
// processor's registers must be enough for. What walks longest begins first: the last queries, the
// first keys.
template <typename T, int Width, int Rows, int Columns, int Blocks>
__global__ void __launch_bounds__(2 * Rows, Blocks)
flash_dq(int queries, int keys, int heads, int kv_heads, int width, int q_stride, int kv_stride,
         long long kv_apart, int out_stride, const T *q, const T *k, const T *v, const T *dy,
         const long long *q_pos, const long long *k_pos, float factor, const float *lse,
         const float *delta, int wide, T *dq) {
    Job job(queries, heads, Rows, true);
    auto of_queries = [&](const T *x, int stride) {
        Heads<const T> all{x, (long long)(queries) * stride, stride, queries, width};
        return all.of(job.sequence, job.head);
    };
    auto of_keys = [&](const T *x) {
        Heads<const T> all{x, kv_apart, kv_stride, keys, width};
        return all.of(job.sequence, job.head / (heads / kv_heads));
    };
    size_t at = (size_t(job.sequence) * heads + job.head) * queries;
    Piece<T, Width, 4> sum, unused;
    walk<false, Columns, Rows>(job.first, 1, of_queries(q, q_stride), of_queries(dy, heads * width),
                               of_keys(k), of_keys(v), q_pos, k_pos, factor, lse + at, delta + at,
                               sum, unused);
    Heads<T> all{dq, (long long)(queries) * out_stride, out_stride, queries, width};
    store(sum, job, all, wide, factor);
}

// A block sums over the query heads of its key head, one after another: nobody else writes there.
template <typename T, int Width, int Rows, int Columns, int Blocks>
__global__ void __launch_bounds__(2 * Rows, Blocks)
flash_dkv(int queries, int keys, int heads, int kv_heads, int width, int q_stride, int kv_stride,
          long long kv_apart, int out_stride, const T *q, const T *k, const T *v, const T *dy,
          const long long *q_pos, const long long *k_pos, float factor, const float *lse,
          const float *delta, int wide, T *dk, T *dv) {
    Job job(keys, kv_heads, Rows, false);
    int members = heads / kv_heads, first_head = job.head * members;
    auto of_queries = [&](const T *x, int stride) {
        Heads<const T> all{x, (long long)(queries) * stride, stride, queries, width};
        return all.of(job.sequence, first_head);
    };
    auto of_keys = [&](const T *x) {
        Heads<const T> all{x, kv_apart, kv_stride, keys, width};
        return all.of(job.sequence, job.head);
    };
    size_t at = (size_t(job.sequence) * heads + first_head) * queries;
    Piece<T, Width, 4> dk_sum, dv_sum;
    walk<true, Columns, Rows>(job.first, members, of_keys(k), of_keys(v), of_queries(q, q_stride),
                              of_queries(dy, heads * width), k_pos, q_pos, factor, lse + at,
                              delta + at, dk_sum, dv_sum);
    Heads<T> all_dk{dk, (long long)(keys) * out_stride, out_stride, keys, width}, all_dv = all_dk;
    all_dv.x = dv;
    store(dk_sum, job, all_dk, wide, factor);
    store(dv_sum, job, all_dv, wide, 1.0f);
}
