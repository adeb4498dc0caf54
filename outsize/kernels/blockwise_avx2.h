// Passes of blockwise.cpp by eight numbers at a time.

#pragma once

#include <immintrin.h>

#include "blockwise.h"

namespace outsize::blockwise {

constexpr int LANES = 8, GROUPS = 4, STEP = GROUPS * LANES;
constexpr int64_t PIECE = 256;  // numbers that are rounded in one go

inline __m256 all(float x) { return _mm256_set1_ps(x); }
inline __m256i all(int32_t x) { return _mm256_set1_epi32(x); }
inline __m256i bits(__m256 x) { return _mm256_castps_si256(x); }

inline __m256 load(const float* x) { return _mm256_loadu_ps(x); }
inline __m256 load(const bfloat16* x) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

inline __m256i load(const int32_t* x) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(x));
}

inline void store(uint8_t* to, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
}
inline void store(int32_t* to, __m256i x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), x);
}
inline void store(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
inline void store(bfloat16* to, __m256 x) {  // as narrow<bfloat16>
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits(x), 16), all(1));
    const __m256i up = _mm256_add_epi32(bits(x), _mm256_add_epi32(odd, all(0x7fff)));
    const __m256i nan = bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i y = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), all(0x7fc0), nan);
    const __m128i low = _mm256_castsi256_si128(y), high = _mm256_extracti128_si256(y, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
}

// Eight loads: a gather takes longer on many processors.
inline __m256 look(const float* t, const uint8_t* c) {
    return _mm256_setr_ps(t[c[0]], t[c[1]], t[c[2]], t[c[3]], t[c[4]], t[c[5]], t[c[6]], t[c[7]]);
}

inline float largest(__m256 x) {
    float each[LANES], most = 0.0f;
    _mm256_storeu_ps(each, x);
    for (const float one : each) most = one > most ? one : most;
    return most;
}

// The new moments of a block's numbers, those before `from` are there, STEP at a time; gives up to
// where. Operation by operation those of `begin`. Pointers and numbers are copies: nothing that is
// written could be part of them.
template <class W, class G>
int64_t moments_lanes(Block<W, G>& b, int64_t from, int64_t n, const Codes& first,
                      const Codes& second, Numbers a) {
    const int64_t done = from + (n - from) / STEP * STEP;
    if (done == from) return done;
    const __m256 old1 = all(b.old1), beta1 = all(a.beta1), rest1 = all(a.rest1);
    const __m256 old2 = all(b.old2), beta2 = all(a.beta2), rest2 = all(a.rest2);
    __m256 most1 = all(b.most1), most2 = all(b.most2);
    const G* const g = b.g;
    const uint8_t *const c1 = b.c1, *const c2 = b.c2;
    const float *const table1 = first.values, *const table2 = second.values;
    float *const m = b.m, *const v = b.v, *const d = b.d;
    for (int64_t i = from; i < done; i += LANES) {
        const __m256 x = load(g + i);
        __m256 mean = _mm256_mul_ps(look(table1, c1 + i), old1);
        mean = _mm256_add_ps(_mm256_mul_ps(mean, beta1), _mm256_mul_ps(x, rest1));
        store(m + i, mean);
        most1 = _mm256_max_ps(_mm256_andnot_ps(all(-0.0f), mean), most1);  // a NaN leaves what was
        __m256 square = _mm256_mul_ps(look(table2, c2 + i), old2);
        square = _mm256_add_ps(_mm256_mul_ps(square, beta2),
                               _mm256_mul_ps(_mm256_mul_ps(x, x), rest2));
        store(v + i, square);
        most2 = _mm256_max_ps(square, most2);
        const __m256 root = _mm256_mul_ps(_mm256_sqrt_ps(square), all(a.root));
        store(d + i, _mm256_add_ps(root, all(a.eps)));
    }
    b.most1 = largest(most1);
    b.most2 = largest(most2);
    return done;
}
// Of a piece: magnitudes, their decades, and a byte each, in the order of `joined`, that is -1 for what
// is negative or, without signs, has the code of 1.
struct Placed {
    alignas(64) float y[PIECE + 16];
    alignas(64) int32_t decade[PIECE + 16];
    alignas(64) uint8_t extreme[PIECE];
};

// A half of each number of four vectors, as bytes: by turns of a vector and the next one.
template <bool UPPER>
inline __m256i joined(const __m256i* x) {
    const auto two = [](__m256i even, __m256i odd) {
        return _mm256_blend_epi16(UPPER ? _mm256_srli_epi32(even, 16) : even, odd, 0xaa);
    };
    const __m256i low = two(x[0], x[1]), high = two(x[2], x[3]);
    return UPPER ? _mm256_packus_epi16(low, high) : _mm256_packs_epi16(low, high);
}

// Such bytes in the order of their numbers.
inline __m256i ordered(__m256i x) {
    const __m256i turns =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m256i halves = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x, turns), halves);
}

// The decades of `n` numbers, times `by`. A table that compilers read anew for every pick takes twice
// the time. beside: done for every vector, as quotients have a unit of their own.
template <bool SIGNED, class F>
inline void place(const float* x, float by, int64_t n, const Decades& decades, Placed& to,
                  F beside) {
    const __m256i low = all(decades.low << 16 | 0xffff), log = all(decades.log << 16);
    const __m256 factor = all(by), one = all(decades.one);
    __m256 from = load(decades.from);
    asm("" : "+x"(from));
    for (int64_t i = 0; i < n; i += STEP) {
        __m256i extreme[GROUPS];
#pragma GCC unroll 4
        for (int k = 0; k < GROUPS; ++k) {
            const int64_t at = i + k * LANES;
            __m256 y = _mm256_mul_ps(load(x + at), factor);
            if (SIGNED) {  // ties go to the lower code: a negative number is as the next larger one
                extreme[k] = bits(_mm256_cmp_ps(y, all(-TINY), _CMP_LE_OQ));
                y = _mm256_andnot_ps(all(-0.0f), y);
                y = _mm256_castsi256_ps(_mm256_sub_epi32(bits(y), extreme[k]));
            } else {
                extreme[k] = bits(_mm256_cmp_ps(y, one, _CMP_GT_OQ));
            }
            __m256i d = _mm256_mulhi_epu16(_mm256_subs_epu16(bits(y), low), log);
            d = _mm256_srli_epi32(d, 16);
            const __m256 least = _mm256_permutevar8x32_ps(from, d);
            d = _mm256_add_epi32(d, bits(_mm256_cmp_ps(y, least, _CMP_LE_OQ)));
            store(to.y + at, y);
            store(to.decade + at, d);
            beside(at);
        }
        store(to.extreme + i, joined<false>(extreme));
    }
}

// The codes of STEP numbers: of their sums, less those of zero, that are no more than 256.
template <bool SIGNED>
inline __m256i codes_of(const __m256i* sums, __m256i extreme) {
    const __m256i code = joined<true>(sums), one = _mm256_set1_epi8(1);
    if (!SIGNED) return ordered(_mm256_sub_epi8(_mm256_subs_epu8(code, one), extreme));
    const __m256i zero = _mm256_set1_epi8(SIGNED_ZERO);
    const __m256i less = _mm256_subs_epu8(zero, _mm256_max_epu8(code, one));  // and none is zero
    return ordered(_mm256_blendv_epi8(_mm256_add_epi8(code, zero), less, extreme));
}

// The codes of the same numbers.
template <bool SIGNED>
inline void name(const float* x, float by, int64_t n, const Table& table, const Placed& placed,
                 uint8_t* c) {
    const __m256 rest = all(table.decades.rest), limit = all(table.decades.limit);
    const __m256i most = all(table.decades.near);
    __m256 slope = load(table.decades.slope);
    asm("" : "+x"(slope));
    for (int64_t i = 0; i < n; i += STEP) {
        __m256i sums[GROUPS];
#pragma GCC unroll 4
        for (int k = 0; k < GROUPS; ++k) {
            const int64_t at = i + k * LANES;
            const __m256i d = load(placed.decade + at);
            const __m256 own = _mm256_permutevar8x32_ps(slope, d);
            __m256 z = _mm256_fmadd_ps(load(placed.y + at), own, rest);
            z = _mm256_min_ps(limit, z);  // a NaN stays one, or is next to 0: near
            const __m256i more = _mm256_add_epi32(bits(z), _mm256_slli_epi32(d, 23));
            sums[k] = _mm256_cvtps_epi32(_mm256_castsi256_ps(more));
        }
        const __m256i extreme = load(reinterpret_cast<const int32_t*>(placed.extreme + i));
        store(c + i, codes_of<SIGNED>(sums, extreme));
        const __m256i least = _mm256_min_epu16(_mm256_min_epu16(sums[0], sums[1]),
                                               _mm256_min_epu16(sums[2], sums[3]));
        const __m256i any = _mm256_subs_epu16(most, least);
        if (__builtin_expect(_mm256_testz_si256(any, any), 1)) continue;
        for (int k = 0; k < GROUPS; ++k) {
            const __m256i digits = _mm256_and_si256(sums[k], all(0xffff));
            const __m256i near = _mm256_cmpgt_epi32(most, digits);
            int left = _mm256_movemask_ps(_mm256_castsi256_ps(near));
            for (; left; left &= left - 1) {
                const int64_t at = i + k * LANES + __builtin_ctz(left);
                c[at] = table.codes.of(x[at] * by);
            }
        }
    }
}

// The weights of a block's numbers from `from`, and the codes of their moments. Several passes, as a
// processor looks some tens of operations ahead: in none waits one for many others.
template <class W, class G>
void finish_lanes(Block<W, G>& b, int64_t from, int64_t n, float by1, float by2, const Table& first,
                  const Table& second, Numbers a) {
    Placed placed;
    const __m256 keep = all(a.keep), rate = all(a.rate);
    for (int64_t i = from; i < n; i += PIECE) {
        const int64_t here = n - i < PIECE ? n - i : PIECE;
        W* const w = b.w + i;
        const float *const m = b.m + i, *const v = b.v + i, *const d = b.d + i;
        const auto weights = [&](int64_t at) {
            const __m256 step = _mm256_mul_ps(_mm256_div_ps(load(m + at), load(d + at)), rate);
            store(w + at, _mm256_sub_ps(_mm256_mul_ps(load(w + at), keep), step));
        };
        place<true>(m, by1, here, first.decades, placed, [](int64_t) {});
        name<true>(m, by1, here, first, placed, b.c1 + i);
        place<false>(v, by2, here, second.decades, placed, weights);
        name<false>(v, by2, here, second, placed, b.c2 + i);
    }
}

}  // namespace outsize::blockwise
