// Stands in for CUDA's header: bfloat16 is the upper half of a float, rounded to nearest even.
#pragma once

struct __nv_bfloat16 {
    unsigned short bits;

    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        unsigned all = unsigned(__float_as_int(x));
        bits = x != x ? 0x7fff : static_cast<unsigned short>((all + 0x7fff + (all >> 16 & 1)) >> 16);
    }
    __nv_bfloat16(double x) : __nv_bfloat16(float(x)) {}
    __nv_bfloat16(int x) : __nv_bfloat16(float(x)) {}
    operator float() const { return __int_as_float(int(unsigned(bits) << 16)); }
};
struct __align__(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 x;
    x.bits = bits;
    return x;
}
inline bool __hisnan(__nv_bfloat16 x) { return std::isnan(float(x)); }
inline int __hisinf(__nv_bfloat16 x) { return std::isinf(float(x)); }
