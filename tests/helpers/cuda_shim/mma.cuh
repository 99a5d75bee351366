// mpipar/ops/cuda/mma.cuh on a CPU: the same functions, computed from what the lanes exchange.
//
// A background copy is done when it is waited for, not before: a wait that is missing leaves NaN.
#pragma once

#include "common.cuh"

template <typename T>
inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    struct Piece { T a[4][2], b[2][2]; } mine;
    static_assert(sizeof(Piece) == 24);
    memcpy(mine.a, a, sizeof mine.a);
    memcpy(mine.b, b, sizeof mine.b);
    auto all = shim::exchange(mine);
    int row = shim::current->lane / 4, column = shim::current->lane % 4 * 2;
    for (int half = 0; half < 2; ++half)
        for (int t = 0; t < 4; ++t) {
            Piece left = all[4 * row + t], right[] = {all[4 * column + t], all[4 * column + 4 + t]};
            for (int k = 0; k < 2; ++k)
                for (int i = 0; i < 4; ++i)
                    d[i] += to_float(left.a[i / 2 + 2 * half][k]) *
                            to_float(right[i % 2].b[half][k]);
        }
}

template <bool Transposed> inline void load_matrices(unsigned (&r)[4], const void *row) {
    if (reinterpret_cast<uintptr_t>(row) % 16) shim::fail("a matrix row off its 16 bytes");
    auto rows = shim::exchange(static_cast<const unsigned short *>(row));
    int g = shim::current->lane / 4, t = shim::current->lane % 4;
    for (int i = 0; i < 4; ++i) {
        int first = 8 * i;
        unsigned short low = Transposed ? rows[first + 2 * t][g] : rows[first + g][2 * t];
        unsigned short high = Transposed ? rows[first + 2 * t + 1][g] : rows[first + g][2 * t + 1];
        r[i] = low | unsigned(high) << 16;
    }
    __syncwarp();
}

inline void start_copy_16(void *to_shared, const void *from_global, bool valid) {
    if ((reinterpret_cast<uintptr_t>(to_shared) | reinterpret_cast<uintptr_t>(from_global)) % 16)
        shim::fail("a copy off its 16 bytes");
    shim::current->groups.back().push_back({to_shared, from_global, valid});
}

inline void close_copies() { shim::current->groups.emplace_back(); }

template <int Pending> inline void wait_copies() {
    auto &groups = shim::current->groups;
    for (; groups.size() > Pending + 1; groups.erase(groups.begin()))
        for (const shim::Copy &one : groups.front()) {
            if (one.valid) memcpy(one.to, one.from, 16);
            else memset(one.to, 0, 16);
        }
}

inline void *dynamic_shared() { return shim::block->shared.get(); }
