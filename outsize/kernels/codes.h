// A weight as it is held, and a block of bytes to its group's numbers: each code's value times the
// group's scale.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "storage.h"
#include "tiles.h"

namespace outsize {

using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

constexpr int64_t MOST = 256;       // numbers of a group
enum Order { BYTES = 0, HALVES = 1, PAIRS = 2 };
constexpr float FROM_MINUS_8[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
enum Scales { APART = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // in an array, or the first of a block's bytes
enum Eights { NOT = 0, ROUNDED = 1, OUTLIERS = 2 };      // 2: but for numbers of great magnitude

inline void bytes(const uint8_t* codes, int64_t group, float scale, float* out) {
    for (int64_t i = 0; i < group; ++i) out[i] = float(int8_t(codes[i])) * scale;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Values of 8 codes, which are the lower 4 bits of each.
struct Values {
    __m256 low, high, factor;

    Values(const float* table, float scale)
        : low(_mm256_loadu_ps(table)),
          high(_mm256_loadu_ps(table + 8)),
          factor(_mm256_set1_ps(scale)) {}

    __m256 of(__m256i codes) const {  // permutes look at three bits, the fourth chooses
        const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
        const __m256 a = _mm256_permutevar8x32_ps(low, codes);
        const __m256 b = _mm256_permutevar8x32_ps(high, codes);
        return _mm256_mul_ps(_mm256_blendv_ps(a, b, fourth), factor);
    }
};

inline __m256i eight(const uint8_t* codes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
}
#endif

// The first half of a group lies in the lower bits, the second in the upper ones.
inline void halves(const uint8_t* codes, int64_t half, const float* table, float scale, float* out) {
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512 values = _mm512_loadu_ps(table), factor = _mm512_set1_ps(scale);
    for (; i + 16 <= half; i += 16) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        const __m512i both = _mm512_cvtepu8_epi32(raw);  // permutes look at four bits alone
        const __m512i upper = _mm512_srli_epi32(both, 4);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_permutexvar_ps(both, values), factor));
        _mm512_storeu_ps(out + half + i,
                         _mm512_mul_ps(_mm512_permutexvar_ps(upper, values), factor));
    }
#elif defined(__AVX2__)
    const Values values(table, scale);
    for (; i + 8 <= half; i += 8) {
        const __m256i both = eight(codes + i);
        _mm256_storeu_ps(out + i, values.of(both));
        _mm256_storeu_ps(out + half + i, values.of(_mm256_srli_epi32(both, 4)));
    }
#endif
    for (; i < half; ++i) {
        out[i] = table[codes[i] & 15] * scale;
        out[half + i] = table[codes[i] >> 4] * scale;
    }
}

// Neighbours lie in a byte, the first in its upper bits.
inline void pairs(const uint8_t* codes, int64_t half, const float* table, float scale, float* out) {
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512 values = _mm512_loadu_ps(table), factor = _mm512_set1_ps(scale);
    const __m512i first =
        _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (; i + 16 <= half; i += 16) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        const __m512i both = _mm512_cvtepu8_epi32(raw);
        const __m512 upper = _mm512_mul_ps(
            _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), values), factor);
        const __m512 lower = _mm512_mul_ps(_mm512_permutexvar_ps(both, values), factor);
        _mm512_storeu_ps(out + 2 * i, _mm512_permutex2var_ps(upper, first, lower));
        _mm512_storeu_ps(out + 2 * i + 16, _mm512_permutex2var_ps(upper, second, lower));
    }
#elif defined(__AVX2__)
    const Values values(table, scale);
    for (; i + 8 <= half; i += 8) {
        const __m256i both = eight(codes + i);
        const __m256 upper = values.of(_mm256_srli_epi32(both, 4)), lower = values.of(both);
        const __m256 even = _mm256_unpacklo_ps(upper, lower);
        const __m256 odd = _mm256_unpackhi_ps(upper, lower);
        _mm256_storeu_ps(out + 2 * i, _mm256_permute2f128_ps(even, odd, 0x20));
        _mm256_storeu_ps(out + 2 * i + 8, _mm256_permute2f128_ps(even, odd, 0x31));
    }
#endif
    for (; i < half; ++i) {
        out[2 * i] = table[codes[i] >> 4] * scale;
        out[2 * i + 1] = table[codes[i] & 15] * scale;
    }
}

// A float16 of finite value: as a float32 of the same bits it is too small by 2^112.
inline float half(uint16_t bits) {
    const uint32_t size = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
    const float held = __builtin_bit_cast(float, size) * 0x1p112f;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, held) | sign);
}

struct Layout {
    int order, scales;
    int64_t group, block, head;  // numbers, bytes, and bytes before the codes
    const float *apart, *table;  // scales by block; values of 16 codes
    int64_t every;               // blocks of a scale that lies apart

    float scale(const uint8_t* block, int64_t index) const {
        if (scales == APART) return apart[index / every];
        uint16_t bits;
        std::memcpy(&bits, block, sizeof bits);
        return scales == BFLOAT16 ? wide(bfloat16{bits}) : half(bits);
    }
};

// A vector of codes: signed bytes, bytes, or halves of bytes, the first one low; and the scale of a block.
#if defined(__AVX512F__)
// GCC 12 makes 16 bytes wide by shuffles of halves where it is not told which instruction does it.
inline __m128i some_bytes(const uint8_t* codes) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
}
inline ints signed_of(const uint8_t* codes) { return ints(_mm512_cvtepi8_epi32(some_bytes(codes))); }
inline ints bits_of(const uint8_t* codes) { return ints(_mm512_cvtepu8_epi32(some_bytes(codes))); }
inline ints pairs_of(const uint8_t* codes) {
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)), low = _mm_set1_epi8(15);
    const __m128i upper = _mm_and_si128(_mm_srli_epi16(raw, 4), low);
    return ints(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(_mm_and_si128(raw, low), upper)));
}
inline vec scale_of(const Layout& layout, const uint8_t* block) {
    uint16_t bits;
    std::memcpy(&bits, block, sizeof bits);
    if (layout.scales == FLOAT16) return vec(_mm512_cvtph_ps(_mm256_set1_epi16(short(bits))));
    return vec(_mm512_slli_epi32(_mm512_set1_epi16(short(bits)), 16));
}
#elif defined(__AVX2__) && defined(__F16C__)
inline __m128i some_bytes(const uint8_t* codes) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
}
inline ints signed_of(const uint8_t* codes) { return ints(_mm256_cvtepi8_epi32(some_bytes(codes))); }
inline ints bits_of(const uint8_t* codes) { return ints(_mm256_cvtepu8_epi32(some_bytes(codes))); }
inline ints pairs_of(const uint8_t* codes) {
    int32_t bits;
    std::memcpy(&bits, codes, sizeof bits);
    const __m128i raw = _mm_cvtsi32_si128(bits), low = _mm_set1_epi8(15);
    const __m128i upper = _mm_and_si128(_mm_srli_epi16(raw, 4), low);
    return ints(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(_mm_and_si128(raw, low), upper)));
}
inline vec scale_of(const Layout& layout, const uint8_t* block) {
    uint16_t bits;
    std::memcpy(&bits, block, sizeof bits);
    if (layout.scales == FLOAT16) return vec(_mm256_cvtph_ps(_mm_set1_epi16(short(bits))));
    return vec(_mm256_slli_epi32(_mm256_set1_epi16(short(bits)), 16));
}
#else
template <class V>
inline ints lanes(const uint8_t* codes) {
    V found;
    std::memcpy(&found, codes, sizeof found);
    return __builtin_convertvector(found, ints);
}
typedef int8_t signed_codes __attribute__((vector_size(LANES)));
typedef uint8_t bits_of_codes __attribute__((vector_size(LANES)));
inline ints signed_of(const uint8_t* codes) { return lanes<signed_codes>(codes); }
inline ints bits_of(const uint8_t* codes) { return lanes<bits_of_codes>(codes); }
inline ints pairs_of(const uint8_t* codes) {
    ints found;
    for (int i = 0; i < LANES; ++i) found[i] = codes[i / 2] >> i % 2 * 4 & 15;
    return found;
}
inline vec scale_of(const Layout& layout, const uint8_t* block) { return all(layout.scale(block, 0)); }
#endif

// Block `index` of some that lie one behind another.
inline void one(const uint8_t* blocks, const Layout& layout, int64_t index, float* out) {
    const uint8_t *block = blocks + index * layout.block, *codes = block + layout.head;
    const float scale = layout.scale(block, index);
    if (layout.order == BYTES)
        bytes(codes, layout.group, scale, out);
    else if (layout.order == HALVES)
        halves(codes, layout.group / 2, layout.table, scale, out);
    else
        pairs(codes, layout.group / 2, layout.table, scale, out);
}

// A weight (outputs, inner) as outsize/kernels/rows.py says it, with what is added. data: in the
// dtype of what it is multiplied by, or, where group is not 0, blocks of codes, rows one behind
// another. table: null where codes of 4 bits count from -8. eights: whether what it is multiplied by is
// rounded to 8 bits (eights.cpp). every: blocks of a scale. most: of rows that are rounded and have one scale
// each, the magnitudes that these are of; null: the largest that is here. packed: whether rows lie as
// outsize_eights_pack leaves them.
struct Matrix {
    const void *data, *bias;
    const float *scales, *table;
    int64_t outputs, inner, group, block, head;
    int32_t order, kind, eights, every;
    const float* most;
    int64_t packed;

    Layout layout() const {
        return {order, kind, group, block, head, scales, table ? table : FROM_MINUS_8,
                every};
    }
};

}  // namespace outsize
