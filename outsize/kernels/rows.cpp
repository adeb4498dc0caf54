// Products by a weight of each token alone.
//
// Every number is summed in an order of its own that depends on the token alone: not on how many
// others are computed beside it, nor on the number of threads. So a request gets the same bits
// whatever the batch. Storage is float32 or bfloat16 (dtype 0 or 1), sums are float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

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
constexpr int64_t SOME = 512;              // tokens of which x is made wide at once
constexpr int64_t MANY = 12;               // tokens for which weights are made wide beforehand

inline vec read(const float* x) { return load(x); }
inline vec read(const bfloat16* x) {
    typedef std::uint16_t halves __attribute__((vector_size(LANES * 2)));
    halves bits;
    std::memcpy(&bits, x, sizeof bits);
    return vec(__builtin_convertvector(bits, ints) << 16);
}

// A compiler would load it anew for every use, and loads would be what a product waits for.
inline void registered(vec& x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
}

#if defined(__GNUC__) && !defined(__clang__)
// Of two vectors of GROUPS groups each, in each group its second half onto its first.
template <int GROUPS>
inline __attribute__((always_inline)) vec halved(vec a, vec b) {
    constexpr int size = LANES / GROUPS, half = size > 1 ? size / 2 : 1;
    ints low, high;
    for (int l = 0; l < LANES; ++l) {
        low[l] = (l / half < GROUPS ? 0 : LANES) + l / half % GROUPS * size + l % half;
        high[l] = low[l] + half;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// The sum of all lanes of each of four, in the order of one alone.
inline __attribute__((always_inline)) void each_together(const vec* sum, float* to) {
    vec x = halved<2>(halved<1>(sum[0], sum[1]), halved<1>(sum[2], sum[3]));
    if (LANES > 4) x = halved<4>(x, x);
    if (LANES > 8) x = halved<8>(x, x);
    std::memcpy(to, &x, 4 * sizeof(float));
}
#else
inline void each_together(const vec* sum, float* to) {
    for (int n = 0; n < 4; ++n) to[n] = together(sum[n]);
}
#endif

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
    int64_t i = 0;
    for (; i + LANES <= inner; i += LANES) {
        vec left[ROWS];  // all of these in registers, and one vector of w at a time
#pragma GCC unroll 8
        for (int t = 0; t < ROWS; ++t) registered(left[t] = load(x + t * x_row + i));
#pragma GCC unroll 8
        for (int o = 0; o < COLUMNS; ++o) {
            const vec right = read(w + o * inner + i);
#pragma GCC unroll 8
            for (int t = 0; t < ROWS; ++t) sum[t][o] = fused(sum[t][o], left[t], right);
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
    for (int t = 0; t < ROWS; ++t) {
        float whole[COLUMNS];
        if constexpr (COLUMNS == 4)
            each_together(sum[t], whole);
        else
            for (int o = 0; o < COLUMNS; ++o) whole[o] = together(sum[t][o]);
        for (int o = 0; o < COLUMNS; ++o)
            y[t * y_row + o] = narrow<T>(bias ? whole[o] + bias[o] : whole[o]);
    }
}

template <class W, class T, int COLUMNS>
void down(const float* x, int64_t x_row, int64_t tokens, const W* w, int64_t inner,
                 const float* bias, T* y, int64_t y_row) {
    int64_t t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS)
        multiply<W, T, TOKENS, COLUMNS>(x + t * x_row, x_row, w, inner, bias, y + t * y_row, y_row);
    for (; t < tokens; ++t)
        multiply<W, T, 1, COLUMNS>(x + t * x_row, x_row, w, inner, bias, y + t * y_row, y_row);
}

// x as float32 in rows of whole vectors: as it lies where it does so, else some rows at a time.
template <class T>
const float* widened(const T* x, int64_t tokens, int64_t inner, std::vector<float>& to) {
    if constexpr (sizeof(T) == sizeof(float))
        if (inner % LANES == 0) return x;
    const int64_t x_row = rounded(int(inner), LANES);
    to.resize(std::max<int64_t>(to.size(), tokens * x_row));
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < inner; ++i) to[t * x_row + i] = wide(x[t * inner + i]);
    return to.data();
}

// weights(): for the thread that asks, (o, count) to rows [o, o + count) of w, count <= OUTPUTS.
template <class T, class F>
void product(const T* x, const T* bias, T* y, int64_t tokens, int64_t inner, int64_t outputs,
             int threads, F weights) {
    const int64_t x_row = rounded(int(inner), LANES);
    std::vector<float> space, wide_bias(bias ? outputs : 0);
    for (int64_t o = 0; o < int64_t(wide_bias.size()); ++o) wide_bias[o] = wide(bias[o]);
    const int64_t held = std::max<int64_t>(HELD / std::max<int64_t>(x_row, 1) / TOKENS, 1) * TOKENS;
    const int64_t tasks = (outputs + TASK - 1) / TASK;
    for (int64_t some = 0; some < tokens; some += SOME) {
        const int64_t here = std::min(SOME, tokens - some);
        const float* wide_x = widened(x + some * inner, here, inner, space);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t task = 0; task < tasks; ++task) {
            auto rows = weights();
            const int64_t last = std::min(outputs, (task + 1) * TASK);
            for (int64_t first = 0; first < here; first += held) {
                const int64_t count = std::min(held, here - first);
                const float* from = wide_x + first * x_row;
                for (int64_t o = task * TASK; o < last;) {
                    const bool whole = o + OUTPUTS <= last;
                    const float* add = bias ? wide_bias.data() + o : nullptr;
                    T* to = y + (some + first) * outputs + o;
                    const auto* w = rows(o, whole ? OUTPUTS : 1);
                    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
                    auto* call = whole ? down<W, T, OUTPUTS> : down<W, T, 1>;
                    call(from, x_row, count, w, inner, add, to, outputs);
                    o += whole ? OUTPUTS : 1;
                }
            }
        }
    }
}

// Rows of w as they lie; where many tokens meet them, made wide once for all.
template <class T>
void stored(const T* x, const T* w, const T* bias, T* y, int64_t tokens, int64_t inner,
            int64_t outputs, int threads) {
    if (sizeof(T) == sizeof(float) || tokens < MANY)
        return product(x, bias, y, tokens, inner, outputs, threads, [=] {
            return [=](int64_t o, int64_t) { return w + o * inner; };
        });
    product(x, bias, y, tokens, inner, outputs, threads, [=] {
        return [=, held = std::vector<float>(OUTPUTS * inner)](int64_t o, int64_t count) mutable {
            for (int64_t i = 0; i < count * inner; ++i) held[i] = wide(w[o * inner + i]);
            return static_cast<const float*>(held.data());
        };
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

}  // extern "C"
