// What cuBLAS and cuBLASLt share: types, and products of column-major matrices as loops.
#pragma once

#include <algorithm>

#include "queue.h"

enum { OK = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };                 // cublasStatus_t
enum Type { FLOAT = 0, DOUBLE = 1, HALF = 2, BFLOAT16 = 14 };           // cudaDataType_t
enum { COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_64F_PEDANTIC = 71 };  // cublasComputeType_t
enum { COMPUTE_32F_TF32 = 77, TF32_MATH = 3 };

inline size_t bytes_of(int type) { return type == DOUBLE ? 8 : type == FLOAT ? 4 : 2; }

static double load(const void *x, int type, size_t i) {
    switch (type) {
    case FLOAT: return static_cast<const float *>(x)[i];
    case DOUBLE: return static_cast<const double *>(x)[i];
    case HALF: return double(static_cast<const _Float16 *>(x)[i]);
    }
    unsigned bits = unsigned(static_cast<const unsigned short *>(x)[i]) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void store(void *x, int type, size_t i, double wide) {
    float value = float(wide);
    switch (type) {
    case FLOAT: static_cast<float *>(x)[i] = value; return;
    case DOUBLE: static_cast<double *>(x)[i] = wide; return;
    case HALF: static_cast<_Float16 *>(x)[i] = _Float16(value); return;
    }
    unsigned bits;
    memcpy(&bits, &value, 4);
    bits = value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    static_cast<unsigned short *>(x)[i] = static_cast<unsigned short>(bits);
}

static double rounded_to_tf32(double wide) {  // ten bits after the point, ties away from zero
    float value = float(wide);
    unsigned bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x1000) & ~0x1fffu;
    memcpy(&value, &bits, 4);
    return value;
}

struct Matrix {
    const char *at;
    int type, leading;
    bool transposed, tf32;

    double operator()(size_t row, size_t column) const {
        size_t i = transposed ? row * leading + column : column * leading + row;
        return tf32 ? rounded_to_tf32(load(at, type, i)) : load(at, type, i);
    }
};

// C (m, n) = alpha A (m, k) B (k, n) + beta C; sums have the type Sum.
template <typename Sum>
static void multiply(int m, int n, int k, double alpha, const Matrix &a, const Matrix &b,
                     double beta, char *c, int type, int leading) {
    std::vector<Sum> left(size_t(m) * k), sums(m);  // A's columns, one after another
    for (int l = 0; l < k; ++l)
        for (int i = 0; i < m; ++i) left[size_t(l) * m + i] = Sum(a(i, l));
    for (int j = 0; j < n; ++j) {
        std::fill(sums.begin(), sums.end(), Sum(0));
        for (int l = 0; l < k; ++l) {
            const Sum right = Sum(b(l, j)), *column = &left[size_t(l) * m];
            for (int i = 0; i < m; ++i) sums[i] += column[i] * right;
        }
        for (int i = 0; i < m; ++i) {
            size_t at = size_t(j) * leading + i;
            store(c, type, at, alpha * sums[i] + (beta ? beta * load(c, type, at) : 0));
        }
    }
}
