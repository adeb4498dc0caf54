// Rows of numbers, rounded to whole numbers of 8 bits, for the products of eights.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "codes.h"
#include "tiles.h"

namespace outsize {

constexpr int64_t MOST_ROWS = 128;  // that are rounded at once and stay in a cache
constexpr int64_t ACROSS = 16;      // outputs at once
constexpr int64_t TILE = 8;         // rows that lie together
constexpr int64_t CHUNK = 32;       // numbers of a row that a pass over a weight's codes takes
constexpr int64_t FEW = 2;          // rows for which AVX2 takes codes of 8 bits as they lie
constexpr int32_t ZERO = 8;         // the code of 0, of 4 bits
constexpr int32_t MIDDLE = 128;     // the same of 8 bits, where they count from 0
constexpr uint32_t LEAST = 0x0da24260u, NOT_FINITE = 0x7f800000u;  // 1e-30, bits of magnitudes
constexpr uint32_t OUTLIER = 0x40c00000u;                                // 6, from which on it is apart

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define OUTSIZE_FOURS
constexpr bool FOURS = true, TWOS = false;  // products of four neighbours by one instruction, of two
#elif defined(__AVX2__)
constexpr bool FOURS = false, TWOS = true;
#else
constexpr bool FOURS = false, TWOS = false;
#endif

// What a compiler neither computes in another order nor fuses with the sum it goes into.
template <class V>
inline V held(V x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    volatile V same = x;
    x = same;
#endif
    return x;
}

#if defined(__AVX2__)
// What sums by codes of CHUNK numbers have too much, taken off, in both halves of 32 bits: of the first
// two of each four numbers, and of the others.
inline int32_t begin_of(const int8_t* x) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    const __m256i two = _mm256_maddubs_epi16(_mm256_set1_epi8(ZERO), all);
    __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
    sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xb1));
    return _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sum));
}
#else
inline int32_t begin_of(const int8_t*) { return 0; }  // of passes by vectors alone
#endif

// Rows of a weight, ACROSS together: `first` each where they lie as in files; packed, first[0] alone, from
// where all scales of 16 bits lie by groups, then codes by four neighbours of all outputs, those of 8 bits
// counted from 0.
struct Panel {
    const uint8_t* first[ACROSS];
    bool packed;

    // Codes of a packed one.
    const uint8_t* codes(const Matrix& w) const { return first[0] + ACROSS * (w.inner / w.group) * w.head; }
    uint8_t code(const Matrix& w, int64_t output, int64_t group, int64_t byte) const {
        if (!packed) return first[output][group * w.block + w.head + byte];
        const uint8_t found = codes(w)[place(w, output, group, byte)];
        return w.order == HALVES ? found : uint8_t(found ^ MIDDLE);
    }
    // Where a byte of codes is among all of a packed one.
    static int64_t place(const Matrix& w, int64_t output, int64_t group, int64_t byte) {
        return (group * (w.block - w.head) + byte / 4 * 4) * ACROSS + output * 4 + byte % 4;
    }
};

inline uint32_t magnitude(float x) { return __builtin_bit_cast(uint32_t, x) & 0x7fffffffu; }
inline bool apart(uint32_t magnitude) { return magnitude >= OUTLIER && magnitude < NOT_FINITE; }

// A number of a row that is multiplied as it is: which of its group's.
struct Outlier {
    int32_t group, index;
    float value;
};

// Rows, rounded, in memory for so many floats: of each group so many whole numbers, and the scale. w: for
// weights of whose format.
struct Rounded {
    const Matrix& w;
    const int64_t rows, groups, chunks;
    const bool four, turned;  // codes of 4 bits; in the order in which AVX2's passes take numbers
    const int64_t size;       // bytes of a group
    float *const numbers, *const scales, *const begins;
    std::vector<std::vector<Outlier>> outliers;  // by row, where they are apart

    Rounded(const Matrix& weight, int64_t count, float* room)
        : w(weight), rows(count), groups(w.inner / w.group), chunks(w.group / CHUNK),
          four(w.order == HALVES), turned(turns(w, count)), size(bytes(w, count)), numbers(room),
          scales(numbers + lines(rows * groups * size / 4)), begins(scales + lines(rows * groups)),
          outliers(w.eights == OUTLIERS ? count : 0) {}

    static bool turns(const Matrix& w, int64_t count) {
        return TWOS && w.group % CHUNK == 0 && (w.order == HALVES || count > FEW);
    }
    static int64_t bytes(const Matrix& w, int64_t count) {
        return w.group * (turns(w, count) && w.order != HALVES ? 2 : 1);
    }
    static int64_t lines(int64_t count) { return (count + 16) / 16 * 16; }  // floats, some to read beyond
    static int64_t floats(const Matrix& w, int64_t count) {
        const int64_t all = count * (w.inner / w.group);
        const int64_t begins = FOURS ? all : turns(w, count) && w.order == HALVES ? count * w.inner / CHUNK : 0;
        return lines(all * bytes(w, count) / 4) + lines(all) + lines(begins);
    }

    // Where a row's group is: groups of TILE rows together, so that passes over these read on.
    int64_t index(int64_t group, int64_t row) const {
        const int64_t first = row / TILE * TILE;
        return first * groups + group * std::min(TILE, rows - first) + row - first;
    }
    uint8_t* at(int64_t group, int64_t row) const {
        return reinterpret_cast<uint8_t*>(numbers) + index(group, row) * size;
    }
    float& scale(int64_t group, int64_t row) const { return scales[index(group, row)]; }
    int32_t* begin(int64_t group, int64_t row) const {
        return reinterpret_cast<int32_t*>(begins) + index(group, row) * (FOURS ? 1 : chunks);
    }

    // agreed: the magnitude that the row's scale is of; null: the largest of what is left.
    template <class T>
    void take(const T* x, int64_t row, const float* agreed) {
        const int64_t span = w.every * w.group;
        if (!outliers.empty()) outliers[row].clear();
        for (int64_t g = 0; g < groups; g += w.every, x += span) {
            const uint32_t own = outliers.empty() ? largest(x, span) : set_apart(x, span, g, row);
            const uint32_t most = agreed ? magnitude(*agreed) : own;
            for (int64_t k = 0; k < w.every; ++k) take(x + k * w.group, most, g + k, row);
        }
    }

    template <class T>
    static uint32_t largest(const T* x, int64_t count) {
        uint32_t most = 0;
        for (int64_t i = 0; i < count; ++i) most = std::max(most, magnitude(wide(x[i])));
        return most;
    }

    // The largest magnitude of what is left.
    template <class T>
    uint32_t set_apart(const T* x, int64_t count, int64_t group, int64_t row) {
        uint32_t most = largest(x, count);
        if (most < OUTLIER) return most;
        most = 0;
        for (int64_t i = 0; i < count; ++i) {
            const float value = wide(x[i]);
            if (apart(magnitude(value)))
                outliers[row].push_back({int32_t(group + i / w.group), int32_t(i % w.group), value});
            else
                most = std::max(most, magnitude(value));
        }
        return most;
    }

    // most: the largest magnitude of what has this group's scale.
    template <class T>
    void take(const T* x, uint32_t most, int64_t group, int64_t row) {
        const bool some = most >= LEAST && most < NOT_FINITE;
        const float size = __builtin_bit_cast(float, most), none = most < NOT_FINITE ? 0 : NAN;
        const vec inverse = all(127.0f / size), shift = all(SHIFT);
        scale(group, row) = some ? size / 127.0f : none;
#if defined(OUTSIZE_FOURS)
        if (outliers.empty()) {
            uint8_t* to = at(group, row);
            __m512i sum = _mm512_setzero_si512();
            for (int64_t i = 0; i < w.group; i += LANES) {
                const vec shifted = held(read(x + i) * inverse) + shift;
                const __m512i found = some ? __m512i(ints(shifted) - ints(shift)) : _mm512_setzero_si512();
                sum = _mm512_add_epi32(sum, found);
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(found));
            }
            *begin(group, row) = _mm512_reduce_add_epi32(sum) * (four ? -ZERO : -MIDDLE);
            return;
        }
#endif
        alignas(64) float from[MOST];
        alignas(64) int32_t whole[MOST];
        for (int64_t i = 0; i < w.group; ++i) from[i] = wide(x[i]);
        if (!outliers.empty())
            for (int64_t i = 0; i < w.group; ++i) from[i] = apart(magnitude(from[i])) ? 0.0f : from[i];
        for (int64_t i = 0; i < w.group; i += LANES) {
            const vec shifted = held(load(from + i) * inverse) + shift;
            const ints found = some ? ints(shifted) - ints(shift) : ints{};
            std::memcpy(whole + i, &found, sizeof found);
        }
        if (FOURS) *begin(group, row) = begin_of_group(whole);
        if (!turned)
            straight(whole, reinterpret_cast<int8_t*>(at(group, row)));
        else if (four)
            by_halves(whole, reinterpret_cast<int8_t*>(at(group, row)), begin(group, row));
        else
            by_pairs(whole, reinterpret_cast<int16_t*>(at(group, row)));
    }

    // What sums by codes that count from 0 have too much, taken off.
    int32_t begin_of_group(const int32_t* x) const {
        int32_t sum = 0;
        for (int64_t i = 0; i < w.group; ++i) sum += x[i];
        return sum * (four ? -ZERO : -MIDDLE);
    }

    void straight(const int32_t* x, int8_t* to) const {
        for (int64_t i = 0; i < w.group; ++i) to[i] = int8_t(x[i]);
    }

    // Of four neighbours the first and third, then the others.
    void by_pairs(const int32_t* x, int16_t* to) const {
        for (int64_t i = 0; i < w.group; i += 4) {
            to[i] = int16_t(x[i]), to[i + 1] = int16_t(x[i + 2]);
            to[i + 2] = int16_t(x[i + 1]), to[i + 3] = int16_t(x[i + 3]);
        }
    }

    // What the lower bits of 16 bytes are multiplied by, then what the upper ones are.
    void by_halves(const int32_t* x, int8_t* to, int32_t* begins) const {
        int8_t all[MOST];
        straight(x, all);
        const int64_t half = CHUNK / 2;
        for (int64_t c = 0; c < chunks; ++c, to += CHUNK) {
            std::memcpy(to, all + c * half, half);
            std::memcpy(to + half, all + w.group / 2 + c * half, half);
            begins[c] = begin_of(to);
        }
    }
};

}  // namespace outsize
