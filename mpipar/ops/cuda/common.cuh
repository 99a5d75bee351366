// Shared by all kernels: types, conversions, sums over a warp and a block.
//
// Conventions of the .cu files of this folder:
// - A kernel is a template over its types and its tile sizes, which static_asserts restrict; it is
//   instantiated by name, as "gemm_tile<float, false, false, 64, 64, 8>". kernels.py lists the
//   instantiations that are used: what is listed there is compiled and tested.
// - The head comment says what is computed, how the work is divided, the bytes moved per element,
//   and the FLOPs per byte. Any sizes are legal: the edges are guarded, not padded.
// - A file includes only common.cuh and mma.cuh, by #include "...". Inline PTX and dynamic shared
//   memory are used only through mma.cuh: the tests run these sources on a CPU with another
// mma.cuh.
// - There is no __syncthreads, shuffle or mma where some threads of the block (warp) have returned
//   or are inactive. Shuffles take FULL_MASK; a block's size is a multiple of 32 threads.
// - Sums and statistics are float whatever the storage type. Offsets of arrays that can hold more
//   than 2^31 elements are size_t. There are no std headers, because NVRTC has none.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using bf16 = __nv_bfloat16;
using half = __half;

constexpr unsigned FULL_MASK = 0xffffffffu;

template <typename A, typename B> constexpr bool is_same = false;
template <typename A> constexpr bool is_same<A, A> = true;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
// The maximum of an empty set: every finite number is at least that, and no difference is inf -
// inf.
__device__ inline float lowest() { return __int_as_float(0xff7fffff); }

// Conversion to float and back; the latter rounds to nearest even.
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(half x) { return __half2float(x); }
template <typename T> __device__ inline T from_float(float x) {
    if constexpr (is_same<T, bf16>) return __float2bfloat16(x);
    else if constexpr (is_same<T, half>) return __float2half(x);
    else return x;
}

// Two neighbours in one 32-bit register, the first in its lower half: mma tiles consist of these.
template <typename T> __device__ inline unsigned pack(float first, float second) {
    static_assert(sizeof(T) == 2, "two 16-bit values make a register");
    union { T pair[2]; unsigned bits; } both = {{from_float<T>(first), from_float<T>(second)}};
    return both.bits;
}

// Copies four values in one instruction; both addresses are multiples of 16 bytes.
__device__ inline void copy_4(float *to, const float *from) {
    *reinterpret_cast<float4 *>(to) = *reinterpret_cast<const float4 *>(from);
}

// Results over all lanes of a warp, or over each `Lanes` neighbours, in every one of them.
template <int Lanes = 32> __device__ inline float warp_sum(float x) {
    for (int flip = Lanes / 2; flip > 0; flip /= 2) x += __shfl_xor_sync(FULL_MASK, x, flip);
    return x;
}
template <int Lanes = 32> __device__ inline float warp_max(float x) {
    for (int flip = Lanes / 2; flip > 0; flip /= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, flip));
    return x;
}
