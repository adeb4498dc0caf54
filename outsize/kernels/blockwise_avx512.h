// Passes of blockwise.cpp by sixteen numbers at a time, 64 in a step: where a processor looks up bytes of
// a table in registers (AVX-512 VBMI). The same bits as those of blockwise_avx2.h: of codes this was seen
// for every float32 from 2^-31 to 1 of both signs.

#pragma once

#include <immintrin.h>

#include "blockwise.h"

namespace outsize::blockwise {

constexpr int64_t WIDE = 16, WIDE_STEP = 4 * WIDE;

inline __m512 wide_all(float x) { return _mm512_set1_ps(x); }
inline __m512i wide_all(int32_t x) { return _mm512_set1_epi32(x); }
inline __m512i wide_bits(__m512 x) { return _mm512_castps_si512(x); }

inline __m512 wide_load(const float* x) { return _mm512_loadu_ps(x); }
inline __m512 wide_load(const bfloat16* x) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline __m512i wide_load(const uint8_t* x) { return _mm512_loadu_si512(x); }

inline void wide_store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
// As narrow<bfloat16>: the instruction for it drops subnormals.
inline void wide_store(bfloat16* to, __m512 x) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide_bits(x), 16), wide_all(1));
    const __m512i up = _mm512_add_epi32(wide_bits(x), _mm512_add_epi32(odd, wide_all(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i y = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, wide_all(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(y));
}

// The values of a table, in registers.
struct Values {
    __m512i part[4][4];

    explicit Values(const Planes& planes) {
        for (int k = 0; k < 4; ++k)
            for (int i = 0; i < 4; ++i) part[k][i] = wide_load(planes.bytes[k] + 64 * i);
    }

    // Of 64 codes, in their order: a byte of each at a time, which four passes then bring together
    // within parts of 128 bits. So these have four codes of each vector.
    inline __attribute__((always_inline)) void look(const uint8_t* codes, __m512 (&to)[4]) const {
        const __m512i turns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i c = _mm512_permutexvar_epi32(turns, wide_load(codes));
        const __mmask64 upper = _mm512_movepi8_mask(c);
        __m512i x[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const __m512i low = _mm512_permutex2var_epi8(part[k][0], c, part[k][1]);
            const __m512i high = _mm512_permutex2var_epi8(part[k][2], c, part[k][3]);
            x[k] = _mm512_mask_blend_epi8(upper, low, high);
        }
        const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
        const __m512i e = _mm512_unpacklo_epi8(x[2], x[3]), f = _mm512_unpackhi_epi8(x[2], x[3]);
        to[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, e));
        to[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, e));
        to[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(b, f));
        to[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(b, f));
    }
};

// The new moments of blocks' first numbers, WIDE_STEP at a time. A moment after the other, as registers
// hold one table: filling them for a block alone would cost a tenth of the pass.
template <class W, class G>
void moments_wide(Block<W, G>* blocks, int count, const Table& first, const Table& second, Numbers a) {
    {
        const Values values(first.planes);
        const __m512 beta = wide_all(a.beta1), rest = wide_all(a.rest1);
        for (Block<W, G>* b = blocks; b < blocks + count; ++b) {
            b->begun = b->n / WIDE_STEP * WIDE_STEP;
            const G* const g = b->g;  // copies: nothing that is written could be part of them
            const uint8_t* const c = b->c1;
            float* const m = b->m;
            const __m512 old = wide_all(b->old1);
            __m512 most = wide_all(0.0f);
            for (int64_t i = 0; i < b->begun; i += WIDE_STEP) {
                __m512 mean[4];
                values.look(c + i, mean);
#pragma GCC unroll 4
                for (int k = 0; k < 4; ++k) {
                    const __m512 x = wide_load(g + i + k * WIDE);
                    const __m512 kept = _mm512_mul_ps(_mm512_mul_ps(mean[k], old), beta);
                    const __m512 now = _mm512_add_ps(kept, _mm512_mul_ps(x, rest));
                    wide_store(m + i + k * WIDE, now);
                    most = _mm512_max_ps(_mm512_abs_ps(now), most);  // a NaN leaves what was
                }
            }
            b->most1 = _mm512_reduce_max_ps(most);
        }
    }
    const Values values(second.planes);
    const __m512 beta = wide_all(a.beta2), rest = wide_all(a.rest2);
    for (Block<W, G>* b = blocks; b < blocks + count; ++b) {
        const G* const g = b->g;
        const uint8_t* const c = b->c2;
        float* const v = b->v;
        const __m512 old = wide_all(b->old2);
        __m512 most = wide_all(0.0f);
        for (int64_t i = 0; i < b->begun; i += WIDE_STEP) {
            __m512 square[4];
            values.look(c + i, square);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                const __m512 x = wide_load(g + i + k * WIDE);
                const __m512 kept = _mm512_mul_ps(_mm512_mul_ps(square[k], old), beta);
                const __m512 now = _mm512_add_ps(kept, _mm512_mul_ps(_mm512_mul_ps(x, x), rest));
                wide_store(v + i + k * WIDE, now);
                most = _mm512_max_ps(now, most);
            }
        }
        b->most2 = _mm512_reduce_max_ps(most);
    }
}

// A table's lines, in registers.
struct Registers {
    __m512 slope, rest, one;
    __m512i low, log;

    explicit Registers(const Lines& x)
        : slope(_mm512_load_ps(x.slope)), rest(_mm512_load_ps(x.rest)), one(wide_all(x.one)),
          low(_mm512_set1_epi16(int16_t(x.low))), log(_mm512_set1_epi16(int16_t(x.log))) {}
};

// For four vectors, one after another: a processor looks some tens of operations ahead only.
template <class F>
inline __attribute__((always_inline)) void four(F&& what) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) what(k);
}

// For each other one of them.
template <class F>
inline __attribute__((always_inline)) void two(F&& what) {
    what(0);
    what(2);
}

// Bytes or words of two vectors, by turns or one after the other.
struct Picks {
    uint16_t upper[32];
    uint8_t second[64], third[64];

    constexpr Picks() : upper(), second(), third() {
        for (int i = 0; i < 32; ++i) upper[i] = uint16_t(i & 1 ? 32 + i : i + 1);
        for (int i = 0; i < 64; ++i) {
            second[i] = uint8_t(4 * (i & 31) + 1);
            third[i] = uint8_t(second[i] + 1);
        }
    }
};
alignas(64) constexpr Picks PICKS;

// A byte of each number of four vectors, in order.
inline __attribute__((always_inline)) __m512i picked(const __m512i* x, const uint8_t* which) {
    const __m512i picks = wide_load(which);
    const __m512i low = _mm512_permutex2var_epi8(x[0], picks, x[1]);
    const __m512i high = _mm512_permutex2var_epi8(x[2], picks, x[3]);
    return _mm512_mask_blend_epi32(0xff00, low, high);
}

// The same of bits that comparisons gave.
inline __attribute__((always_inline)) __mmask64 picked(const __mmask16 (&x)[4]) {
    return _mm512_kunpackd(_mm512_kunpackw(x[3], x[2]), _mm512_kunpackw(x[1], x[0]));
}

// The codes of those of 64 numbers that lie too near to a border for their sums to tell.
__attribute__((noinline)) inline void tell(uint64_t near, const float* x, float by, const Codes& codes,
                                           uint8_t* to) {
    for (; near; near &= near - 1) {
        const int i = __builtin_ctzll(near);
        to[i] = codes.of(x[i] * by);
    }
}

// Of 64 numbers, which may lie too near to a border.
struct Near {
    __mmask64 edge;  // next to a fifth more than a power of two
    bool any;        // some are just above a whole number

    inline __attribute__((always_inline)) bool some() const {
        return __builtin_expect(any | (edge != 0), 0);
    }

    // Those that do, by their sums.
    inline __attribute__((always_inline)) uint64_t all(const __m512i* sums) const {
        __mmask16 low[4];
        four([&](int k) { low[k] = _mm512_testn_epi32_mask(sums[k], wide_all(0xffff & -Lines::NEAR)); });
        return edge | picked(low);
    }
};

// The whole parts of sums, a fifth more than powers of two being theirs.
inline __attribute__((always_inline)) __m512i whole(const __m512i* sums, Near& near) {
    const __m512i code = picked(sums, PICKS.third), upper = picked(sums, PICKS.second);
    const __m512i one = _mm512_set1_epi8(1), fifth = _mm512_set1_epi8(Lines::FIFTH);
    const __mmask64 power = _mm512_cmpeq_epi8_mask(_mm512_popcnt_epi8(code), one);
    const __mmask64 less = _mm512_mask_cmplt_epu8_mask(power, upper, fifth);
    const __m512i least = _mm512_min_epu16(_mm512_min_epu16(sums[0], sums[1]),
                                           _mm512_min_epu16(sums[2], sums[3]));
    near.edge = _mm512_mask_cmpeq_epu8_mask(power, upper, fifth);
    near.any = _mm512_mask_cmplt_epu16_mask(0x55555555, least, _mm512_set1_epi16(Lines::NEAR));
    return _mm512_mask_sub_epi8(code, less, code, one);
}

// Four vectors on the way to their sums, an operation of one at a time. Which decade a number has is known
// for two vectors at once.
struct Sums {
    const Registers& lines;
    __m512 y[4], slope[4], rest[4];
    __m512i decade[4];

#define STAGE inline __attribute__((always_inline)) void
    STAGE scale(int k, const float* x, float by) {
        y[k] = _mm512_mul_ps(wide_load(x + k * WIDE), wide_all(by));
    }
    STAGE halves(int k, __m512i upper) {
        decade[k] = _mm512_permutex2var_epi16(wide_bits(y[k]), upper, wide_bits(y[k + 1]));
    }
    STAGE less(int k) { decade[k] = _mm512_subs_epu16(decade[k], lines.low); }
    STAGE times(int k) { decade[k] = _mm512_mulhi_epu16(decade[k], lines.log); }
    STAGE other(int k) { decade[k + 1] = _mm512_srli_epi32(decade[k], 16); }
    STAGE line(int k) { slope[k] = _mm512_permutexvar_ps(decade[k], lines.slope); }
    STAGE begin(int k) { rest[k] = _mm512_permutexvar_ps(decade[k], lines.rest); }
    STAGE sum(int k) { y[k] = _mm512_fmadd_ps(y[k], slope[k], rest[k]); }
#undef STAGE
};

// The weights of a block's first numbers, and the codes of their moments: of four vectors of means, of
// four of squares an operation behind them, and of four steps. None waits for one of those just before
// it, and neighbours are of different kinds: a processor does two of a kind in the time of four.
template <class W, class G>
void finish_wide(Block<W, G>& b, int64_t n, float by1, float by2, const Table& first,
                 const Table& second, Numbers a) {
    const Registers lines[2] = {Registers(first.lines), Registers(second.lines)};
    const __m512 keep = wide_all(a.keep), rate = wide_all(a.rate);
    const __m512 root = wide_all(a.root), eps = wide_all(a.eps);
    const __m512i upper = wide_load(reinterpret_cast<const uint8_t*>(PICKS.upper));
    const __m512i last = wide_all(256 << 16 | 1 << 15);  // what has the code of 1, and is not near
    const __m512i zero = _mm512_set1_epi8(SIGNED_ZERO), one = _mm512_set1_epi8(1);
    uint8_t *const c1 = b.c1, *const c2 = b.c2;
    W* const w = b.w;
    for (int64_t i = 0; i < n; i += WIDE_STEP) {
        const float *const m = b.m + i, *const v = b.v + i;
        Sums x{lines[0]}, z{lines[1]};
        __m512 step[4];
        __m512i sums[8];
        __mmask16 negative[4], below[4];
        const auto deviation = [&](int k) { step[k] = _mm512_sqrt_ps(wide_load(v + k * WIDE)); };
        four([&](int k) { x.scale(k, m, by1); });
        four([&](int k) {
            negative[k] = _mm512_cmp_ps_mask(x.y[k], wide_all(-TINY), _CMP_LE_OQ);
            z.scale(k, v, by2);
        });
        four([&](int k) {
            x.y[k] = _mm512_abs_ps(x.y[k]);
            below[k] = _mm512_cmp_ps_mask(z.y[k], lines[1].one, _CMP_NGT_UQ);
        });
        two([&](int k) { x.halves(k, upper), deviation(k); });
        two([&](int k) { x.less(k), z.halves(k, upper); });
        two([&](int k) { x.times(k), z.less(k); });
        two([&](int k) { x.other(k), z.times(k), deviation(k + 1); });
        four([&](int k) { x.line(k); });
        two([&](int k) { x.begin(k), x.begin(k + 1), z.other(k); });
        four([&](int k) { x.sum(k), z.line(k); });
        four([&](int k) { z.begin(k), step[k] = _mm512_mul_ps(step[k], root); });
        four([&](int k) { z.sum(k), step[k] = _mm512_add_ps(step[k], eps); });
        four([&](int k) {
            sums[k] = wide_bits(x.y[k]);
            sums[k + 4] = _mm512_mask_cvtps_epi32(last, below[k], z.y[k]);
            step[k] = _mm512_div_ps(wide_load(m + k * WIDE), step[k]);
        });
        Near near1, near2;
        const __m512i mean = whole(sums, near1), square = whole(sums + 4, near2);
        // Ties go to the lower code: they are near. And none that is negative is zero.
        const __m512i less = _mm512_subs_epu8(zero, _mm512_max_epu8(mean, one));
        const __m512i more = _mm512_add_epi8(mean, zero);
        _mm512_storeu_si512(c1 + i, _mm512_mask_mov_epi8(more, picked(negative), less));
        _mm512_storeu_si512(c2 + i, _mm512_sub_epi8(square, one));
        four([&](int k) { step[k] = _mm512_mul_ps(step[k], rate); });
        four([&](int k) {
            const __m512 kept = _mm512_mul_ps(wide_load(w + i + k * WIDE), keep);
            wide_store(w + i + k * WIDE, _mm512_sub_ps(kept, step[k]));
        });
        if (near1.some()) tell(near1.all(sums), m, by1, first.codes, c1 + i);
        if (near2.some()) tell(near2.all(sums + 4), v, by2, second.codes, c2 + i);
    }
}

}  // namespace outsize::blockwise
