"""cuBLAS's gemmEx and gemmStridedBatchedEx on the host; part of tests/helpers/fake_cupy.py.

It has cuBLAS's arguments, column order, rules for leading dimensions and table of types.
"""

import ctypes

import ml_dtypes
import numpy as np

CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_64F = 68, 77, 70
CUBLAS_GEMM_DEFAULT = -1
CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 0, 1, 2, 14
TYPES = {
    CUDA_R_32F: np.float32,
    CUDA_R_64F: np.float64,
    CUDA_R_16F: np.float16,
    CUDA_R_16BF: ml_dtypes.bfloat16,
}
HANDLE = 4711


def columns_first(address, kind, ld, rows, columns):
    """The matrix in memory that cuBLAS sees: element (i, j) at i + j * ld."""
    assert ld >= rows, f"leading dimension {ld}, but {rows} rows"
    dtype = np.dtype(TYPES[kind])
    memory = (ctypes.c_char * ((ld * (columns - 1) + rows) * dtype.itemsize)).from_address(address)
    return np.ndarray((rows, columns), dtype, memory, strides=(dtype.itemsize, ld * dtype.itemsize))


def tf32(x):
    """float32 values with 10 bits of mantissa, rounded to nearest."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def gemm_ex(
    handle,
    turn_a,
    turn_b,
    m,
    n,
    k,
    alpha,
    a,
    a_type,
    lda,
    b,
    b_type,
    ldb,
    beta,
    c,
    c_type,
    ldc,
    compute_type,
    algorithm,
):
    assert (handle, algorithm) == (HANDLE, CUBLAS_GEMM_DEFAULT)
    a = columns_first(a, a_type, lda, *((k, m) if turn_a else (m, k)))
    b = columns_first(b, b_type, ldb, *((n, k) if turn_b else (k, n)))
    c = columns_first(c, c_type, ldc, m, n)
    wide = np.float64 if compute_type == CUBLAS_COMPUTE_64F else np.float32
    allowed = {(np.float32, np.float32, np.float32), (np.float64, np.float64, np.float64)}
    for narrow in (np.float16, ml_dtypes.bfloat16):
        allowed |= {(narrow, np.float32, narrow), (narrow, np.float32, np.float32)}
    assert a_type == b_type
    assert (TYPES[a_type], wide, TYPES[c_type]) in allowed, "not in cuBLAS's table of types"
    a, b = (a.T if turn_a else a).astype(wide), (b.T if turn_b else b).astype(wide)
    if compute_type == CUBLAS_COMPUTE_32F_FAST_TF32:
        a, b = tf32(a), tf32(b)
    alpha, beta = (
        np.frombuffer((ctypes.c_char * wide().itemsize).from_address(at), wide)[0]
        for at in (alpha, beta)
    )
    product = alpha * (a @ b)
    c[...] = product if beta == 0 else product + beta * c.astype(wide)


def gemm_strided_batched_ex(
    handle,
    turn_a,
    turn_b,
    m,
    n,
    k,
    alpha,
    a,
    a_type,
    lda,
    a_apart,
    b,
    b_type,
    ldb,
    b_apart,
    beta,
    c,
    c_type,
    ldc,
    c_apart,
    count,
    *rest,
):
    a_step, b_step, c_step = (
        apart * np.dtype(TYPES[kind]).itemsize
        for apart, kind in ((a_apart, a_type), (b_apart, b_type), (c_apart, c_type))
    )
    for i in range(count):
        gemm_ex(
            handle,
            turn_a,
            turn_b,
            m,
            n,
            k,
            alpha,
            a + i * a_step,
            a_type,
            lda,
            b + i * b_step,
            b_type,
            ldb,
            beta,
            c + i * c_step,
            c_type,
            ldc,
            *rest,
        )
