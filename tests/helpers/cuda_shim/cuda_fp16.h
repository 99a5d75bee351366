// Stands in for CUDA's header: half precision as the compiler's _Float16.
#pragma once

struct __half_raw { unsigned short x; };
struct __half {
    _Float16 value;

    __half() = default;
    __half(float x) : value(_Float16(x)) {}
    __half(double x) : __half(float(x)) {}
    __half(int x) : __half(float(x)) {}
    __half(unsigned x) : __half(float(x)) {}
    __half(long long x) : __half(float(x)) {}
    __half(unsigned long long x) : __half(float(x)) {}
    __half(__half_raw raw) { memcpy(&value, &raw.x, 2); }
    operator float() const { return float(value); }
    operator __half_raw() const {
        __half_raw raw;
        memcpy(&raw.x, &value, 2);
        return raw;
    }
};
using half = __half;
struct __align__(4) __half2 { __half x, y; };

inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline unsigned short __half_as_ushort(__half x) { return __half_raw(x).x; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
