// Accesses to neighbours in one load or store of 16 bytes, which is how a GPU moves memory fastest.
//
// A kernel says once what happens `at` some neighbours. for_each_pack hands out as many as 16 bytes
// hold if `fits` found that the arrays allow it, and single ones otherwise, so there is one formula
// and no edge inside of a row. `fits` is the same for all rows of an array, so that a row's sums do
// not depend on its place among them.
#pragma once

#include "common.cuh"

template <typename T> constexpr int WIDE = 16 / sizeof(T);

// Width neighbours of an array, starting at `first`.
template <int Width, typename Index> struct At {
    static constexpr int width = Width;
    Index first;
};

// Their values.
template <int Width> struct Pack {
    static constexpr int width = Width;
    float values[Width];
    __device__ float operator[](int i) const { return values[i]; }
};

// The same in memory, and the words that move it.
template <int Bytes> struct Words { uint4 all[Bytes / 16]; };
template <> struct Words<8> { uint2 all[1]; };
template <> struct Words<4> { unsigned all[1]; };
template <> struct Words<2> { unsigned short all[1]; };

template <typename T, int Width> union Stored {
    Words<Width * sizeof(T)> words;
    T values[Width];
    __device__ Stored() {}
};

// value(i) for each of the neighbours.
template <int Width, typename Index, typename Value>
__device__ inline Pack<Width> each(At<Width, Index>, Value value) {
    Pack<Width> pack;
#pragma unroll
    for (int i = 0; i < Width; ++i) pack.values[i] = value(i);
    return pack;
}

// Reads what is there, unchanged; and writes it.
template <int Width, typename Index, typename T>
__device__ inline Stored<T, Width> fetch(const T *x, At<Width, Index> at) {
    Stored<T, Width> stored;
    stored.words = *reinterpret_cast<const decltype(stored.words) *>(x + at.first);
    return stored;
}
template <int Width, typename Index, typename T>
__device__ inline void put(T *x, At<Width, Index> at, const Stored<T, Width> &stored) {
    *reinterpret_cast<Words<Width * sizeof(T)> *>(x + at.first) = stored.words;
}

template <int Width, typename Index, typename T>
__device__ inline Pack<Width> load(const T *x, At<Width, Index> at) {
    auto stored = fetch(x, at);
    return each(at, [&](int i) { return to_float(stored.values[i]); });
}

// x[at.first + i] = value(i); returns these values as they are after rounding.
template <int Width, typename Index, typename T, typename Value>
__device__ inline Pack<Width> store(T *x, At<Width, Index> at, Value value) {
    Stored<T, Width> stored;
#pragma unroll
    for (int i = 0; i < Width; ++i) stored.values[i] = from_float<T>(value(i));
    put(x, at, stored);
    return each(at, [&](int i) { return to_float(stored.values[i]); });
}

// The sum of value(i) over the neighbours.
template <int Width, typename Index, typename Value>
__device__ inline float sum(At<Width, Index>, Value value) {
    float total = value(0);
#pragma unroll
    for (int i = 1; i < Width; ++i) total += value(i);
    return total;
}

// Whether arrays with rows of `columns` elements can be read and written Wide elements at once;
// each address is the beginning of one row.
template <int Wide, typename... T>
__device__ inline bool fits(long long columns, const T *...rows) {
    return columns % Wide == 0 &&
           (... && (reinterpret_cast<size_t>(rows) % alignof(Stored<T, Wide>) == 0));
}

// Thread `own` of `threads` takes its share of the elements from `first` to before `end`.
template <int Wide, typename Index, typename Use>
__device__ inline void for_each_pack(bool wide, int own, int threads, Index first, Index end,
                                     Use use) {
    if (wide)
        for (Index i = first + own * Wide; i < end; i += threads * Wide) use(At<Wide, Index>{i});
    else
        for (Index i = first + own; i < end; i += threads) use(At<1, Index>{i});
}
