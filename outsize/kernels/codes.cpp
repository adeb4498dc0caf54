// Weights of few bits, decoded in one pass: a block of bytes becomes its group's numbers, each code's
// value times the group's scale, rounded once to what is stored. The twin is `plain` in codes.py.

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "storage.h"

namespace {

using std::int64_t;
using std::uint8_t;

using outsize::bfloat16;
using outsize::narrow;

constexpr int64_t GRAIN = 1 << 15;  // numbers below which a thread more costs more than it saves
constexpr int64_t MOST = 256;       // numbers of a group
enum Order { BYTES = 0, HALVES = 1, PAIRS = 2 };

void bytes(const uint8_t* codes, int64_t group, float scale, float* out) {
    for (int64_t i = 0; i < group; ++i) out[i] = float(int8_t(codes[i])) * scale;
}

// The first half of a group lies in the lower bits, the second in the upper ones.
void halves(const uint8_t* codes, int64_t half, const float* table, float scale, float* out) {
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
#endif
    for (; i < half; ++i) {
        out[i] = table[codes[i] & 15] * scale;
        out[half + i] = table[codes[i] >> 4] * scale;
    }
}

// Neighbours lie in a byte, the first in its upper bits.
void pairs(const uint8_t* codes, int64_t half, const float* table, float scale, float* out) {
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
#endif
    for (; i < half; ++i) {
        out[2 * i] = table[codes[i] >> 4] * scale;
        out[2 * i + 1] = table[codes[i] & 15] * scale;
    }
}

struct Layout {
    int order;
    int64_t group, block, head;  // numbers, bytes, and bytes before the codes
};

void one(const uint8_t* block, const Layout& layout, const float* table, float scale, float* out) {
    const uint8_t* codes = block + layout.head;
    if (layout.order == BYTES)
        bytes(codes, layout.group, scale, out);
    else if (layout.order == HALVES)
        halves(codes, layout.group / 2, table, scale, out);
    else
        pairs(codes, layout.group / 2, table, scale, out);
}

inline void stored(const uint8_t* block, const Layout& layout, const float* table, float scale,
                   float* out) {
    one(block, layout, table, scale, out);
}

inline void stored(const uint8_t* block, const Layout& layout, const float* table, float scale,
                   bfloat16* out) {
    float wide[MOST];
    one(block, layout, table, scale, wide);
    for (int64_t i = 0; i < layout.group; ++i) out[i] = narrow<bfloat16>(wide[i]);
}

template <class T>
void decode(const uint8_t* blocks, const Layout& layout, const float* scales, const float* table,
            T* out, int64_t count, int threads) {
    const int many = count * layout.group < GRAIN ? 1 : threads;
#pragma omp parallel for num_threads(many) schedule(static)
    for (int64_t i = 0; i < count; ++i)
        stored(blocks + i * layout.block, layout, table, scales[i], out + i * layout.group);
}

}  // namespace

extern "C" {

// Numbers of `count` blocks; dtype: 0 float32, 1 bfloat16; group: MOST at most, of halves and pairs
// even. table: the values of 16 codes, not read where codes are bytes.
void outsize_decode(int dtype, int order, const void* blocks, const float* scales,
                    const float* table, void* out, int64_t count, int64_t group, int64_t block,
                    int64_t head, int threads) {
    const Layout layout{order, group, block, head};
    const uint8_t* raw = static_cast<const uint8_t*>(blocks);
    if (dtype == 0)
        decode(raw, layout, scales, table, static_cast<float*>(out), count, threads);
    else
        decode(raw, layout, scales, table, static_cast<bfloat16*>(out), count, threads);
}

}  // extern "C"
