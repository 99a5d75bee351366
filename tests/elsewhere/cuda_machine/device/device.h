// What a CUDA source finds predefined, on a CPU; nvrtc.cpp puts it before each source.
//
// Threads, barriers and shared memory are those of tests/helpers/cuda_shim. MACHINE_LOOPS: the source has no
// barrier, so its threads may run one after another, as turns of a loop.
#pragma once

#include <initializer_list>
#include <limits>
#include <type_traits>

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __CUDA_ARCH__ 900
#define __constant__ static
#define __restrict__ __restrict

#include "shim.h"

#include <math.h>
#include <stdlib.h>

#include <bit>
#include <cassert>
#include <cstddef>

#include "image.h"

#define __noinline__ __attribute__((noinline))  // after the host's headers, which use the word

inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// Fibers and loops run one at a time, so a plain read and write is whole.
template <typename T> T atomicExch(T *at, T value) { return std::exchange(*at, value); }
template <typename T> T atomicMax(T *at, T value) { return atomicExch(at, std::max(*at, value)); }
template <typename T> T atomicMin(T *at, T value) { return atomicExch(at, std::min(*at, value)); }
template <typename T> T atomicCAS(T *at, T expected, T value) {
    return atomicExch(at, *at == expected ? value : *at);
}

#ifdef MACHINE_LOOPS
namespace shim {
template <typename... P, size_t... I>
const char *loops(void (*kernel)(P...), const unsigned *shape, void **arguments,
                  std::index_sequence<I...>) {
    static Thread thread;
    static Block only({}, {1, 1, 1}, 0);
    grid_size = {shape[0], shape[1], shape[2]};
    block_size = {shape[3], shape[4], shape[5]};
    block = &only;
    current = &thread;
    auto each = [](dim3 size, uint3 &index, auto body) {
        for (index.z = 0; index.z < size.z; ++index.z)
            for (index.y = 0; index.y < size.y; ++index.y)
                for (index.x = 0; index.x < size.x; ++index.x) body();
    };
    each(grid_size, only.index, [&] {
        each(block_size, thread.index, [&] { kernel(*static_cast<P *>(arguments[I])...); });
    });
    return "";
}
}  // namespace shim
#endif

template <auto Kernel> struct MachineLaunch;
template <typename... P, void (*Kernel)(P...)> struct MachineLaunch<Kernel> {
    static constexpr size_t sizes[] = {sizeof(P)..., 0};

    static const char *run(const unsigned *shape, size_t shared_bytes, int order, void **arguments,
                           const size_t *given, size_t count) {
#ifdef MACHINE_LOOPS
        return shim::loops(Kernel, shape, arguments, std::index_sequence_for<P...>());
#else
        return shim::Launch<Kernel>::run(shape, shared_bytes, order, arguments, given, count);
#endif
    }
    static constexpr machine_kernel entry(const char *name) { return {name, run, sizes, sizeof...(P)}; }
};
template <auto Kernel> constexpr machine_kernel machine_entry(const char *name) {
    return MachineLaunch<Kernel>::entry(name);
}
