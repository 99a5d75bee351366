// Embeddings: rows of a table (rows, columns) looked up by ids, and the gradient of that table
// without atomics: the same bits in every run. A shard holds the ids [start, start + rows).
//
// Lookups: a block per row of the result; 2s bytes per element of s bytes, with x 3s.
// The gradient: places_by_id sorts the n ids of a microbatch, n^2 comparisons of what lies in
// shared memory; add_rows reads every element of dy once, and reads and writes each row of the
// table that occurs.
#include "common.cuh"

constexpr int SUM_HEIGHT = 8;  // threads above each other in a column

// To the type of sums, and back.
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
    for (int j = threadIdx.x; j < columns; j += Threads) y[j] = inside ? row[j] : rounded<T>(0.0f);
}

// y = x + table[positions], x (batch n, columns) with the same n positions in each n rows.
template <typename T, typename Sum, int Threads>
__global__ void __launch_bounds__(Threads)
position_forward(int columns, int n, const long long *positions, const T *table, const T *x,
                 T *y) {
    const T *row = table + positions[blockIdx.x % n] * columns;
    x += size_t(blockIdx.x) * columns;
    y += size_t(blockIdx.x) * columns;
    for (int j = threadIdx.x; j < columns; j += Threads)
        y[j] = rounded<T>(widened<Sum>(x[j]) + widened<Sum>(row[j]));
}

// order (n): the places of the ids from the lowest id to the highest, equal ones as they come. A
// thread counts what comes before its id. Grid (ceil(n / Threads)).
template <int Threads>
__global__ void __launch_bounds__(Threads)
places_by_id(int n, const long long *ids, int *order) {
    __shared__ long long tile[Threads];
    int own = blockIdx.x * Threads + threadIdx.x, before = 0;
    long long id = own < n ? ids[own] : 0;
    for (int first = 0; first < n; first += Threads) {
        int other = first + threadIdx.x, count = min(Threads, n - first);
        __syncthreads();  // the last tile has been read
        tile[threadIdx.x] = other < n ? ids[other] : 0;
        __syncthreads();
        for (int i = 0; i < count; ++i)
            before += tile[i] < id || (tile[i] == id && first + i < own);
    }
    if (own < n) order[before] = own;
}

// dtable[id - start] += the rows of dy (batch, n, columns) of that id. A block sums 32 columns of
// all rows of one id, in their order; of equal ids, the first one's block does.
// Grid (n, ceil(columns / 32)), block (32, SUM_HEIGHT).
template <typename T, typename Sum>
__global__ void __launch_bounds__(32 * SUM_HEIGHT)
add_rows(int columns, int n, int batch, const long long *ids, const int *order, const T *dy,
         long long start, long long rows, Sum *dtable) {
    __shared__ Sum sums[SUM_HEIGHT][32];
    int first = blockIdx.x, column = blockIdx.y * 32 + threadIdx.x;
    long long id = ids[order[first]], row = id - start;
    if (row < 0 || row >= rows || (first > 0 && ids[order[first - 1]] == id)) return;
    Sum sum = 0;
    if (column < columns)
        for (int i = first + threadIdx.y; i < n && ids[order[i]] == id; i += SUM_HEIGHT)
            for (int b = 0; b < batch; ++b)
                sum += widened<Sum>(dy[(size_t(b) * n + order[i]) * columns + column]);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // the sums of all threads are there
    if (threadIdx.y > 0 || column >= columns) return;
    for (int i = 1; i < SUM_HEIGHT; ++i) sum += sums[i][threadIdx.x];
    dtable[row * columns + column] += sum;
}
