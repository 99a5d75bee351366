// Shared by both directions of tiled causal attention: which tiles are visible at all, rows of one
// head in memory and in shared memory, and a warp's piece of a product.
//
// A warp multiplies 16 rows by a tile of N columns and keeps the 16 x N sums in registers: a Piece.
// There are two kinds of Piece with the same interface: one on tensor cores for bf16 and half, one
// with plain multiply-adds for float32. A kernel is written once, for either kind.
#pragma once

#include "common.cuh"
#include "mma.cuh"

constexpr float LOG2_E = 1.44269504f;  // for exp2f, which is the fast one
constexpr long long LAST = 0x7fffffffffffffffLL;  // later than any token

__device__ inline int lane_id() { return threadIdx.x % 32; }

// The score of a product of a query and a key. Both directions must round it in the same way,
// because they subtract the largest score from it, so no compiler may contract the product into a
// difference.
__device__ inline float score_of(float product, float factor) { return __fmul_rn(factor, product); }

// Visibility. Sign 1: rows are queries, and see a column whose position is at most their own; Sign
// -1: rows are keys. With the sign applied to all positions, one comparison serves both.
struct Span { long long low, high; };

// The lowest and highest signed position of Rows rows of `count`. Every warp computes it for
// itself, as below: all get the same result, without a barrier.
template <int Rows, int Sign>
__device__ inline Span span_of(const long long *positions, int first, int count) {
    Span span = {LAST, -LAST};
    for (int i = first + lane_id(); i < min(first + Rows, count); i += 32)
        span = {min(span.low, Sign * positions[i]), max(span.high, Sign * positions[i])};
    for (int flip = 16; flip > 0; flip /= 2)
        span = {min(span.low, __shfl_xor_sync(FULL_MASK, span.low, flip)),
                max(span.high, __shfl_xor_sync(FULL_MASK, span.high, flip))};
    return span;
}

// Whether a row sees a column. This is checked per element, but only in tiles that are partly
// visible.
__device__ inline bool sees(long long row, long long column) { return column <= row; }

// A tile of columns; whole: whether every row sees all of it.
struct Visit { int first; bool whole; };

// Iterates over the tiles of columns in which some row of a block sees some column. The block looks
// at 32 tiles at once, each warp at some of them, and keeps two bits of each, so that it reads a
// position once, and a step of its walk accesses neither memory nor other lanes. Rows: of the
// block; a warp has 16.
template <int Rows, int Columns, int Sign> struct Visits {
    static constexpr int WARPS = Rows / 16;
    const long long *row_pos;
    int first_row, rows;
    const long long *column_pos;
    int columns;
    int looked = 0;  // columns before this one have been looked at
    unsigned seen = 0, whole = 0;

    // Returns the next tile; first = columns if there is none. All threads of the block must call
    // it.
    __device__ Visit next() {
        while (seen == 0 && looked < columns) look();
        if (seen == 0) return {columns, false};
        int tile = __ffs(seen) - 1;
        seen &= seen - 1;
        return {looked - (32 - tile) * Columns, (whole >> tile & 1) != 0};
    }

    __device__ void look() {
        __shared__ unsigned found[WARPS][2];
        unsigned own[2] = {0, 0};
        Span span = span_of<Rows, Sign>(row_pos, first_row, rows);
        #pragma unroll 4
        for (int tile = threadIdx.x / 32; tile < 32; tile += WARPS) {
            int first = looked + tile * Columns;
            bool any = false, all = true;
            for (int j = first + lane_id(); j < first + Columns; j += 32) {
                long long at = j < columns ? Sign * column_pos[j] : LAST;
                any |= at <= span.high;
                all &= at <= span.low;
            }
            own[0] |= unsigned(__any_sync(FULL_MASK, any) != 0) << tile;
            own[1] |= unsigned(__any_sync(FULL_MASK, !all) == 0) << tile;
        }
        __syncthreads();  // the results of the last look are no longer read
        if (lane_id() == 0)
            for (int i = 0; i < 2; ++i) found[threadIdx.x / 32][i] = own[i];
        __syncthreads();  // all warps have written what they found
        seen = whole = 0;
        for (int warp = 0; warp < WARPS; ++warp) {
            seen |= found[warp][0];
            whole |= found[warp][1];
        }
        looked += 32 * Columns;
    }
};

// The (tokens, width) rows of one head, `stride` values apart.
template <typename T> struct HeadRows {
    T *x;
    int stride, tokens, width;
};

// An array (B, tokens, heads, width): sequences are `apart` and tokens `stride` values apart, and
// there are no gaps between heads.
template <typename T> struct Heads {
    T *x;
    long long apart;
    int stride, tokens, width;

    __device__ HeadRows<T> of(int sequence, int head) const {
        return {x + sequence * apart + head * width, stride, tokens, width};
    }
};

// The work of a block: `rows` rows, starting at `first`, of one of `heads` heads of one sequence.
// last_first: whether the blocks of the last rows begin first.
struct Job {
    int sequence, head, first;

    __device__ Job(int tokens, int heads, int rows, bool last_first) {
        int tiles = ceil_div(tokens, rows), all_heads = gridDim.x / tiles;
        int tile = blockIdx.x / all_heads;
        sequence = blockIdx.x % all_heads / heads;
        head = blockIdx.x % all_heads % heads;
        first = rows * (last_first ? tiles - 1 - tile : tile);
    }
};

// Rows of a head in shared memory, each 16 bytes longer than Width, so that 8 of them begin in
// different banks.
template <typename T, int Rows, int Width> struct RowTile {
    static constexpr int FEW = 16 / sizeof(T), STRIDE = Width + FEW, VALUES = Rows * STRIDE;
    T *values;

    // Starts to copy rows, beginning at `first`; zeros beyond the head's width and tokens.
    template <int Threads> __device__ void fetch(const HeadRows<const T> &from, int first) const {
        bool aligned = from.stride % FEW == 0 && reinterpret_cast<size_t>(from.x) % 16 == 0;
        #pragma unroll 1  // few iterations; registers are scarce
        for (int e = FEW * threadIdx.x; e < Rows * Width; e += FEW * Threads) {
            int row = first + e / Width, column = e % Width;
            T *to = values + e / Width * STRIDE + column;
            const T *at = from.x + size_t(row) * from.stride + column;
            bool outside = row >= from.tokens || column >= from.width;
            if (aligned && (outside || column + FEW <= from.width)) {
                start_copy_16(to, outside ? from.x : at, !outside);
            } else {
                for (int n = 0; n < FEW; ++n)
                    to[n] = !outside && column + n < from.width ? at[n] : from_float<T>(0.0f);
            }
        }
    }

};

// A warp's 16 rows of a tile as the left operand of products: read from shared memory at each use
// ...
template <typename T, int Width> struct WarpRows {
    static constexpr int STRIDE = Width + 16 / sizeof(T), UNROLL = 2;
    const T *rows;

    template <int Rows> __device__ explicit WarpRows(const RowTile<T, Rows, Width> &tile)
        : rows(tile.values + threadIdx.x / 32 * 16 * STRIDE) {}

    // The piece A of an mma whose k begins at `k`.
    __device__ void piece(unsigned (&a)[4], int k) const {
        load_matrices<false>(a, rows + lane_id() % 16 * STRIDE + lane_id() / 16 * 8 + k);
    }
};

// ... or once, into registers. Those of float32 stay in shared memory: there are too many.
template <typename T, int Width> struct HeldRows {
    static constexpr int UNROLL = Width / 16;  // register indices must be known at compile time
    unsigned a[Width / 16][4];

    template <int Rows> __device__ explicit HeldRows(const RowTile<T, Rows, Width> &tile) {
        WarpRows<T, Width> from(tile);
        for (int k = 0; k < Width / 16; ++k) from.piece(a[k], 16 * k);
    }
    __device__ void piece(unsigned (&to)[4], int k) const {
        for (int i = 0; i < 4; ++i) to[i] = a[k / 16][i];
    }
};
template <int Width> struct HeldRows<float, Width> : WarpRows<float, Width> {
    using WarpRows<float, Width>::WarpRows;
};

// On tensor cores; the layout is that of D in mma.cuh. sum[n][e] is row(slot(e)), column(n, e);
// LANES neighbours share a row. Run: not used here.
template <typename T, int N, int Run> struct Piece {
    static_assert(N % 16 == 0, "columns in pairs of instructions");
    static constexpr int SLOTS = 2, LANES = 4;
    float sum[N / 8][4] = {};

    __device__ static int slot(int e) { return e / 2; }
    __device__ static int row(int slot) { return lane_id() / 4 + 8 * slot; }
    __device__ static int column(int n, int e) { return 8 * n + lane_id() % 4 * 2 + e % 2; }

    // Adds left right^T: 16 rows of left (WarpRows or HeldRows), N rows of right.
    template <typename Left, int Width>
    __device__ void add_dots(const Left &left, const RowTile<T, N, Width> &right) {
        constexpr int STRIDE = Width + 8;
        int lane = lane_id(), odd = lane / 8 % 2, upper = lane / 16;
        const T *other = right.values + (lane % 8 + 8 * upper) * STRIDE + 8 * odd;
        #pragma unroll Left::UNROLL
        for (int k = 0; k < Width; k += 16) {
            unsigned a[4], b[4];
            left.piece(a, k);
            for (int n = 0; n < N / 8; n += 2) {
                load_matrices<false>(b, other + 8 * n * STRIDE + k);
                mma_16x8x16<T>(sum[n], a, {b[0], b[1]});
                mma_16x8x16<T>(sum[n + 1], a, {b[2], b[3]});
            }
        }
    }

    // Adds left right. left: sums of this warp, which are rounded to T in place. right: K rows in
    // shared memory. No scratch memory is needed.
    template <int K>
    __device__ void add_product(const Piece<T, K, 1> &left, const RowTile<T, K, N> &right, T *) {
        constexpr int STRIDE = N + 8;
        int lane = lane_id();
        const T *other = right.values + lane % 16 * STRIDE + lane / 16 * 8;
        for (int k = 0; k < K / 8; k += 2) {
            unsigned a[4], b[4];
            for (int i = 0; i < 4; ++i)
                a[i] = pack<T>(left.sum[k + i / 2][i % 2 * 2], left.sum[k + i / 2][i % 2 * 2 + 1]);
            for (int n = 0; n < N / 8; n += 2) {
                load_matrices<true>(b, other + 8 * k * STRIDE + 8 * n);
                mma_16x8x16<T>(sum[n], a, {b[0], b[1]});
                mma_16x8x16<T>(sum[n + 1], a, {b[2], b[3]});
            }
        }
    }

    // Adds left^T right: 16 columns of left starting at `row`, N columns of right starting at
    // `column`.
    template <int K, int Rows, int Width>
    __device__ void add_turned(const RowTile<T, K, Rows> &left, int row,
                               const RowTile<T, K, Width> &right, int column) {
        int lane = lane_id(), odd = lane / 8 % 2, upper = lane / 16;
        const T *own = left.values + (lane % 8 + 8 * upper) * left.STRIDE + row + 8 * odd;
        const T *other = right.values + lane % 16 * right.STRIDE + column + 8 * upper;
        for (int k = 0; k < K; k += 16) {
            unsigned a[4], b[4];
            load_matrices<true>(a, own + k * left.STRIDE);
            for (int n = 0; n < N / 8; n += 2) {
                load_matrices<true>(b, other + k * right.STRIDE + 8 * n);
                mma_16x8x16<T>(sum[n], a, {b[0], b[1]});
                mma_16x8x16<T>(sum[n + 1], a, {b[2], b[3]});
            }
        }
    }

    // Writes the sums, rounded to T, to the warp's rows of a tile.
    template <int Rows> __device__ void put(const RowTile<T, Rows, N> &to) const {
        T *own = to.values + threadIdx.x / 32 * 16 * to.STRIDE;
        for (int n = 0; n < N / 8; ++n)
            for (int e = 0; e < 4; e += 2)
                *reinterpret_cast<unsigned *>(own + row(slot(e)) * to.STRIDE + column(n, e)) =
                    pack<T>(sum[n][e], sum[n][e + 1]);
    }
};

// With multiply-adds. A lane holds 4 rows of N / 8 columns, of which Run are side by side. Run is 1
// if columns are rows of a tile: neighbouring lanes then read different banks. Run is 4 if columns
// are read along a row, 16 bytes at once.
template <int N, int Run> struct Piece<float, N, Run> {
    static_assert(N % (8 * Run) == 0, "8 lanes share a row");
    static constexpr int SLOTS = 4, LANES = 8;
    float sum[N / 8][4] = {};

    __device__ static int slot(int e) { return e; }
    __device__ static int row(int slot) { return lane_id() / 8 + 4 * slot; }
    __device__ static int column(int n, int = 0) {
        return n / Run * 8 * Run + lane_id() % 8 * Run + n % Run;
    }

    template <typename Left, int Width>
    __device__ void add_dots(const Left &left, const RowTile<float, N, Width> &right) {
        constexpr int STRIDE = Width + 4;
        #pragma unroll 1  // an iteration is long enough; registers are scarce
        for (int k = 0; k < Width; k += 4) {
            __align__(16) float own[4][4], other[4];
            for (int e = 0; e < 4; ++e) copy_4(own[e], left.rows + row(e) * STRIDE + k);
            for (int n = 0; n < N / 8; ++n) {
                copy_4(other, right.values + column(n) * STRIDE + k);
                for (int e = 0; e < 4; ++e)
                    for (int i = 0; i < 4; ++i) sum[n][e] += own[e][i] * other[i];
            }
        }
    }

    // left goes through scratch memory from lane to lane, in the layout that `put` writes.
    template <int K>
    __device__ void add_product(const Piece<float, K, 1> &left, const RowTile<float, K, N> &right,
                                float *scratch) {
        constexpr int STRIDE = N + 4;
        left.put(RowTile<float, 16, K>{scratch});
        scratch += threadIdx.x / 32 * 16 * (K + 4);
        __syncwarp();
        for (int k = 0; k < K; k += 4) {
            __align__(16) float own[4][4], other[4];
            for (int e = 0; e < 4; ++e) copy_4(own[e], scratch + row(e) * (K + 4) + k);
            for (int i = 0; i < 4; ++i)
                for (int n = 0; n < N / 8; n += 4) {
                    copy_4(other, right.values + (k + i) * STRIDE + column(n));
                    for (int m = 0; m < 4; ++m)
                        for (int e = 0; e < 4; ++e) sum[n + m][e] += own[e][i] * other[m];
                }
        }
        __syncwarp();  // before the next product's left overwrites it
    }

    template <int K, int Rows, int Width>
    __device__ void add_turned(const RowTile<float, K, Rows> &left, int first_row,
                               const RowTile<float, K, Width> &right, int first_column) {
        for (int k = 0; k < K; ++k) {
            __align__(16) float own[4], other[4];
            for (int e = 0; e < 4; ++e) own[e] = left.values[k * left.STRIDE + first_row + row(e)];
            for (int n = 0; n < N / 8; n += 4) {
                copy_4(other, right.values + k * right.STRIDE + first_column + column(n));
                for (int m = 0; m < 4; ++m)
                    for (int e = 0; e < 4; ++e) sum[n + m][e] += own[e] * other[m];
            }
        }
    }

    template <int Rows> __device__ void put(const RowTile<float, Rows, N> &to) const {
        float *own = to.values + threadIdx.x / 32 * 16 * to.STRIDE;
        for (int n = 0; n < N / 8; ++n)
            for (int e = 0; e < 4; ++e) own[row(e) * to.STRIDE + column(n)] = sum[n][e];
    }
};

// Writes factor times a warp's piece, whose first element is (row, column) of the head.
template <typename T, int N, typename Out>
__device__ inline void store_rows(const Piece<T, N, 4> &piece, const HeadRows<Out> &to, int row,
                                  int column, float factor) {
    for (int n = 0; n < N / 8; ++n)
        for (int e = 0; e < 4; ++e) {
            int i = row + piece.row(piece.slot(e)), j = column + piece.column(n, e);
            if (i < to.tokens && j < to.width)
                to.x[size_t(i) * to.stride + j] = from_float<Out>(factor * piece.sum[n][e]);
        }
}

// The same for the head of a job; wide: whether the array holds floats, whatever T is.
template <typename T, int N>
__device__ inline void store(const Piece<T, N, 4> &piece, const Heads<T> &to, const Job &job,
                             int row, int column, bool wide, float factor) {
    if (wide) {
        Heads<float> floats{reinterpret_cast<float *>(to.x), to.apart, to.stride, to.tokens,
                            to.width};
        store_rows(piece, floats.of(job.sequence, job.head), row, column, factor);
    } else {
        store_rows(piece, to.of(job.sequence, job.head), row, column, factor);
    }
}
