// Stands in for CUDA's header: bfloat16 is the upper half of a float, rounded to nearest even.
#pragma once

struct __nv_bfloat16 { unsigned short bits; };
struct __align__(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 x) {
    return __int_as_float(int(unsigned(x.bits) << 16));
}
inline __nv_bfloat16 __float2bfloat16(float x) {
    unsigned bits = unsigned(__float_as_int(x));
    if (x != x) return {0x7fff};
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16(x), __float2bfloat16(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 x) {
    return {__bfloat162float(x.x), __bfloat162float(x.y)};
}
