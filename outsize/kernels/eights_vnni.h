// Sums of eights.cpp by AVX-512 with VNNI: sixteen outputs are the lanes of a vector, and an instruction
// adds the products of four neighbours of a row by codes that count from 0.

#pragma once

#include "eights.h"

namespace outsize {

constexpr int COLUMNS = 8;         // of four neighbours each, that a chunk has
constexpr int64_t UNPACKED = 16;   // chunks of ACROSS outputs that stay in the nearest cache
constexpr int FIRST = 0x000f, SECOND = 0x00f0, THIRD = 0x0f00, FOURTH = 0xf000;  // lanes of 16 bytes

inline __m128i sixteen(const uint8_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// 16 bytes of each of ACROSS outputs: of four neighbours at a time, lanes are outputs.
inline __attribute__((always_inline)) void turn(const uint8_t* const* rows, int64_t from, __m512i* to) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_castsi128_si512(sixteen(rows[i] + from));
        x[i] = _mm512_mask_broadcast_i32x4(x[i], SECOND, sixteen(rows[4 + i] + from));
        x[i] = _mm512_mask_broadcast_i32x4(x[i], THIRD, sixteen(rows[8 + i] + from));
        x[i] = _mm512_mask_broadcast_i32x4(x[i], FOURTH, sixteen(rows[12 + i] + from));
    }
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    to[0] = _mm512_unpacklo_epi64(a, c), to[1] = _mm512_unpackhi_epi64(a, c);
    to[2] = _mm512_unpacklo_epi64(b, d), to[3] = _mm512_unpackhi_epi64(b, d);
}

// A chunk's codes of ACROSS outputs, counted from 0. from: bytes of a row before them.
template <bool FOUR>
inline __attribute__((always_inline)) void unpack(const uint8_t* const* rows, int64_t from, __m512i* to) {
    turn(rows, from, to);
    if constexpr (FOUR) {
        const __m512i lower = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            to[4 + k] = _mm512_and_si512(_mm512_srli_epi16(to[k], 4), lower);
            to[k] = _mm512_and_si512(to[k], lower);
        }
    } else {
        turn(rows, from + CHUNK / 2, to + 4);
        const __m512i middle = _mm512_set1_epi8(char(MIDDLE));
#pragma GCC unroll 8
        for (int k = 0; k < COLUMNS; ++k) to[k] = _mm512_xor_si512(to[k], middle);
    }
}

// Groups [first, last) of ROWS rows onto their sums. codes(g, c, to): those of a chunk.
template <bool FOUR, int CHUNKS, int ROWS, class F>
inline __attribute__((always_inline)) void add(const Rounded& r, int64_t first, int64_t last, int64_t row,
                                               const float* scales, float* to, F codes) {
    const int64_t chunks = CHUNKS ? CHUNKS : r.chunks, half = FOUR ? r.w.group / 2 : CHUNK / 2;
    const int64_t step = FOUR ? CHUNK / 2 : CHUNK;
    __m512 sum[ROWS];
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; ++t) sum[t] = _mm512_load_ps(to + (row + t) * ACROSS);
    for (int64_t g = first; g < last; ++g) {
        const int32_t* begins = r.begin(g, row);
        const float* sizes = &r.scale(g, row);
        __m512i whole[ROWS];
#pragma GCC unroll 8
        for (int t = 0; t < ROWS; ++t) whole[t] = _mm512_set1_epi32(begins[t]);
        for (int64_t c = 0; c < chunks; ++c) {
            const uint8_t* x = r.at(g, row) + c * step;
            __m512i w[COLUMNS];
            codes(g, c, w);
#pragma GCC unroll 8
            for (int k = 0; k < COLUMNS; ++k)
#pragma GCC unroll 8
                for (int t = 0; t < ROWS; ++t) {
                    int32_t own;
                    std::memcpy(&own, x + t * r.size + (k < 4 ? 4 * k : half + 4 * (k - 4)), sizeof own);
                    whole[t] = _mm512_dpbusd_epi32(whole[t], w[k], _mm512_set1_epi32(own));
                }
        }
        const __m512 scale = _mm512_load_ps(scales + g * ACROSS);
#pragma GCC unroll 8
        for (int t = 0; t < ROWS; ++t) {
            const __m512 sized = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[t]), _mm512_set1_ps(sizes[t]));
            sum[t] = _mm512_add_ps(sum[t], held(_mm512_mul_ps(sized, scale)));
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; ++t) _mm512_store_ps(to + (row + t) * ACROSS, sum[t]);
}

// The same of rows [row, row + count), TILE at most.
template <bool FOUR, int CHUNKS, int ROWS = TILE, class F>
inline void add_some(const Rounded& r, int64_t first, int64_t last, int64_t row, int64_t count,
                     const float* scales, float* to, F codes) {
    if (count == ROWS) return add<FOUR, CHUNKS, ROWS>(r, first, last, row, scales, to, codes);
    if constexpr (ROWS > 1) add_some<FOUR, CHUNKS, ROWS - 1>(r, first, last, row, count, scales, to, codes);
}

// As many rows as registers hold by codes that are turned there; more by those turned some groups at a
// time. Those of the next outputs are asked for: rows are too short for a processor to foresee them.
template <bool FOUR, int CHUNKS>
void by_fours(const Rounded& r, const Panel& panel, const float* scales, float* to) {
    const uint8_t* const* rows = panel.first;
    const int64_t block = r.w.block, head = r.w.head, chunks = CHUNKS ? CHUNKS : r.chunks;
    const int64_t bytes = FOUR ? CHUNK / 2 : CHUNK;
    const uint8_t* next = rows[0] + ACROSS * r.groups * block;
    const auto turned = [=](int64_t g, int64_t c, __m512i* w) __attribute__((always_inline)) {
        if (c == 0)
            for (int64_t i = 0; i < ACROSS * block; i += 64)
                _mm_prefetch(reinterpret_cast<const char*>(next + g * ACROSS * block + i), _MM_HINT_T1);
        unpack<FOUR>(rows, g * block + head + c * bytes, w);
    };
    if (r.rows <= TILE)
        return add_some<FOUR, CHUNKS>(r, 0, r.groups, 0, r.rows, scales, to, turned);
    alignas(64) __m512i kept[UNPACKED * COLUMNS];
    const int64_t some = UNPACKED / chunks;  // groups
    for (int64_t first = 0; first < r.groups; first += some) {
        const int64_t last = std::min(r.groups, first + some);
        for (int64_t g = first; g < last; ++g)
            for (int64_t c = 0; c < chunks; ++c) turned(g, c, kept + ((g - first) * chunks + c) * COLUMNS);
        const auto lying = [=, &kept](int64_t g, int64_t c, __m512i* w) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int k = 0; k < COLUMNS; ++k) w[k] = kept[((g - first) * chunks + c) * COLUMNS + k];
        };
        for (int64_t t = 0; t < r.rows; t += TILE)
            add_some<FOUR, CHUNKS>(r, first, last, t, std::min(TILE, r.rows - t), scales, to, lying);
    }
}

// The same of a packed panel, which lies as sums take it, but for codes of 4 bits; the next one is asked
// for.
template <bool FOUR, int CHUNKS>
void by_packed(const Rounded& r, const Panel& panel, const float* scales, float* to) {
    constexpr int READ = FOUR ? 4 : COLUMNS;  // vectors of a chunk
    const int64_t chunks = CHUNKS ? CHUNKS : r.chunks;
    const int64_t bytes = ACROSS * r.w.block;  // of a group
    const uint8_t *codes = panel.codes(r.w), *next = panel.first[0] + r.groups * bytes;
    const auto ask = [=](int64_t g) __attribute__((always_inline)) {
        for (int64_t i = 0; i < bytes; i += 64)
            _mm_prefetch(reinterpret_cast<const char*>(next + g * bytes + i), _MM_HINT_T1);
    };
    const auto lying = [=](int64_t g, int64_t c, __m512i* w) __attribute__((always_inline)) {
        const uint8_t* from = codes + (g * chunks + c) * READ * 64;
        const __m512i lower = _mm512_set1_epi8(15);
#pragma GCC unroll 8
        for (int k = 0; k < READ; ++k) {
            w[k] = _mm512_loadu_si512(from + k * 64);
            if constexpr (FOUR) {
                w[4 + k] = _mm512_and_si512(_mm512_srli_epi16(w[k], 4), lower);
                w[k] = _mm512_and_si512(w[k], lower);
            }
        }
    };
    const auto first_time = [=](int64_t g, int64_t c, __m512i* w) __attribute__((always_inline)) {
        if (c == 0) ask(g);
        lying(g, c, w);
    };
    if (r.rows <= TILE) return add_some<FOUR, CHUNKS>(r, 0, r.groups, 0, r.rows, scales, to, first_time);
    const int64_t some = UNPACKED / chunks;  // groups
    for (int64_t first = 0; first < r.groups; first += some) {
        const int64_t last = std::min(r.groups, first + some);
        add<FOUR, CHUNKS, TILE>(r, first, last, 0, scales, to, first_time);
        for (int64_t t = TILE; t < r.rows; t += TILE)
            add_some<FOUR, CHUNKS>(r, first, last, t, std::min(TILE, r.rows - t), scales, to, lying);
    }
}

}  // namespace outsize
