// Gradients of causal attention (flash_forward.cu), without the scores in memory and without
// atomics: every run gives the same bits.
//
// Scores s and their gradient are recomputed tile by tile: p = exp(factor s - top) / sum with the
// stats of the forward pass, ds = p (dp - delta) with dp = dy v^T and delta = sum of dy y over a
// row (Dao et al. 2022). A block keeps a tile of keys and values, and loops over the queries that
// see any of them, one after another of the heads that use this key head. Five products:
//     s = k q^T, dp = v dy^T, dv += p dy, dk += ds q, dq += ds^T k.
// A warp's rows of ds and p are its own sums, so they can stay in place as the left operand of dk
// and dv. dq needs those of all warps, so ds goes through shared memory.
//
// dq is a sum over all keys, which are in several blocks. The tiles of keys of a head are therefore
// dealt to a few blocks, the parts, and each adds up its own dq in memory, in float32 and in the
// order of its tiles. Each value is read and written by a single thread: no lock, no atomic, no
// barrier. The first tile of a part writes, and the others add. `flash_dq` adds the parts, in their
// order.
//
// Traffic of a step: 2 Queries Width values of q and dy, and 2 Queries Width floats of dq, per 10
// Keys Queries Width FLOPs: 10 Keys / (2 s + 8) FLOP/byte for values of s bytes, 107 in bf16 with
// 128 keys. The floats of the running blocks stay in the second-level cache while sequences are
// short: 256 KiB per block at 1024 tokens and d = 64. Otherwise memory moves 8 bytes per 10 Keys
// FLOPs. Two walks, one of them for dq, would take seven products and twice the exponentials.
#include "flash.cuh"

// delta (B, H, T) = sum of y dy over the width, y and dy (B, T, H, d) without gaps. Grid (ceil(B T
// H / (Threads / 32))): a warp per row; 2 s bytes per 2 FLOPs: memory-bound.
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

// dq of a tile of queries is divided among the warps of a block, 16 queries x PART of the width
// each. In memory the parts are in the order in which the threads hold them, 16 bytes beside 16
// bytes: nothing else reads them. (parts, B, H, ceil(Tq / Queries), Queries Width) floats.
template <typename T, int Width, int Keys, int Queries> struct Share {
    static constexpr int PART = Queries * Width / Keys, GROUPS = Queries / 16, THREADS = 2 * Keys;
    static_assert(Width % PART == 0 && Queries % 16 == 0, "whole pieces");
    using Sums = Piece<T, PART, 4>;

    __device__ static int row() { return threadIdx.x / 32 % GROUPS * 16; }
    __device__ static int column() { return threadIdx.x / 32 / GROUPS * PART; }
    __device__ static float *place(float *tile, int n) {
        return tile + 4 * (n * THREADS + threadIdx.x);
    }
    __device__ static void add(Sums &sums, float *tile) {
        for (int n = 0; n < PART / 8; ++n) {
            __align__(16) float more[4];
            copy_4(more, place(tile, n));
            for (int e = 0; e < 4; ++e) sums.sum[n][e] += more[e];
        }
    }
    __device__ static void write(const Sums &sums, float *tile) {
        for (int n = 0; n < PART / 8; ++n) {
            __align__(16) float all[4];
            for (int e = 0; e < 4; ++e) all[e] = sums.sum[n][e];
            copy_4(place(tile, n), all);
        }
    }
};

// q and dy (B, Tq, H, d), k, v, dk and dv (B, Tk, Hkv, d), whose strides are those of
// flash_forward; gradients have out_stride values from token to token, of T or, if wide, of float;
// dy without gaps, stats (B, H, Tq, 2), delta (B, H, Tq); d <= Width. Grid (parts * B * Hkv), parts
// <= ceil(Tk / Keys); block (2 * Keys): a warp has 16 keys. Dynamic shared memory: two tiles of
// keys, four of queries, one of ds, and four numbers for each query of two tiles. Blocks: the
// number for which a processor's registers must suffice. The first keys are seen by most queries,
// so they begin first.
template <typename T, int Width, int Keys, int Queries, int Blocks>
__global__ void __launch_bounds__(2 * Keys, Blocks)
flash_backward(int queries, int keys, int heads, int kv_heads, int width, int q_stride,
               int kv_stride, long long kv_apart, int out_stride, int parts, const T *q, const T *k,
               const T *v, const T *dy, const long long *q_pos, const long long *k_pos,
               float factor, const float *stats, const float *delta, int wide, float *dq_parts,
               T *dk, T *dv) {
    constexpr int THREADS = 2 * Keys;
    using Scores = Piece<T, Queries, 1>;
    using Kept = RowTile<T, Keys, Width>;
    using Passing = RowTile<T, Queries, Width>;
    using Dq = Share<T, Width, Keys, Queries>;
    Job job(parts, kv_heads, 1, false);  // its first row is the number of the part
    int members = heads / kv_heads, tiles = ceil_div(queries, Queries);
    int batch = gridDim.x / (parts * kv_heads);
    auto of_queries = [&](const T *x, int stride, int head) {
        Heads<const T> all{x, (long long)(queries) * stride, stride, queries, width};
        return all.of(job.sequence, head);
    };
    auto of_keys = [&](const T *x) {
        return Heads<const T>{x, kv_apart, kv_stride, keys, width}.of(job.sequence, job.head);
    };
    Kept k_tile{static_cast<T *>(dynamic_shared())}, v_tile{k_tile.values + Kept::VALUES};
    T *passing = v_tile.values + Kept::VALUES;
    auto q_tile = [&](int place) { return Passing{passing + 2 * place * Passing::VALUES}; };
    auto dy_tile = [&](int place) { return Passing{q_tile(place).values + Passing::VALUES}; };
    RowTile<T, Keys, Queries> ds_tile{passing + 4 * Passing::VALUES};
    auto *of_query = reinterpret_cast<float4 *>(ds_tile.values + ds_tile.VALUES);

    for (int first = job.first * Keys; first < keys; first += parts * Keys) {
        bool first_of_part = first == job.first * Keys;
        Piece<T, Width, 4> dk_sum, dv_sum;
        for (int member = 0; member < members; ++member) {
            int head = job.head * members + member;
            HeadRows<const T> q_rows = of_queries(q, q_stride, head);
            HeadRows<const T> dy_rows = of_queries(dy, heads * width, head);
            size_t of_head = size_t(job.sequence) * heads + head;
            float *dq = dq_parts + ((size_t(job.first) * batch * heads + of_head) * tiles) *
                                       (Queries * Width);
            auto fetch = [&](int query, int place) {
                q_tile(place).template fetch<THREADS>(q_rows, query);
                dy_tile(place).template fetch<THREADS>(dy_rows, query);
            };
            // For one query each: largest score, 1 / sum, delta.
            auto numbers = [&](int query) -> float4 {
                if (threadIdx.x >= Queries || query >= queries) return {};
                size_t at = of_head * queries + min(query + int(threadIdx.x), queries - 1);
                return {stats[2 * at], __frcp_rn(stats[2 * at + 1]), delta[at], 0.0f};
            };
            auto keep = [&](const float4 &of, int place) {
                if (threadIdx.x < Queries) of_query[place * Queries + threadIdx.x] = of;
            };
            auto clear = [&](int from, int to) {  // dq of tiles that see no key of this tile
                for (; from < to; from += Queries) Dq::write({}, dq + size_t(from) * Width);
            };

            Visits<Keys, Queries, -1> visits{k_pos, first, keys, q_pos, queries};
            Visit now = visits.next();  // after its barriers the last walk's data is no longer read
            if (member == 0) {
                k_tile.template fetch<THREADS>(of_keys(k), first);
                v_tile.template fetch<THREADS>(of_keys(v), first);
            }
            if (now.first < queries) fetch(now.first, 0);
            close_copies();
            keep(numbers(now.first), 0);
            if (first_of_part) clear(0, now.first);
            for (int place = 0; now.first < queries; place ^= 1) {
                wait_copies<0>();
                __syncthreads();  // this place is complete; the other one and ds are no longer read
                Visit next = visits.next();
                if (next.first < queries) fetch(next.first, place ^ 1);
                close_copies();
                float4 of_next = numbers(next.first);
                Scores p, ds;
                p.add_dots(WarpRows<T, Width>(k_tile), q_tile(place));
                ds.add_dots(WarpRows<T, Width>(v_tile), dy_tile(place));
                for (int n = 0; n < Queries / 8; ++n)
                    for (int e = 0; e < 4; ++e) {
                        float4 of = of_query[place * Queries + p.column(n, e)];
                        float score = score_of(p.sum[n][e], factor);
                        p.sum[n][e] = exp2f(LOG2_E * (score - of.x)) * of.y;
                        ds.sum[n][e] = p.sum[n][e] * (ds.sum[n][e] - of.z);
                    }
                if (!now.whole || first + Keys > keys)
                    for (int n = 0; n < Queries / 8; ++n)
                        for (int e = 0; e < 4; ++e) {
                            int query = now.first + p.column(n, e);
                            int key = first + threadIdx.x / 32 * 16 + p.row(p.slot(e));
                            if (query >= queries || key >= keys || !sees(q_pos[query], k_pos[key]))
                                p.sum[n][e] = ds.sum[n][e] = 0.0f;
                        }
                dv_sum.add_product(p, dy_tile(place), ds_tile.values);
                dk_sum.add_product(ds, q_tile(place), ds_tile.values);
                ds.put(ds_tile);
                keep(of_next, place ^ 1);
                float *tile = dq + size_t(now.first) * Width;
                typename Dq::Sums dq_sum;
                if (!first_of_part) Dq::add(dq_sum, tile);
                __syncthreads();  // ds is complete
                dq_sum.add_turned(ds_tile, Dq::row(), k_tile, Dq::column());
                Dq::write(dq_sum, tile);
                if (first_of_part) clear(now.first + Queries, next.first);
                now = next;
            }
        }
        Heads<T> all_dk{dk, (long long)(keys) * out_stride, out_stride, keys, width};
        Heads<T> all_dv = all_dk;
        all_dv.x = dv;
        int row = first + threadIdx.x / 32 * 16;
        store(dk_sum, all_dk, job, row, 0, wide, factor);
        store(dv_sum, all_dv, job, row, 0, wide, 1.0f);
    }
}

// dq (B, Tq, H, d) = factor times the sum of the parts. Grid (ceil(Tq / Queries) * B * H), block
// (2 * Keys); 4 parts + s bytes per element: memory-bound.
template <typename T, int Width, int Keys, int Queries, int Blocks>
__global__ void __launch_bounds__(2 * Keys, Blocks)
flash_dq(int queries, int heads, int width, int out_stride, int parts, float *dq_parts,
         float factor, int wide, T *dq) {
    using Dq = Share<T, Width, Keys, Queries>;
    Job job(queries, heads, Queries, false);
    int tiles = ceil_div(queries, Queries);
    size_t of_head = size_t(job.sequence) * heads + job.head, part_size = size_t(gridDim.x);
    size_t tile = of_head * tiles + job.first / Queries;
    typename Dq::Sums sum;
    for (int part = 0; part < parts; ++part)
        Dq::add(sum, dq_parts + (part * part_size + tile) * (Queries * Width));
    Heads<T> all{dq, (long long)(queries) * out_stride, out_stride, queries, width};
    store(sum, all, job, job.first + Dq::row(), Dq::column(), wide, factor);
}
