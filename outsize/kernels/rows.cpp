// What serving computes for each token alone: products by a weight, and attention over pages.
//
// Every number is summed in an order of its own that depends on the token alone: not on how many
// others are computed beside it, nor on the number of threads. So a request gets the same bits
// whatever the batch. Storage is float32 or bfloat16 (dtype 0 or 1), sums are float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "codes.h"
#include "tiles.h"

namespace {

using namespace outsize;

// Products ------------------------------------------------------------------------------------------
//
// y[t][o] = sum over i of x[t][i] w[o][i]: LANES partial sums by i mod LANES, each in the order of i,
// and then together in one fixed order. Rows of w are read as they lie in files.

constexpr int TOKENS = 3, OUTPUTS = 4;     // of a block in registers
constexpr int64_t HELD = 40 * 1024;        // floats of x that stay in a cache while w goes by
constexpr int64_t TASK = 64;               // outputs of a task, a multiple of OUTPUTS

inline vec read(const float* x) { return load(x); }
inline vec read(const bfloat16* x) {
    typedef std::uint16_t halves __attribute__((vector_size(LANES * 2)));
    halves bits;
    std::memcpy(&bits, x, sizeof bits);
    return vec(__builtin_convertvector(bits, ints) << 16);
}

// sum + a b rounded once. Said to the processor: a compiler may fuse the two in one loop and not in
// another, as GCC does for Zen where a sum is a single chain.
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

inline float together(vec sum) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) sum[l] += sum[l + width];
    return sum[0];
}

// A block: ROWS tokens by COLUMNS outputs. x: padded with zeros to whole vectors.
template <class W, class T, int ROWS, int COLUMNS>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t x_row, const W* w,
                                                    int64_t inner, const float* bias, T* y,
                                                    int64_t y_row) {
    vec sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; ++t)
#pragma GCC unroll 8
        for (int o = 0; o < COLUMNS; ++o) sum[t][o] = vec{};
    const int64_t whole = inner / LANES * LANES;
    int64_t i = 0;
    for (; i < whole; i += LANES) {
        vec right[COLUMNS];
#pragma GCC unroll 8
        for (int o = 0; o < COLUMNS; ++o) right[o] = read(w + o * inner + i);
#pragma GCC unroll 8
        for (int t = 0; t < ROWS; ++t) {
            const vec left = load(x + t * x_row + i);
#pragma GCC unroll 8
            for (int o = 0; o < COLUMNS; ++o) sum[t][o] = fused(sum[t][o], left, right[o]);
        }
    }
    if (i < inner) {
        for (int o = 0; o < COLUMNS; ++o) {
            W some[LANES] = {};
            std::copy(w + o * inner + i, w + (o + 1) * inner, some);
            const vec right = read(some);
            for (int t = 0; t < ROWS; ++t) sum[t][o] = fused(sum[t][o], load(x + t * x_row + i), right);
        }
    }
    for (int t = 0; t < ROWS; ++t)
        for (int o = 0; o < COLUMNS; ++o)
            y[t * y_row + o] = narrow<T>(together(sum[t][o]) + (bias ? bias[o] : 0.0f));
}

template <class W, class T, int COLUMNS>
inline void down(const float* x, int64_t x_row, int64_t tokens, const W* w, int64_t inner,
                 const float* bias, T* y, int64_t y_row) {
    int64_t t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS)
        multiply<W, T, TOKENS, COLUMNS>(x + t * x_row, x_row, w, inner, bias, y + t * y_row, y_row);
    for (; t < tokens; ++t)
        multiply<W, T, 1, COLUMNS>(x + t * x_row, x_row, w, inner, bias, y + t * y_row, y_row);
}

// weights(o, count): rows [o, o + count) of w, count at most OUTPUTS, for the thread that asks.
template <class T, class F>
void product(const T* x, const T* bias, T* y, int64_t tokens, int64_t inner, int64_t outputs,
             int threads, F weights) {
    const int64_t x_row = (inner + LANES - 1) / LANES * LANES;
    std::vector<float> wide_x(tokens * x_row), wide_bias(bias ? outputs : 0);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < inner; ++i) wide_x[t * x_row + i] = wide(x[t * inner + i]);
    for (int64_t o = 0; o < int64_t(wide_bias.size()); ++o) wide_bias[o] = wide(bias[o]);
    const int64_t held = std::max<int64_t>(HELD / x_row / TOKENS, 1) * TOKENS;
    const int64_t tasks = (outputs + TASK - 1) / TASK;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t task = 0; task < tasks; ++task) {
        auto rows = weights();
        const int64_t last = std::min(outputs, (task + 1) * TASK);
        for (int64_t first = 0; first < tokens; first += held) {
            const int64_t some = std::min(held, tokens - first);
            const float* from = wide_x.data() + first * x_row;
            for (int64_t o = task * TASK; o < last;) {
                const float* add = bias ? wide_bias.data() + o : nullptr;
                T* to = y + first * outputs + o;
                if (o + OUTPUTS <= last) {
                    const auto* w = rows(o, OUTPUTS);
                    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
                    down<W, T, OUTPUTS>(from, x_row, some, w, inner, add, to, outputs);
                    o += OUTPUTS;
                } else {
                    const auto* w = rows(o, 1);
                    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
                    down<W, T, 1>(from, x_row, some, w, inner, add, to, outputs);
                    ++o;
                }
            }
        }
    }
}

template <class T>
void stored(const T* x, const T* w, const T* bias, T* y, int64_t tokens, int64_t inner,
            int64_t outputs, int threads) {
    product(x, bias, y, tokens, inner, outputs, threads, [=] {
        return [=](int64_t o, int64_t) { return w + o * inner; };
    });
}

// Codes are decoded a few rows at a time, rounded to what x is held in.
template <class T>
void coded(const T* x, const uint8_t* blocks, const Layout& layout, const float* scales,
           const float* table, const T* bias, T* y, int64_t tokens, int64_t inner, int64_t outputs,
           int threads) {
    product(x, bias, y, tokens, inner, outputs, threads, [&] {
        return [&, held = std::vector<float>(OUTPUTS * inner)](int64_t o, int64_t count) mutable {
            const int64_t groups = inner / layout.group;
            for (int64_t g = 0; g < count * groups; ++g)
                one(blocks + (o * groups + g) * layout.block, layout, table,
                    scales[o * groups + g], held.data() + g * layout.group);
            if (sizeof(T) != sizeof(float))
                for (int64_t i = 0; i < count * inner; ++i) held[i] = wide(narrow<T>(held[i]));
            return static_cast<const float*>(held.data());
        };
    });
}

// Attention -----------------------------------------------------------------------------------------
//
// A token's queries of one key-value head over the pages that it sees, in order: a running maximum
// and sum (Milakov and Gimelshein, 2018), a page at a time.

constexpr float LOG2E = 1.44269504f;
constexpr float NEVER = -3.0e38f;
constexpr int PAGE = 64;  // keys of a page at most

struct Pages {
    const int64_t* tables;    // pages of each sequence, one behind another
    const int64_t* begins;    // by token, where its sequence's pages begin
    const int64_t* positions;  // by token, its place in the sequence
    int64_t page, heads, groups, key, value, window;
    float scale, softcap;  // softcap 0: none
};

inline float dot(const float* q, const float* k, int64_t size) {
    vec sum = vec{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum = fused(sum, load(q + i), load(k + i));
    float all = together(sum);
    for (; i < size; ++i) all += q[i] * k[i];
    return all;
}

template <class T>
inline void widen(const T* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = wide(from[i]);
}

template <class T>
void token(const T* q, const T* keys, const T* values, T* out, const Pages& p, int64_t t,
           int64_t group) {
    const int64_t repeat = p.heads / p.groups, place = p.positions[t];
    const int64_t low = std::max<int64_t>(0, place - p.window + 1);
    float k[WIDTH], v[WIDTH];
    std::vector<float> queries(repeat * p.key), sums(repeat * p.value, 0.0f), weights(repeat * PAGE);
    std::vector<float> top(repeat, NEVER), total(repeat, 0.0f);
    widen(q + (t * p.heads + group * repeat) * p.key, queries.data(), repeat * p.key);
    for (int64_t page = low / p.page; page <= place / p.page; ++page) {
        const int64_t at = p.tables[p.begins[t] + page] * p.page;
        const int64_t first = std::max(low, page * p.page) - page * p.page;
        const int64_t last = std::min(place + 1, (page + 1) * p.page) - page * p.page;
        for (int64_t i = first; i < last; ++i) {
            widen(keys + ((at + i) * p.groups + group) * p.key, k, p.key);
            for (int64_t r = 0; r < repeat; ++r) {
                float score = dot(queries.data() + r * p.key, k, p.key) * p.scale;
                if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
                weights[r * PAGE + i] = score * LOG2E;
            }
        }
        for (int64_t r = 0; r < repeat; ++r) {
            float* mine = weights.data() + r * PAGE;
            const float highest = std::max(top[r], *std::max_element(mine + first, mine + last));
            const float factor = power(all(top[r] - highest))[0];
            top[r] = highest;
            total[r] *= factor;
            for (int64_t i = first; i < last; ++i) {
                mine[i] = power(all(mine[i] - highest))[0];
                total[r] += mine[i];
            }
            for (int64_t d = 0; d < p.value; ++d) sums[r * p.value + d] *= factor;
        }
        for (int64_t i = first; i < last; ++i) {
            widen(values + ((at + i) * p.groups + group) * p.value, v, p.value);
            for (int64_t r = 0; r < repeat; ++r) {
                const float weight = weights[r * PAGE + i];
                float* sum = sums.data() + r * p.value;
                for (int64_t d = 0; d < p.value; ++d) sum[d] += weight * v[d];
            }
        }
    }
    for (int64_t r = 0; r < repeat; ++r)
        for (int64_t d = 0; d < p.value; ++d)
            out[(t * p.heads + group * repeat + r) * p.value + d] =
                narrow<T>(sums[r * p.value + d] / total[r]);
}

template <class T>
void attend(const T* q, const T* keys, const T* values, T* out, const Pages& p, int64_t tokens,
            int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4) collapse(2) if (threads > 1)
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t group = 0; group < p.groups; ++group)
            token<T>(q, keys, values, out, p, t, group);
}

}  // namespace

extern "C" {

// y (tokens, outputs) = x (tokens, inner) w (outputs, inner)^T + bias (outputs) or null.
void outsize_rows_product(int dtype, const void* x, const void* w, const void* bias, void* y,
                          int64_t tokens, int64_t inner, int64_t outputs, int threads) {
    if (dtype == 0)
        stored(static_cast<const float*>(x), static_cast<const float*>(w),
               static_cast<const float*>(bias), static_cast<float*>(y), tokens, inner, outputs,
               threads);
    else
        stored(static_cast<const bfloat16*>(x), static_cast<const bfloat16*>(w),
               static_cast<const bfloat16*>(bias), static_cast<bfloat16*>(y), tokens, inner,
               outputs, threads);
}

// The same of a weight that is coded: blocks of rows one after another, a scale for each.
void outsize_rows_product_coded(int dtype, int order, const void* x, const void* blocks,
                                const float* scales, const float* table, const void* bias, void* y,
                                int64_t tokens, int64_t inner, int64_t outputs, int64_t group,
                                int64_t block, int64_t head, int threads) {
    const Layout layout{order, group, block, head};
    const uint8_t* raw = static_cast<const uint8_t*>(blocks);
    if (dtype == 0)
        coded(static_cast<const float*>(x), raw, layout, scales, table,
              static_cast<const float*>(bias), static_cast<float*>(y), tokens, inner, outputs,
              threads);
    else
        coded(static_cast<const bfloat16*>(x), raw, layout, scales, table,
              static_cast<const bfloat16*>(bias), static_cast<bfloat16*>(y), tokens, inner,
              outputs, threads);
}

// sizes: tokens of a page (at most PAGE), heads, groups, key and value sizes, window.
void outsize_pages_attend(int dtype, const void* q, const void* keys, const void* values, void* out,
                          const int64_t* tables, const int64_t* begins, const int64_t* positions,
                          const int64_t* sizes, int64_t tokens, float scale, float softcap,
                          int threads) {
    const Pages p{tables,   begins,   positions, sizes[0], sizes[1], sizes[2],
                  sizes[3], sizes[4], sizes[5],  scale,    softcap};
    if (dtype == 0)
        attend(static_cast<const float*>(q), static_cast<const float*>(keys),
               static_cast<const float*>(values), static_cast<float*>(out), p, tokens, threads);
    else
        attend(static_cast<const bfloat16*>(q), static_cast<const bfloat16*>(keys),
               static_cast<const bfloat16*>(values), static_cast<bfloat16*>(out), p, tokens,
               threads);
}

}  // extern "C"
