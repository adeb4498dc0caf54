// Products of small tiles held in cache, in float32, with the vectors that the processor has.
//
// C (rows, columns) = A B or more, a block of C in registers, A broadcast from memory, B by vectors.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "storage.h"

namespace outsize {

using std::int64_t;

#if defined(__AVX512F__)
constexpr int LANES = 16, PANEL = 4;  // PANEL: vectors of C across, as the registers allow
constexpr int TALL[] = {0, 12, 12, 8, 6};  // rows of C by vectors across
#elif defined(__AVX__)
constexpr int LANES = 8, PANEL = 2;
constexpr int TALL[] = {0, 8, 6};
#elif defined(__aarch64__)
constexpr int LANES = 4, PANEL = 4;
constexpr int TALL[] = {0, 12, 12, 8, 6};
#else
constexpr int LANES = 4, PANEL = 2;
constexpr int TALL[] = {0, 8, 6};
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef std::int32_t ints __attribute__((vector_size(LANES * 4)));

constexpr int BLOCK = 64;        // rows of a tile, or its columns where it is turned
constexpr int WIDTH = 256;       // the largest head size
constexpr int ROW = WIDTH + 16;  // floats a row of a tile: rows fall into different cache sets
constexpr int EVEN = 2;          // rows of C come in pairs

inline vec load(const float* x) {
    vec y;
    std::memcpy(&y, x, sizeof y);
    return y;
}
inline void store(float* x, vec y) { std::memcpy(x, &y, sizeof y); }
inline vec read(const float* x) { return load(x); }
inline vec read(const bfloat16* x) {
    typedef std::uint16_t halves __attribute__((vector_size(LANES * 2)));
    halves bits;
    std::memcpy(&bits, x, sizeof bits);
    return vec(__builtin_convertvector(bits, ints) << 16);
}
inline vec all(float x) { return x - vec{}; }

// sum + a b rounded once. Said to the processor: a compiler may fuse the two in one loop and not in
// another, as GCC does for Zen where a sum is a single chain; and what training and serving sum in
// different loops is to be the same.
inline vec fused(vec sum, vec a, vec b) {
#if defined(__AVX512F__)
    return vec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(sum)));
#elif defined(__FMA__)
    return vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(sum)));
#elif defined(__aarch64__)
    return vec(vfmaq_f32(float32x4_t(sum), float32x4_t(a), float32x4_t(b)));
#else
    return sum + a * b;
#endif
}

// The sum of all lanes: halves onto each other, and so on.
inline float together(vec sum) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) sum[l] += sum[l + width];
    return sum[0];
}

// (2^r - 1) / r for |r| <= 1/2: a polynomial fitted for the least relative error.
inline vec slope_of_power(vec r) {
    vec p = fused(all(1.339887445e-3f), r, all(1.535336180e-4f));
    p = fused(all(9.618437358e-3f), p, r);
    p = fused(all(5.550332471e-2f), p, r);
    p = fused(all(2.402264791e-1f), p, r);
    return fused(all(6.931472029e-1f), p, r);
}

constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// 2^x within 2 units in the last place for x up to 127; 2^-126 below -126; NaN for NaN. x = n + r
// with |r| <= 1/2.
inline vec power(vec x) {
    const vec low = all(-126.0f), held = x < low ? low : x;
    const vec shifted = held + all(SHIFT), r = held - (shifted - all(SHIFT));
    const vec p = fused(all(1.0f), slope_of_power(r), r);
    return vec(ints(p) + (ints(shifted) << 23));
}

// tanh(x) of y = 2 log2(e) x, to a few units in the last place: m / (m + 2) of m = 2^|y| - 1.
inline vec hyperbolic(vec y) {
    const vec none = vec{}, most = all(60.0f);  // tanh is 1 from y = 26 on
    vec size = y < none ? none - y : y;
    size = size > most ? most : size;
    const vec shifted = size + all(SHIFT), r = size - (shifted - all(SHIFT));
    const vec whole = vec((ints(shifted) << 23) + ints(all(1.0f)));  // 2^n
    const vec less = fused(whole - all(1.0f), slope_of_power(r) * r, whole);
    const vec t = less / (less + all(2.0f));
    return y < none ? none - t : t;
}

constexpr float LOG2E = 1.44269504f;
constexpr float NEVER = -3.0e38f;  // a score that is not seen; finite, so that differences are

// What keeps scores, times log2(e), within a cap: c tanh(s / c). size 0: nothing does.
struct Cap {
    float size, bend;

    explicit Cap(float c) : size(c * LOG2E), bend(c > 0 ? 2 / c : 0) {}
    vec operator()(vec x) const { return fused(vec{}, all(size), hyperbolic(x * all(bend))); }
};

// Products ------------------------------------------------------------------------------------------

// Which part of a product a diagonal tile needs; keys and queries of a tile start together.
enum Part {
    WHOLE,
    RIGHT,   // of C, the columns from the row on: scores of keys down, queries across
    AFTER,   // of the sum, the terms from the row on: keys' gradients, over queries
    BEFORE,  // of the sum, the terms up to the row: queries' results, over keys
};

// C (ROWS, VECTORS) = A B, or factor[row] * C + A B. A's strides are constants: all its addresses
// are one register and a displacement.
template <int ROWS, int VECTORS, int DOWN, int ALONG>
inline __attribute__((always_inline)) void micro(float* c, int64_t c_row, const float* a,
                                                 const float* b, int64_t b_row, int first, int last,
                                                 const float* factor, bool into) {
    vec sum[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) sum[i][j] = vec{};
    a += int64_t(first) * ALONG;
    b += int64_t(first) * b_row;
    for (int k = first; k < last; ++k, a += ALONG, b += b_row) {
        vec right[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) right[j] = load(b + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            const vec left = all(a[i * DOWN]);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; ++j) sum[i][j] = fused(sum[i][j], left, right[j]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) {
            float* to = c + i * c_row + j * LANES;
            if (factor)
                sum[i][j] = fused(sum[i][j], load(to), all(factor[i]));
            else if (into)
                sum[i][j] += load(to);
            store(to, sum[i][j]);
        }
}

struct Product {
    float* c;
    int64_t c_row;
    const float* a;
    const float* b;
    int64_t b_row;
    int rows, columns, terms;  // rows: even; columns: a multiple of LANES
    Part part;
    bool into;            // add to C
    const float* factor;  // by row, for what C was; or null
};

template <int ROWS, int VECTORS, int DOWN, int ALONG>
inline void block(const Product& p, int row, int column) {
    const int first = p.part == AFTER ? row : 0;
    const int last = p.part == BEFORE ? std::min(p.terms, row + ROWS) : p.terms;
    micro<ROWS, VECTORS, DOWN, ALONG>(p.c + row * p.c_row + column, p.c_row, p.a + row * DOWN,
                                      p.b + column, p.b_row, first, last,
                                      p.factor ? p.factor + row : nullptr, p.into);
}

// Rows [row, end) of C by VECTORS columns, tall blocks first; END: what remains of a tile.
template <int ROWS, int VECTORS, int DOWN, int ALONG>
inline int down(const Product& p, int row, int end, int column) {
    for (; row + ROWS <= end; row += ROWS) block<ROWS, VECTORS, DOWN, ALONG>(p, row, column);
    if constexpr (ROWS > EVEN) {
        constexpr int less = ROWS > 8 ? 8 : ROWS > 4 ? 4 : 2;
        return down<less, VECTORS, DOWN, ALONG>(p, row, end, column);
    }
    return row;
}

template <int VECTORS, int DOWN, int ALONG>
void panel(const Product& p, int row, int end, int column, int vectors) {
    if constexpr (VECTORS > 1)
        if (vectors < VECTORS) return panel<VECTORS - 1, DOWN, ALONG>(p, row, end, column, vectors);
    down<TALL[VECTORS], VECTORS, DOWN, ALONG>(p, row, end, column);
}

// C by panels of columns, as equal as they can be.
template <int DOWN, int ALONG>
void product(const Product& p) {
    const int vectors = p.columns / LANES, panels = (vectors + PANEL - 1) / PANEL;
    for (int n = 0; n < panels; ++n) {
        const int from = vectors * n / panels, to = vectors * (n + 1) / panels;
        if (p.part != RIGHT) {
            panel<PANEL, DOWN, ALONG>(p, 0, p.rows, from * LANES, to - from);
            continue;
        }
        for (int v = from; v < to; ++v) {  // rows that need the panel from vector v on
            const int first = v == from ? 0 : v * LANES, last = (v + 1) * LANES;
            panel<PANEL, DOWN, ALONG>(p, first, std::min(p.rows, last), v * LANES, to - v);
        }
    }
}

// Tiles ---------------------------------------------------------------------------------------------

// Rows of a tensor in memory: tokens of one head. rooms: which row a token has; null: its own.
template <class T>
struct Rows {
    const T* start;
    int64_t stride;
    int size;
    const int64_t* rooms = nullptr;

    const T* row(int64_t token) const { return start + (rooms ? rooms[token] : token) * stride; }
};

inline int rounded(int x, int step) { return (x + step - 1) / step * step; }

// (count, size) to a tile, zeros to an even number of rows and whole vectors.
template <class T>
void copy(const Rows<T>& from, int64_t first, int count, float* to) {
    const int width = rounded(from.size, LANES);
    for (int i = 0; i < count; ++i) {
        const T* __restrict__ x = from.row(first + i);
        float* __restrict__ y = to + i * ROW;
        for (int d = 0; d < from.size; ++d) y[d] = wide(x[d]);
        for (int d = from.size; d < width; ++d) y[d] = 0;
    }
    for (int i = count; i < rounded(count, EVEN); ++i) std::fill_n(to + i * ROW, width, 0.0f);
}

#if defined(__GNUC__) && !defined(__clang__)
// Rows and columns exchanged: in each stage the halves of pairs of groups of STEP lanes.
template <int STEP>
inline __attribute__((always_inline)) void exchange(vec (&x)[LANES]) {
    if constexpr (STEP < LANES) {
        ints low, high;
        for (int l = 0; l < LANES; ++l) {
            low[l] = l & STEP ? LANES + l - STEP : l;
            high[l] = l & STEP ? LANES + l : l + STEP;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
            if (!(i & STEP)) {
                const vec a = x[i], b = x[i + STEP];
                x[i] = __builtin_shuffle(a, b, low);
                x[i + STEP] = __builtin_shuffle(a, b, high);
            }
        exchange<STEP * 2>(x);
    }
}
#else
template <int STEP>
inline void exchange(vec (&x)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < i; ++j) {
            const float held = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = held;
        }
}
#endif

// A tile of `count` rows, size across, to (size, BLOCK), times a factor; zeros to whole vectors. row:
// floats from one of its rows to the next.
inline void transpose(float* tile, int count, int size, float factor, float* to, int row = ROW) {
    const int rows = rounded(count, LANES), width = rounded(size, LANES);
    for (int i = rounded(count, EVEN); i < rows; ++i) std::fill_n(tile + i * row, width, 0.0f);
    for (int i = 0; i < rows; i += LANES)
        for (int d = 0; d < width; d += LANES) {
            vec x[LANES];
#pragma GCC unroll 16
            for (int l = 0; l < LANES; ++l) x[l] = load(tile + (i + l) * row + d) * factor;
            exchange<1>(x);
#pragma GCC unroll 16
            for (int l = 0; l < LANES; ++l) store(to + (d + l) * BLOCK + i, x[l]);
        }
}

struct Freed {
    void operator()(float* x) const { ::operator delete[](x, std::align_val_t(64)); }
};
using Buffer = std::unique_ptr<float[], Freed>;

// Zeroed once: parts that a product skips are masked, and must not hold what is no number.
inline Buffer buffer(int64_t count) {
    Buffer made(new (std::align_val_t(64)) float[count]);
    std::fill_n(made.get(), count, 0.0f);
    return made;
}

}  // namespace outsize
