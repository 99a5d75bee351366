// libcublas.so.13: the products that mpipar and CuPy ask for.
#include "products.h"

using namespace machine;

struct Handle {
    void *stream = nullptr;
    int math = 0, pointers = 0;
};
static Handle *of(void *handle) { return static_cast<Handle *>(handle); }

API int cublasCreate_v2(void **handle) { return *handle = new Handle, OK; }
API int cublasDestroy_v2(void *handle) { return delete of(handle), OK; }
API int cublasGetVersion_v2(void *, int *version) { return *version = 130000, OK; }
API int cublasSetStream_v2(void *handle, void *stream) { return of(handle)->stream = stream, OK; }
API int cublasGetStream_v2(void *handle, void **stream) { return *stream = of(handle)->stream, OK; }
API int cublasSetMathMode(void *handle, int mode) { return of(handle)->math = mode, OK; }
API int cublasGetMathMode(void *handle, int *mode) { return *mode = of(handle)->math, OK; }
API int cublasSetPointerMode_v2(void *handle, int mode) { return of(handle)->pointers = mode, OK; }
API int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = of(handle)->pointers, OK; }

API int cublasGemmStridedBatchedEx(
    void *handle, int a_op, int b_op, int m, int n, int k, const void *alpha, const void *a,
    int a_type, int a_leading, long long a_stride, const void *b, int b_type, int b_leading,
    long long b_stride, const void *beta, void *c, int c_type, int c_leading, long long c_stride,
    int batch, int compute, int) {
    count("product");
    if (m < 0 || n < 0 || k < 0 || a_leading < std::max(1, a_op ? k : m) ||
        b_leading < std::max(1, b_op ? n : k) || c_leading < std::max(1, m))
        return INVALID_VALUE;
    bool wide = compute == COMPUTE_64F || compute == COMPUTE_64F_PEDANTIC;
    bool narrow = a_type == HALF || a_type == BFLOAT16;
    bool known = wide ? a_type == DOUBLE && c_type == DOUBLE
                      : (a_type == FLOAT && c_type == FLOAT) ||
                            (narrow && (c_type == a_type || c_type == FLOAT));
    if (!known || a_type != b_type) return NOT_SUPPORTED;
    bool tf32 = a_type == FLOAT && (compute == COMPUTE_32F_TF32 || of(handle)->math == TF32_MATH);
    auto scalar = [&](const void *x) { return load(x, wide ? DOUBLE : FLOAT, 0); };
    double scale = scalar(alpha), kept = scalar(beta);
    submit(of(handle)->stream, [=] {
        for (long long i = 0; i < batch; ++i) {
            auto at = [&](const void *x, long long stride, int type) {
                return static_cast<const char *>(x) + i * stride * (long long)bytes_of(type);
            };
            Matrix left{at(a, a_stride, a_type), a_type, a_leading, a_op != 0, tf32};
            Matrix right{at(b, b_stride, b_type), b_type, b_leading, b_op != 0, tf32};
            (wide ? multiply<double> : multiply<float>)(
                m, n, k, scale, left, right, kept, const_cast<char *>(at(c, c_stride, c_type)),
                c_type, c_leading);
        }
    });
    return OK;
}

API int cublasGemmEx(void *handle, int a_op, int b_op, int m, int n, int k, const void *alpha,
                     const void *a, int a_type, int a_leading, const void *b, int b_type,
                     int b_leading, const void *beta, void *c, int c_type, int c_leading,
                     int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(handle, a_op, b_op, m, n, k, alpha, a, a_type, a_leading, 0,
                                      b, b_type, b_leading, 0, beta, c, c_type, c_leading, 0, 1,
                                      compute, algorithm);
}

// The functions of one type, plain and batched.
#define PRODUCTS(LETTER, T, TYPE, COMPUTE)                                                         \
    API int cublas##LETTER##gemmStridedBatched(                                                    \
        void *handle, int a_op, int b_op, int m, int n, int k, const T *alpha, const T *a,         \
        int a_leading, long long a_stride, const T *b, int b_leading, long long b_stride,          \
        const T *beta, T *c, int c_leading, long long c_stride, int batch) {                       \
        return cublasGemmStridedBatchedEx(handle, a_op, b_op, m, n, k, alpha, a, TYPE, a_leading,  \
                                          a_stride, b, TYPE, b_leading, b_stride, beta, c, TYPE,   \
                                          c_leading, c_stride, batch, COMPUTE, 0);                 \
    }                                                                                              \
    API int cublas##LETTER##gemm_v2(void *handle, int a_op, int b_op, int m, int n, int k,         \
                                    const T *alpha, const T *a, int a_leading, const T *b,         \
                                    int b_leading, const T *beta, T *c, int c_leading) {           \
        return cublas##LETTER##gemmStridedBatched(handle, a_op, b_op, m, n, k, alpha, a,           \
                                                  a_leading, 0, b, b_leading, 0, beta, c,          \
                                                  c_leading, 0, 1);                                \
    }
PRODUCTS(S, float, FLOAT, COMPUTE_32F)
PRODUCTS(D, double, DOUBLE, COMPUTE_64F)
