// Sums of eights.cpp by AVX2: codes of 8 bits by products of 16 bits, of 4 bits by products of 8.

#pragma once

#include "eights.h"

namespace outsize {

constexpr int64_t AHEAD = 2048;  // bytes of a packed panel: a processor foresees no other page of 4 KiB

inline void ask(const uint8_t* codes) {
    _mm_prefetch(reinterpret_cast<const char*>(codes + AHEAD), _MM_HINT_T0);
}
inline __m256i read(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline void put(uint8_t* to, __m256i x) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), x); }
inline __m256i four_of(const uint8_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return _mm256_set1_epi32(bits);
}

// Four bytes of each of eight rows together, for each four of 16: lanes are rows.
inline void turn_half(const uint8_t* const* rows, int64_t from, __m256i* to) {
    __m256i x[4];
    for (int i = 0; i < 4; ++i)
        x[i] = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(rows[i + 4] + from),
                                   reinterpret_cast<const __m128i*>(rows[i] + from));
    const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    to[0] = _mm256_unpacklo_epi64(a, c), to[1] = _mm256_unpackhi_epi64(a, c);
    to[2] = _mm256_unpacklo_epi64(b, d), to[3] = _mm256_unpackhi_epi64(b, d);
}

// Codes of a group of ACROSS outputs, as `sums` reads them. from: bytes of a row before them.
template <bool FOUR>
inline void unpack(const uint8_t* const* rows, int64_t from, int64_t chunks, uint8_t* to) {
    const __m256i lower = _mm256_set1_epi8(15);
    for (int64_t step = 0; step < chunks * (FOUR ? 1 : 2); ++step, from += CHUNK / 2)
        for (int v = 0; v < 2; ++v) {
            __m256i x[4];
            turn_half(rows + 8 * v, from, x);
            for (int k = 0; k < 4; ++k) {
                uint8_t* out = to + step * 512 + v * 32;
                if (FOUR) {
                    put(out + k * 64, _mm256_and_si256(x[k], lower));
                    put(out + (k + 4) * 64, _mm256_and_si256(_mm256_srli_epi16(x[k], 4), lower));
                } else {
                    put(out + 2 * k * 64, _mm256_srai_epi16(_mm256_slli_epi16(x[k], 8), 8));
                    put(out + (2 * k + 1) * 64, _mm256_srai_epi16(x[k], 8));
                }
            }
        }
}

// The same of a packed panel's group.
template <bool FOUR>
inline void unpack(const uint8_t* codes, int64_t chunks, uint8_t* to) {
    const __m256i lower = _mm256_set1_epi8(15), middle = _mm256_set1_epi8(char(MIDDLE));
    for (int64_t c = 0; c < chunks; ++c, to += (FOUR ? 512 : 1024))
        for (int k = 0; k < (FOUR ? 4 : 8); ++k, codes += 64)
            for (int v = 0; v < 2; ++v) {
                __m256i x = read(codes + 32 * v);
                uint8_t* out = to + 32 * v;
                if (v == 0) ask(codes);
                if constexpr (FOUR) {
                    put(out + k * 64, _mm256_and_si256(x, lower));
                    put(out + (k + 4) * 64, _mm256_and_si256(_mm256_srli_epi16(x, 4), lower));
                } else {
                    x = _mm256_xor_si256(x, middle);
                    put(out + 2 * k * 64, _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
                    put(out + (2 * k + 1) * 64, _mm256_srai_epi16(x, 8));
                }
            }
}

// Sums of a group of CHUNKS, or, where that is 0, of any: of ROWS rows by ACROSS outputs.
template <bool FOUR, int CHUNKS, int ROWS>
inline __attribute__((always_inline)) void sums(const uint8_t* x, int64_t size, const int32_t* begins,
                                                int64_t chunks, const uint8_t* w,
                                                __m256i (&whole)[ROWS][2]) {
    const int64_t many = CHUNKS ? CHUNKS : chunks;
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; ++t)
        for (int v = 0; v < 2; ++v) whole[t][v] = _mm256_setzero_si256();
    for (int64_t c = 0; c < many; ++c) {
        __m256i part[ROWS][2];
        if constexpr (FOUR) {
#pragma GCC unroll 8
            for (int t = 0; t < ROWS; ++t)
                part[t][0] = part[t][1] = _mm256_set1_epi32(begins[t * many + c]);
        }
#pragma GCC unroll 2
        for (int k = 0; k < (FOUR ? 8 : 16); ++k, w += 64, x += 4) {
            const __m256i codes[] = {held(read(w)), held(read(w + 32))};
#pragma GCC unroll 8
            for (int t = 0; t < ROWS; ++t) {
                const __m256i own = four_of(x + t * size);
#pragma GCC unroll 2
                for (int v = 0; v < 2; ++v)
                    if constexpr (FOUR)
                        part[t][v] = held(
                            _mm256_add_epi16(part[t][v], _mm256_maddubs_epi16(codes[v], own)));
                    else
                        whole[t][v] =
                            held(_mm256_add_epi32(whole[t][v], _mm256_madd_epi16(codes[v], own)));
            }
        }
        if constexpr (FOUR) {
#pragma GCC unroll 8
            for (int t = 0; t < ROWS; ++t)
                for (int v = 0; v < 2; ++v)
                    whole[t][v] = _mm256_add_epi32(whole[t][v], _mm256_madd_epi16(part[t][v], ones));
        }
    }
}

// A group's whole sums as numbers.
inline __m256 sized(__m256i whole, __m256 size, __m256 scale) {
    return held(_mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(whole), size), scale));
}

// The same onto those of the groups before.
inline void add(__m256i whole, __m256 size, __m256 scale, float* to) {
    _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), sized(whole, size, scale)));
}

// The same of ROWS rows by ACROSS outputs.
template <bool FOUR, int CHUNKS, int ROWS>
void add(const Rounded& r, int64_t g, int64_t row, const uint8_t* w, const float* scales, float* to) {
    __m256i whole[ROWS][2];
    sums<FOUR, CHUNKS, ROWS>(r.at(g, row), r.size, r.begin(g, row), r.chunks, w, whole);
    const float* sizes = &r.scale(g, row);
    const __m256 own[] = {_mm256_load_ps(scales), _mm256_load_ps(scales + 8)};
    to += row * ACROSS;
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; ++t)
        for (int v = 0; v < 2; ++v, to += 8) add(whole[t][v], _mm256_set1_ps(sizes[t]), own[v], to);
}

// Sums of a row's group by eight outputs, whose lanes are brought together at the end: for few rows,
// that would not pay for codes to be turned.
inline __m256i across(const uint8_t* x, const uint8_t* const* rows, int64_t from, int64_t group) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[8];
#pragma GCC unroll 8
    for (int o = 0; o < 8; ++o) {
        sum[o] = _mm256_setzero_si256();
        for (int64_t i = 0; i < group; i += CHUNK) {
            const __m256i codes = read(rows[o] + from + i), own = read(x + i);
            const __m256i two = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(own, codes));
            sum[o] = _mm256_add_epi32(sum[o], _mm256_madd_epi16(two, ones));
        }
    }
#pragma GCC unroll 2
    for (int o = 0; o < 8; o += 4)
        sum[o] = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[o], sum[o + 1]),
                                   _mm256_hadd_epi32(sum[o + 2], sum[o + 3]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(sum[0], sum[4], 0x20),
                            _mm256_permute2x128_si256(sum[0], sum[4], 0x31));
}

void by_few(const Rounded& r, const Panel& panel, const float* scales, float* to) {
    const uint8_t* const* rows = panel.first;
    for (int64_t g = 0; g < r.groups; ++g, scales += ACROSS)
        for (int64_t t = 0; t < r.rows; ++t)
            for (int v = 0; v < 2; ++v) {
                const __m256i whole = across(r.at(g, t), rows + 8 * v, g * r.w.block + r.w.head, r.w.group);
                const __m256 size = _mm256_set1_ps(r.scale(g, t));
                add(whole, size, _mm256_load_ps(scales + 8 * v), to + t * ACROSS + 8 * v);
            }
}

// Sums of a group of ROWS rows by eight outputs of a packed panel, four neighbours a lane, as they lie.
template <bool FOUR, int ROWS>
inline __attribute__((always_inline)) void lying(const uint8_t* codes, const uint8_t* x, int64_t size,
                                                 __m256i (&sum)[ROWS]) {
    const __m256i raw = read(codes), lower = _mm256_set1_epi8(15);
    const __m256i low = _mm256_and_si256(raw, lower);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), lower);
    const __m256i counted = _mm256_xor_si256(raw, _mm256_set1_epi8(char(MIDDLE)));
#pragma GCC unroll 2
    for (int t = 0; t < ROWS; ++t, x += size)
        if constexpr (FOUR) {
            const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(low, four_of(x)),
                                                  _mm256_maddubs_epi16(high, four_of(x + CHUNK / 2)));
            sum[t] = _mm256_add_epi16(sum[t], both);
        } else {
            const __m256i own = _mm256_sign_epi8(four_of(x), counted);
            const __m256i two = _mm256_maddubs_epi16(_mm256_abs_epi8(counted), own);
            sum[t] = _mm256_add_epi32(sum[t], _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
        }
}

// Of ROWS rows, FEW at most, by a packed panel.
template <bool FOUR, int CHUNKS, int ROWS>
void by_packed(const Rounded& r, const Panel& panel, const float* scales, float* to) {
    constexpr int READ = FOUR ? 4 : 8;  // times two vectors of a chunk
    const int64_t chunks = CHUNKS ? CHUNKS : r.chunks;
    const uint8_t* codes = panel.codes(r.w);
    __m256 sum[2][ROWS];
    for (int t = 0; t < ROWS; ++t)
        for (int v = 0; v < 2; ++v) sum[v][t] = _mm256_load_ps(to + t * ACROSS + 8 * v);
    for (int64_t g = 0; g < r.groups; ++g, scales += ACROSS) {
        __m256i whole[2][ROWS] = {};
        for (int64_t c = 0; c < chunks; ++c) {
            const uint8_t* x = r.at(g, 0) + c * CHUNK;
            __m256i part[2][ROWS];  // of 4 bits, sums of 16
            for (int t = 0; FOUR && t < ROWS; ++t)
                part[0][t] = part[1][t] = _mm256_set1_epi32(r.begin(g, t)[c]);
#pragma GCC unroll 8
            for (int k = 0; k < READ; ++k, codes += 64, x += 4) {
                ask(codes);
                lying<FOUR>(codes, x, r.size, FOUR ? part[0] : whole[0]);
                lying<FOUR>(codes + 32, x, r.size, FOUR ? part[1] : whole[1]);
            }
            for (int t = 0; FOUR && t < ROWS; ++t)
                for (int v = 0; v < 2; ++v)
                    whole[v][t] = _mm256_add_epi32(
                        whole[v][t], _mm256_madd_epi16(part[v][t], _mm256_set1_epi16(1)));
        }
        for (int t = 0; t < ROWS; ++t)
            for (int v = 0; v < 2; ++v)
                sum[v][t] = _mm256_add_ps(
                    sum[v][t], sized(whole[v][t], _mm256_set1_ps(r.scale(g, t)), _mm256_load_ps(scales + 8 * v)));
    }
    for (int t = 0; t < ROWS; ++t)
        for (int v = 0; v < 2; ++v) _mm256_store_ps(to + t * ACROSS + 8 * v, sum[v][t]);
}

template <bool FOUR, int CHUNKS>
void by_vectors(const Rounded& r, const Panel& panel, const float* scales, float* to) {
    const uint8_t* const* rows = panel.first;
    alignas(64) uint8_t codes[MOST * ACROSS * 2];
    const int64_t block = r.w.block;
    for (int64_t g = 0; g < r.groups; ++g, scales += ACROSS) {
        const int64_t chunks = CHUNKS ? CHUNKS : r.chunks;
        if (panel.packed)
            unpack<FOUR>(panel.codes(r.w) + g * ACROSS * (block - r.w.head), chunks, codes);
        else
            unpack<FOUR>(rows, g * block + r.w.head, chunks, codes);
        int64_t t = 0;
        for (; t + 4 <= r.rows; t += 4) add<FOUR, CHUNKS, 4>(r, g, t, codes, scales, to);
        if (t + 2 <= r.rows) {
            add<FOUR, CHUNKS, 2>(r, g, t, codes, scales, to);
            t += 2;
        }
        if (t < r.rows) add<FOUR, CHUNKS, 1>(r, g, t, codes, scales, to);
    }
}

}  // namespace outsize
