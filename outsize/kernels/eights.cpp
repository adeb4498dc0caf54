// Products by codes that are whole numbers, of rows that are rounded to whole numbers of 8 bits too:
// as much of a row as one scale of the weight is for has a scale of its own, its largest magnitude over
// 127. Sums over a group are exact; then groups follow one another in float32, each number multiplied by
// the row's scale, then by the weight's, then added, each time rounded. Outliers of a row, where they
// are apart, are multiplied one after another and added at the end. So a row's bits depend on nothing
// but the row, and any processor gives them. The twin is `plain` in eights.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "codes.h"
#include "team.h"
#include "tiles.h"

namespace {

using namespace outsize;

constexpr int64_t MOST_ROWS = 128;  // that are rounded at once and stay in a cache
constexpr int64_t ACROSS = 16;      // outputs at once
constexpr int64_t CHUNK = 32;       // numbers of a row that a pass over a weight's codes takes
constexpr int64_t TASK = 64;        // outputs of a task
constexpr int64_t FEW = 2;          // rows for which codes of 8 bits are taken as they lie
constexpr int32_t ZERO = 8;         // the code of 0, of 4 bits
constexpr uint32_t LEAST = 0x0da24260u, NOT_FINITE = 0x7f800000u;  // 1e-30, bits of magnitudes
constexpr uint32_t OUTLIER = 0x40c00000u;                                // 6, from which on it is apart

#if defined(__AVX2__)
constexpr bool VECTORS = true;
#else
constexpr bool VECTORS = false;
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

inline uint32_t magnitude(float x) { return __builtin_bit_cast(uint32_t, x) & 0x7fffffffu; }
inline bool apart(uint32_t magnitude) { return magnitude >= OUTLIER && magnitude < NOT_FINITE; }

// A number of a row that is multiplied as it is: which of its group's.
struct Outlier {
    int32_t group, index;
    float value;
};

// Rows, rounded. Of each group all rows, one after another: so many whole numbers, and the scale.
struct Eights {
    const Matrix& w;
    const int64_t rows, groups, chunks;
    const bool four, turned;  // codes of 4 bits; the order in which the passes by vectors take them
    const int64_t size;       // bytes of a group
    Buffer numbers, scales, begins;
    std::vector<std::vector<Outlier>> outliers;  // by row, where they are apart

    Eights(const Matrix& weight, int64_t count)
        : w(weight), rows(count), groups(w.inner / w.group), chunks(w.group / CHUNK),
          four(w.order == HALVES), turned(VECTORS && w.group % CHUNK == 0 && (four || count > FEW)),
          size(w.group * (turned && !four ? 2 : 1)), numbers(buffer(rows * groups * size / 4 + 1)),
          scales(buffer(rows * groups)), begins(buffer(turned && four ? rows * groups * chunks : 1)),
          outliers(w.eights == OUTLIERS ? count : 0) {}

    uint8_t* at(int64_t group, int64_t row) const {
        return reinterpret_cast<uint8_t*>(numbers.get()) + (group * rows + row) * size;
    }
    int32_t* begin(int64_t group, int64_t row) const {
        return reinterpret_cast<int32_t*>(begins.get()) + (group * rows + row) * chunks;
    }

    // agreed: the magnitude that the row's scale is of; null: the largest of what is left.
    template <class T>
    void take(const T* x, int64_t row, const float* agreed) {
        const int64_t span = w.every * w.group;
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
        alignas(64) float from[MOST];
        alignas(64) int32_t whole[MOST];
        for (int64_t i = 0; i < w.group; ++i) from[i] = wide(x[i]);
        if (!outliers.empty())
            for (int64_t i = 0; i < w.group; ++i) from[i] = apart(magnitude(from[i])) ? 0.0f : from[i];
        const bool some = most >= LEAST && most < NOT_FINITE;
        const float size = __builtin_bit_cast(float, most), none = most < NOT_FINITE ? 0 : NAN;
        const vec inverse = all(127.0f / size), shift = all(SHIFT);
        for (int64_t i = 0; i < w.group; i += LANES) {
            const vec shifted = held(load(from + i) * inverse) + shift;
            const ints found = some ? ints(shifted) - ints(shift) : ints{};
            std::memcpy(whole + i, &found, sizeof found);
        }
        scales[group * rows + row] = some ? size / 127.0f : none;
        if (!turned)
            straight(whole, reinterpret_cast<int8_t*>(at(group, row)));
        else if (four)
            by_halves(whole, reinterpret_cast<int8_t*>(at(group, row)), begin(group, row));
        else
            by_pairs(whole, reinterpret_cast<int16_t*>(at(group, row)));
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

#if defined(__AVX2__)
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

// A group's whole sums onto those of the groups before.
inline void add(__m256i whole, __m256 size, __m256 scale, float* to) {
    const __m256 more = held(_mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(whole), size), scale));
    _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), more));
}

// The same of ROWS rows by ACROSS outputs.
template <bool FOUR, int CHUNKS, int ROWS>
void add(const Eights& r, int64_t g, int64_t row, const uint8_t* w, const float* scales, float* to) {
    __m256i whole[ROWS][2];
    sums<FOUR, CHUNKS, ROWS>(r.at(g, row), r.size, r.begin(g, row), r.chunks, w, whole);
    const float* sizes = r.scales.get() + g * r.rows + row;
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

void by_few(const Eights& r, const uint8_t* const* rows, const float* scales, float* to) {
    for (int64_t g = 0; g < r.groups; ++g, scales += ACROSS)
        for (int64_t t = 0; t < r.rows; ++t)
            for (int v = 0; v < 2; ++v) {
                const __m256i whole = across(r.at(g, t), rows + 8 * v, g * r.w.block + r.w.head, r.w.group);
                const __m256 size = _mm256_set1_ps(r.scales[g * r.rows + t]);
                add(whole, size, _mm256_load_ps(scales + 8 * v), to + t * ACROSS + 8 * v);
            }
}

template <bool FOUR, int CHUNKS>
void by_vectors(const Eights& r, const uint8_t* const* rows, const float* scales, float* to) {
    alignas(64) uint8_t codes[MOST * ACROSS * 2];
    const int64_t block = r.w.block;
    for (int64_t g = 0; g < r.groups; ++g, scales += ACROSS) {
        unpack<FOUR>(rows, g * block + r.w.head, CHUNKS ? CHUNKS : r.chunks, codes);
        int64_t t = 0;
        for (; t + 4 <= r.rows; t += 4) add<FOUR, CHUNKS, 4>(r, g, t, codes, scales, to);
        if (t + 2 <= r.rows) {
            add<FOUR, CHUNKS, 2>(r, g, t, codes, scales, to);
            t += 2;
        }
        if (t < r.rows) add<FOUR, CHUNKS, 1>(r, g, t, codes, scales, to);
    }
}
#endif

// One sum of a group, as codes lie.
inline int32_t summed(const int8_t* x, const uint8_t* codes, int64_t group, bool four) {
    int32_t sum = 0;
    const int64_t half = group / 2;
    if (four)
        for (int64_t i = 0; i < half; ++i)
            sum += x[i] * ((codes[i] & 15) - ZERO) + x[half + i] * ((codes[i] >> 4) - ZERO);
    else
        for (int64_t i = 0; i < group; ++i) sum += x[i] * int8_t(codes[i]);
    return sum;
}

void one_by_one(const Eights& r, const uint8_t* const* rows, const float* scales, float* to) {
    for (int64_t g = 0; g < r.groups; ++g, scales += ACROSS)
        for (int64_t t = 0; t < r.rows; ++t)
            for (int64_t o = 0; o < ACROSS; ++o) {
                const int8_t* x = reinterpret_cast<const int8_t*>(r.at(g, t));
                const uint8_t* codes = rows[o] + g * r.w.block + r.w.head;
                const float sum = float(summed(x, codes, r.w.group, r.four));
                to[t * ACROSS + o] += held(held(sum * r.scales[g * r.rows + t]) * scales[o]);
            }
}

// Of ACROSS outputs, by groups. Lines of the next outputs are asked for: rows are too short for a
// processor to foresee them.
template <class F>
inline void scales_of(const uint8_t* const* rows, int64_t groups, int64_t block, F wide, float* to) {
    const int64_t row = groups * block;
    for (int64_t o = 0; o < ACROSS; ++o) {
        for (int64_t i = 0; i < row; i += 64) __builtin_prefetch(rows[o] + ACROSS * row + i);
        for (int64_t g = 0; g < groups; ++g) {
            uint16_t bits;
            std::memcpy(&bits, rows[o] + g * block, sizeof bits);
            to[g * ACROSS + o] = wide(bits);
        }
    }
}

// The same of scales that lie apart.
inline void scales_apart(const Matrix& w, int64_t first, int64_t groups, float* to) {
    for (int64_t o = 0; o < ACROSS; ++o) {
        const int64_t row = std::min(first + o, w.outputs - 1) * groups;
        for (int64_t g = 0; g < groups; ++g) to[g * ACROSS + o] = w.scales[(row + g) / w.every];
    }
}

// What is apart of a row, by ACROSS outputs, onto their sums.
inline void add_outliers(const Eights& r, int64_t t, const uint8_t* const* rows, const float* scales,
                         float* sums) {
    vec sum[ACROSS / LANES] = {};
    const int64_t half = r.w.group / 2;
    for (const Outlier& x : r.outliers[t]) {
        const int64_t from = x.group * r.w.block + r.w.head, i = x.index;
        alignas(64) float codes[ACROSS];
        for (int64_t o = 0; o < ACROSS; ++o) {
            const uint8_t* at = rows[o] + from;
            if (!r.four)
                codes[o] = int8_t(at[i]);
            else
                codes[o] = (i < half ? at[i] & 15 : at[i - half] >> 4) - ZERO;
        }
        for (int64_t v = 0; v < ACROSS / LANES; ++v) {
            const vec weight = load(codes + v * LANES) * load(scales + x.group * ACROSS + v * LANES);
            sum[v] = sum[v] + held(all(x.value) * held(weight));
        }
    }
    for (int64_t v = 0; v < ACROSS / LANES; ++v) store(sums + v * LANES, load(sums + v * LANES) + sum[v]);
}

// Sums of COUNT outputs, or of `some`, with what is added.
template <int64_t COUNT, class T>
inline void ended(const float* sums, int64_t rows, int64_t some, const T* bias, T* y, int64_t row) {
    const int64_t count = COUNT ? COUNT : some;
    float more[ACROSS] = {};
    for (int64_t o = 0; o < count; ++o) more[o] = bias ? wide(bias[o]) : 0.0f;
    for (int64_t t = 0; t < rows; ++t, sums += ACROSS, y += row)
        if (bias)
            for (int64_t o = 0; o < count; ++o) y[o] = narrow<T>(sums[o] + more[o]);
        else
            for (int64_t o = 0; o < count; ++o) y[o] = narrow<T>(sums[o]);
}

// Outputs [first, first + ACROSS), those that there are, of all rows. work: scales and sums.
template <class T>
void panel(const Eights& r, int64_t first, float* work, T* y) {
    const Layout layout = r.w.layout();
    const int64_t count = std::min(ACROSS, r.w.outputs - first), row = r.groups * layout.block;
    const uint8_t* rows[ACROSS];
    for (int64_t o = 0; o < ACROSS; ++o)  // the last again where there are no more
        rows[o] = static_cast<const uint8_t*>(r.w.data) + (first + std::min(o, count - 1)) * row;
    float *scales = work, *sums = work + r.groups * ACROSS;
    if (layout.scales == APART)
        scales_apart(r.w, first, r.groups, scales);
    else if (layout.scales == FLOAT16)
        scales_of(rows, r.groups, layout.block, [](uint16_t bits) { return half(bits); }, scales);
    else
        scales_of(
            rows, r.groups, layout.block, [](uint16_t bits) { return wide(bfloat16{bits}); }, scales);
    std::fill(sums, sums + r.rows * ACROSS, 0.0f);
#if defined(__AVX2__)
    auto* four = r.chunks == 1 ? by_vectors<true, 1> : by_vectors<true, 0>;
    auto* eight = r.chunks == 1 ? by_vectors<false, 1> : by_vectors<false, 0>;
    auto* alone = r.w.group % CHUNK || r.four ? one_by_one : by_few;
    auto* call = !r.turned ? alone : r.four ? four : eight;
#else
    auto* call = one_by_one;
#endif
    call(r, rows, scales, sums);
    for (int64_t t = 0; t < int64_t(r.outliers.size()); ++t)
        if (!r.outliers[t].empty()) add_outliers(r, t, rows, scales, sums + t * ACROSS);
    const T* bias = r.w.bias ? static_cast<const T*>(r.w.bias) + first : nullptr;
    auto* end = count == ACROSS ? ended<ACROSS, T> : ended<0, T>;
    end(sums, r.rows, count, bias, y + first, r.w.outputs);
}

template <class T>
void product(const T* x, const Matrix& w, T* y, int64_t tokens, Team team) {
    const int64_t tasks = (w.outputs + TASK - 1) / TASK;
    const int64_t begin = team.first(tasks), end = team.last(tasks);
    for (int64_t some = 0; some < tokens; some += MOST_ROWS) {
        const int64_t count = std::min(MOST_ROWS, tokens - some);
        Eights rows(w, count);
#pragma omp parallel num_threads(team.count) if (team.starts())
        {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < count; ++t)
                rows.take(x + (some + t) * w.inner, t, w.most ? w.most + some + t : nullptr);
            const Buffer work = buffer((rows.groups + count) * ACROSS);
#pragma omp for schedule(static)
            for (int64_t task = begin; task < end; ++task) {
                const int64_t last = std::min(w.outputs, (task + 1) * TASK);
                for (int64_t o = task * TASK; o < last; o += ACROSS)
                    panel(rows, o, work.get(), y + some * w.outputs);
            }
        }
    }
}

}  // namespace

extern "C" {

// As outsize_rows_product, of a weight whose codes are bytes or halves that count from -8.
void outsize_eights_product(int dtype, const void* x, const Matrix* w, void* y, int64_t tokens,
                            int threads, int index) {
    const Team team(threads, index);
    if (dtype == 0)
        product(static_cast<const float*>(x), *w, static_cast<float*>(y), tokens, team);
    else
        product(static_cast<const bfloat16*>(x), *w, static_cast<bfloat16*>(y), tokens, team);
}

}  // extern "C"
