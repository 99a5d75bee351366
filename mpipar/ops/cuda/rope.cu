// Rotary positions (arXiv 2104.09864), in place: number i < d/2 and number i + d/2 of a head are a
// point, which is turned by an angle that grows with the token's position.
//
// A thread takes points as far apart as the grid has threads; neighbours take neighbours. Bytes per
// point of s-byte numbers: 4s (read and write two), and 8 of the table, which all heads and
// sequences share. 6 FLOPs: 0.3 FLOP/byte in float32, 0.4 in 16 bits, so memory decides.
#include "rows.cuh"

// x (tokens, heads, 2 half), `row` numbers from token to token; table (.., 2, half): cosine and
// sine by position. Token t has positions[t % period]. sign: 1 to turn, -1 to turn back.
template <typename T>
__global__ void rotate(long long count, int half, int heads, long long row, long long period,
                       const long long *positions, const float *table, float sign, T *x) {
    for_each_element(count, [&](long long i) {
        long long token = i / half / heads;
        const float *angle = table + positions[token % period] * 2 * half + i % half;
        T *point = x + token * row + i / half % heads * 2 * half + i % half;
        float first = to_float(point[0]), second = to_float(point[half]);
        float cosine = angle[0], sine = sign * angle[half];
        point[0] = from_float<T>(first * cosine - second * sine);
        point[half] = from_float<T>(second * cosine + first * sine);
    });
}
