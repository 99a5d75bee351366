// Embeddings: rows of a table (rows, columns) looked up by ids, and the gradient of that table
// without atomics: the same bits in every run. A shard holds the ids [start, start + rows).
//
// Lookups: a block per row of the result; 2s bytes per element of s bytes, with x 3s. The gradient:
// places_in_tiles and merge_runs sort the n ids of a microbatch in O(n log(n)^2) steps; add_rows
// reads every element of dy once, and reads and writes each row of the table that occurs.
#include "rows.cuh"

constexpr int SUM_HEIGHT = 8;  // threads of a block that share a column
template <typename T> constexpr int SUM_WIDTH = 32 * WIDE<T>;  // columns of a block

// Conversion to the type of sums, and back.
template <typename Sum, typename T> __device__ inline Sum widened(T x) {
    if constexpr (is_same<T, double>) return x;
    else return to_float(x);
}
template <typename T, typename Sum> __device__ inline T rounded(Sum x) {
    if constexpr (is_same<T, double>) return x;
    else return from_float<T>(x);
}

// y (n, columns) = table[ids - start], zeros where an id belongs to another shard.
template <typename T, int Threads>
__global__ void __launch_bounds__(Threads)
embedding_forward(int columns, const long long *ids, const T *table, long long start,
                  long long rows, T *y) {
    long long id = ids[blockIdx.x] - start;
    bool inside = id >= 0 && id < rows;
    const T *row = table + (inside ? id * columns : 0);
    y += size_t(blockIdx.x) * columns;
    for_each_of_block<WIDE<T>, Threads>(fits<WIDE<T>>(columns, row, y), columns, [&](auto at) {
        Stored<T, at.width> found;
        found.words = {};
        if (inside) found = fetch(row, at);
        put(y, at, found);
    });
}

// y = x + table[positions], x (batch n, columns) with the same n positions for every n rows.
template <typename T, typename Sum, int Threads>
__global__ void __launch_bounds__(Threads)
position_forward(int columns, int n, const long long *positions, const T *table, const T *x,
                 T *y) {
    const T *row = table + positions[blockIdx.x % n] * columns;
    x += size_t(blockIdx.x) * columns;
    y += size_t(blockIdx.x) * columns;
    bool wide = fits<WIDE<T>>(columns, row, x, y);
    for_each_of_block<WIDE<T>, Threads>(wide, columns, [&](auto at) {
        auto own = fetch(x, at), place = fetch(row, at);
#pragma unroll
        for (int i = 0; i < at.width; ++i)
            own.values[i] = rounded<T>(widened<Sum>(own.values[i]) + widened<Sum>(place.values[i]));
        put(y, at, own);
    });
}

// order (n): a run for each tile of Threads ids: their places from the lowest id to the highest,
// with equal ids in their given order. A thread counts what comes before its id. Grid
// (ceil(n / Threads)).
template <int Threads>
__global__ void __launch_bounds__(Threads)
places_in_tiles(int n, const long long *ids, int *order) {
    __shared__ long long tile[Threads];
    int first = blockIdx.x * Threads, own = first + threadIdx.x, before = 0;
    long long id = own < n ? ids[own] : 0;
    tile[threadIdx.x] = id;
    __syncthreads();  // all ids have been read
    for (int i = 0; i < min(Threads, n - first); ++i)
        before += tile[i] < id || (tile[i] == id && i < int(threadIdx.x));
    if (own < n) order[first + before] = own;
}

// to (n) = the runs of `from`, with each two neighbours of `length` places merged. A thread takes a
// place: it goes after all before it in its own run, and after what a binary search finds before it
// in the other run. Of equal ids, those of the first run come first. Grid (ceil(n / block)).
__global__ void merge_runs(int n, int length, const long long *ids, const int *from, int *to) {
    int own = blockIdx.x * blockDim.x + threadIdx.x;
    if (own >= n) return;
    bool second = own / length % 2;
    int begin = own / length * length, other = second ? begin - length : min(begin + length, n);
    int low = other, high = min(other + length, n);
    long long id = ids[from[own]];
    while (low < high) {
        int middle = low + (high - low) / 2;
        long long there = ids[from[middle]];
        if (there < id || (second && there == id)) low = middle + 1;
        else high = middle;
    }
    to[own + low - (second ? begin : other)] = from[own];
}

// dtable[id - start] += the rows of dy (batch, n, columns) of that id. A block sums SUM_WIDTH
// columns of all rows of one id, in their order; of equal ids, the first one's block does it. Grid
// (n, ceil(columns / SUM_WIDTH)), block (32, SUM_HEIGHT).
template <typename T, typename Sum>
__global__ void __launch_bounds__(32 * SUM_HEIGHT)
add_rows(int columns, int n, int batch, const long long *ids, const int *order, const T *dy,
         long long start, long long rows, Sum *dtable) {
    __shared__ Sum shared[SUM_HEIGHT][SUM_WIDTH<T>];
    Sum(*sums)[SUM_WIDTH<T>] = shared;
    int first = blockIdx.x, begin = blockIdx.y * SUM_WIDTH<T>;
    int end = min(begin + SUM_WIDTH<T>, columns);
    long long id = ids[order[first]], row = id - start;
    if (row < 0 || row >= rows || (first > 0 && ids[order[first - 1]] == id)) return;
    bool wide = fits<WIDE<T>>(columns, dy, dtable);
    for_each_pack<WIDE<T>>(wide, threadIdx.x, 32, begin, end, [&](auto at) {
        Sum own[at.width] = {};
        for (int i = first + threadIdx.y; i < n && ids[order[i]] == id; i += SUM_HEIGHT)
            for (int b = 0; b < batch; ++b) {
                auto x = fetch(dy + (size_t(b) * n + order[i]) * columns, at);
#pragma unroll
                for (int j = 0; j < at.width; ++j) own[j] += widened<Sum>(x.values[j]);
            }
#pragma unroll
        for (int j = 0; j < at.width; ++j) sums[threadIdx.y][at.first - begin + j] = own[j];
    });
    __syncthreads();  // the sums of all threads have been written
    if (threadIdx.y > 0) return;
    dtable += row * columns;
    for_each_pack<WIDE<T>>(wide, threadIdx.x, 32, begin, end, [&](auto at) {
        auto total = fetch(dtable, at);
#pragma unroll
        for (int j = 0; j < at.width; ++j) {
            Sum sum = sums[0][at.first - begin + j];
            for (int i = 1; i < SUM_HEIGHT; ++i) sum += sums[i][at.first - begin + j];
            total.values[j] += sum;
        }
        put(dtable, at, total);
    });
}
