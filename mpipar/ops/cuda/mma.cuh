// What CUDA C++ cannot express: tensor-core products, matrix loads, asynchronous copies and dynamic
// shared memory, as functions. All inline PTX of mpipar is in this file (PTX ISA, sm_80+).
//
// An mma tile is A (16, 16) times B (16, 8), added to D (16, 8) in float32. The 32 lanes of a warp
// hold it in pieces, two 16-bit values (neighbours along k) a register; lane = 4 * g + t:
//   A  a[0] row g, k 2t and 2t+1;  a[1] row g+8;  a[2] row g, k 2t+8 and 2t+9;  a[3] row g+8
//   B  b[0] column g, k 2t and 2t+1;              b[1] column g, k 2t+8 and 2t+9
//   D  d[0] d[1] row g, columns 2t and 2t+1;      d[2] d[3] row g+8
#pragma once

#include "common.cuh"

// D += A B. All lanes of the warp must call it. T: bf16 or half.
template <typename T>
__device__ inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (is_same<T, bf16>) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        static_assert(is_same<T, half>, "tensor cores multiply bf16 or half here");
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

__device__ inline unsigned shared_address(const void *at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Loads four 8x8 matrices of 16-bit values from shared memory, one register each: lane l provides
// the address of the 16-byte row l % 8 of matrix l / 8. Lane 4g+t gets (row g, columns 2t and
// 2t+1); transposed: (rows 2t and 2t+1, column g). All lanes of the warp must call it.
template <bool Transposed>
__device__ inline void load_matrices(unsigned (&r)[4], const void *row) {
    if constexpr (Transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row)) : "memory");
}

// Copies 16 bytes from global to shared memory in the background; if not valid, writes zeros and
// reads nothing. Both addresses are multiples of 16 in either case. The thread itself sees the copy
// after wait_copies, the others only after a barrier that follows.
__device__ inline void start_copy_16(void *to_shared, const void *from_global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(to_shared)), "l"(from_global), "r"(valid ? 16 : 0)
                 : "memory");
}

// Closes the group of copies that this thread has started since the last call.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest `Pending` closed groups of this thread are still pending.
template <int Pending> __device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// The block's dynamic shared memory, aligned to 128 bytes.
__device__ inline void *dynamic_shared() {
    extern __shared__ __align__(128) unsigned char bytes[];
    return bytes;
}
