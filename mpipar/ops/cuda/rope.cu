// Rotary positions (arXiv 2104.09864), in place: numbers i < d/2 and i + d/2 of a head are a point,
// which is rotated by an angle that grows with the token's position.
//
// A warp takes a token. Bytes per point of s-byte numbers: 4s (read and write two), and 8 of the
// table, which all heads and sequences share. 6 FLOPs, that is 0.3 FLOP/byte in float32, 0.4 in 16
// bits: memory-bound.
#include "rows.cuh"

// x (tokens, heads, 2 half), `stride` numbers from token to token; table (.., 2, half): cosine and
// sine by position. Token t has positions[t % period]. sign: 1 to rotate, -1 to rotate back.
template <typename T>
__global__ void __launch_bounds__(32 * WARPS)
rotate(int tokens, int half, int heads, long long stride, int period, const long long *positions,
       const float *table, float sign, T *x) {
    int token = row_of_warp();
    if (token >= tokens) return;
    const float *cosines = table + positions[token % period] * 2 * half, *sines = cosines + half;
    x += token * stride;
    for_each_of_warp<WIDE<T>>(fits<WIDE<T>>(half, cosines, x), heads * half, [&](auto at) {
        int before = at.first / half * half;  // the halves of that many heads are between the two
        T *firsts = x + before, *seconds = firsts + half;
        auto cosine = load(cosines - before, at), sine = load(sines - before, at);
        auto turn = each(at, [&](int i) { return sign * sine[i]; });
        auto first = load(firsts, at), second = load(seconds, at);
        store(firsts, at, [&](int i) { return first[i] * cosine[i] - second[i] * turn[i]; });
        store(seconds, at, [&](int i) { return second[i] * cosine[i] + first[i] * turn[i]; });
    });
}
