// Stands in for CUDA's header: half precision as the compiler's _Float16.
#pragma once

struct __half { unsigned short bits; };
struct __align__(4) __half2 { __half x, y; };

inline float __half2float(__half x) {
    _Float16 y;
    memcpy(&y, &x, 2);
    return float(y);
}
inline __half __float2half(float x) {
    _Float16 y = _Float16(x);
    __half z;
    memcpy(&z, &y, 2);
    return z;
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
