// Products by a weight of each token alone.
//
// Every number is summed in an order of its own that depends on the token alone: not on how many
// others are computed beside it, nor on the number of threads. So a request gets the same bits
// whatever the batch. Storage is float32 or bfloat16, as this is compiled, sums are float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "codes.h"
#include "team.h"
#include "tiles.h"

namespace {

using namespace outsize;

// Products ------------------------------------------------------------------------------------------
//
// y[t][o] = sum over i of x[t][i] w[o][i]: LANES partial sums by i mod LANES, each in the order of i,
// and then together in one fixed order. Rows of w are read as they lie in files.

constexpr int TOKENS = 3, OUTPUTS = 4;     // of a block in registers
constexpr int MORE = 4, FEWER = 2;         // the same of one whose weights are decoded there
constexpr int64_t HELD = 40 * 1024;        // floats of x that stay in a cache while w goes by
constexpr int64_t TASK = 64;               // outputs of a task, a multiple of OUTPUTS
constexpr int64_t SOME = 512;              // tokens of which x is made wide at once
constexpr int64_t MANY = 12;               // tokens for which weights are made wide beforehand
constexpr int64_t LOTS = 48;               // the same of codes

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

template <class T, int ROWS, int COLUMNS>
inline __attribute__((always_inline)) void ended(const vec (&sum)[ROWS][COLUMNS], const float* bias,
                                                 T* y, int64_t y_row) {
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
    ended(sum, bias, y, y_row);
}

template <class W, class T, int COLUMNS>
void down(const float* x, int64_t x_row, int64_t tokens, const W* w, int64_t inner,
          const float* bias, T* y, int64_t y_row) {
    int64_t t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS)
        multiply<W, T, TOKENS, COLUMNS>(x + t * x_row, x_row, w, inner, bias, y + t * y_row, y_row);
    if (t + 2 <= tokens) {
        multiply<W, T, 2, COLUMNS>(x + t * x_row, x_row, w, inner, bias, y + t * y_row, y_row);
        t += 2;
    }
    if (t < tokens)
        multiply<W, T, 1, COLUMNS>(x + t * x_row, x_row, w, inner, bias, y + t * y_row, y_row);
}

// x as float32 in rows of whole vectors: as it lies where it does so, else some rows at a time, in
// room that the first of them take.
template <class T>
const float* widened(const T* x, int64_t tokens, int64_t inner, Buffer& to) {
    if constexpr (sizeof(T) == sizeof(float))
        if (inner % LANES == 0) return x;
    const int64_t x_row = rounded(int(inner), LANES);
    if (!to) to = buffer(tokens * x_row);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < inner; ++i) to[t * x_row + i] = wide(x[t * inner + i]);
    return to.get();
}

// x of some tokens, in rows of x_row, and y in rows of y_row, both of the first token and output.
template <class T>
struct Piece {
    const float* x;
    int64_t x_row, tokens;
    const float* bias;
    T* y;
    int64_t y_row;
};

// made(): for the thread that asks, what makes a Piece of rows [o, o + OUTPUTS) of w, or of one.
template <class T, class F>
void product(const T* x, const T* bias, T* y, int64_t tokens, int64_t inner, int64_t outputs,
             Team team, F made) {
    const int64_t x_row = rounded(int(inner), LANES);
    Buffer space;
    std::vector<float> wide_bias(bias ? outputs : 0);
    for (int64_t o = 0; o < int64_t(wide_bias.size()); ++o) wide_bias[o] = wide(bias[o]);
    const int64_t held = std::max<int64_t>(HELD / std::max<int64_t>(x_row, 1) / (TOKENS * MORE), 1) *
                         TOKENS * MORE;
    const int64_t tasks = (outputs + TASK - 1) / TASK;
    for (int64_t some = 0; some < tokens; some += SOME) {
        const int64_t here = std::min(SOME, tokens - some);
        const float* wide_x = widened(x + some * inner, here, inner, space);
        const int64_t begin = team.first(tasks), end = team.last(tasks);
#pragma omp parallel for num_threads(team.count) schedule(static) if (team.starts())
        for (int64_t task = begin; task < end; ++task) {
            auto make = made();
            const int64_t last = std::min(outputs, (task + 1) * TASK);
            for (int64_t first = 0; first < here; first += held) {
                const int64_t count = std::min(held, here - first);
                for (int64_t o = task * TASK; o < last;) {
                    const bool whole = o + OUTPUTS <= last;
                    make(o, whole,
                         Piece<T>{wide_x + first * x_row, x_row, count,
                                  bias ? wide_bias.data() + o : nullptr,
                                  y + (some + first) * outputs + o, outputs});
                    o += whole ? OUTPUTS : 1;
                }
            }
        }
    }
}

template <class W, class T>
inline void some(const W* w, int64_t inner, bool whole, const Piece<T>& p) {
    auto* call = whole ? down<W, T, OUTPUTS> : down<W, T, 1>;
    call(p.x, p.x_row, p.tokens, w, inner, p.bias, p.y, p.y_row);
}

// Rows of w as they lie; where many tokens meet them, made wide once for all.
template <class T>
void stored(const T* x, const T* w, const T* bias, T* y, int64_t tokens, int64_t inner,
            int64_t outputs, Team threads) {
    if (sizeof(T) == sizeof(float) || tokens < MANY)
        return product(x, bias, y, tokens, inner, outputs, threads, [=] {
            return [=](int64_t o, bool whole, const Piece<T>& p) { some(w + o * inner, inner, whole, p); };
        });
    product(x, bias, y, tokens, inner, outputs, threads, [=] {
        return [=, held = buffer(OUTPUTS * inner)](int64_t o, bool whole, const Piece<T>& p) mutable {
            const int64_t count = (whole ? OUTPUTS : 1) * inner;
            for (int64_t i = 0; i < count; ++i) held[i] = wide(w[o * inner + i]);
            some(static_cast<const float*>(held.get()), inner, whole, p);
        };
    });
}

// By codes that are decoded in registers: signed bytes, or halves that count from -8. What a code
// stands for is exact: its bits and those of a scale of 16 bits are few enough.
inline ints half_of(ints bytes, int part) {
    return part ? bytes >> 4 : bytes & 15;
}
inline vec whole(ints codes) { return __builtin_convertvector(codes, vec); }

inline vec rounded_to(float, vec x) { return x; }
inline vec rounded_to(bfloat16, vec x) {  // of finite numbers, as `narrow` has it
    const ints u = ints(x);
    return vec((u + 0x7fff + ((u >> 16) & 1)) & ~0xffff);
}

// Groups of as many bytes of codes as the layout says. Rows are short, and those of the next
// outputs asked for beforehand, as a processor sees too little of each to foresee it.
template <class T, int ORDER, int ROWS, int COLUMNS>
inline __attribute__((always_inline)) void multiply_coded(const Piece<T>& p, int64_t t,
                                                          const uint8_t* blocks, int64_t row,
                                                          const Layout& layout, int64_t groups,
                                                          int64_t o) {
    const float* x = p.x + t * p.x_row;
    const int64_t width = ORDER == BYTES ? layout.group : layout.group / 2;
    vec sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; ++t)
#pragma GCC unroll 8
        for (int n = 0; n < COLUMNS; ++n) sum[t][n] = vec{};
    for (int64_t g = 0; g < groups; ++g, blocks += layout.block) {
        vec scale[COLUMNS], lowest[COLUMNS];
        for (int n = 0; n < COLUMNS; ++n) {
            __builtin_prefetch(blocks + (n + OUTPUTS) * row);
            scale[n] = scale_of(layout, blocks + n * row);
            lowest[n] = all(-8.0f) * scale[n];
        }
#pragma GCC unroll 2
        for (int part = 0; part < (ORDER == BYTES ? 1 : 2); ++part) {
            const uint8_t* codes = blocks + layout.head;
            for (int64_t i = 0; i < width; i += LANES, x += LANES, codes += LANES) {
                vec left[ROWS];
#pragma GCC unroll 8
                for (int t = 0; t < ROWS; ++t) registered(left[t] = load(x + t * p.x_row));
#pragma GCC unroll 8
                for (int n = 0; n < COLUMNS; ++n) {
                    vec right;
                    if (ORDER == BYTES)
                        right = whole(signed_of(codes + n * row)) * scale[n];
                    else
                        right = fused(lowest[n], whole(half_of(bits_of(codes + n * row), part)),
                                      scale[n]);
                    right = rounded_to(T{}, right);
#pragma GCC unroll 8
                    for (int t = 0; t < ROWS; ++t) sum[t][n] = fused(sum[t][n], left[t], right);
                }
            }
        }
    }
    ended(sum, p.bias ? p.bias + o : nullptr, p.y + t * p.y_row + o, p.y_row);
}

// Groups of WIDTH bytes, unrolled: both halves of a byte are of one load. x is read anew for each
// output, as what a group needs of it is more than registers hold.
template <class T, int ORDER, int WIDTH, int ROWS, int COLUMNS>
inline __attribute__((always_inline)) void multiply_group(const Piece<T>& p, int64_t t,
                                                          const uint8_t* blocks, int64_t row,
                                                          const Layout& layout, int64_t groups,
                                                          int64_t o) {
    constexpr int READ = WIDTH / LANES, VECTORS = ORDER == BYTES ? READ : 2 * READ;
    const float* x = p.x + t * p.x_row;
    vec sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; ++t)
#pragma GCC unroll 8
        for (int n = 0; n < COLUMNS; ++n) sum[t][n] = vec{};
    for (int64_t g = 0; g < groups; ++g, blocks += layout.block, x += VECTORS * LANES) {
#pragma GCC unroll 8
        for (int n = 0; n < COLUMNS; ++n) {
            asm("" : "+r"(x));  // another pointer, for all that a compiler knows
            const uint8_t* block = blocks + n * row;
            __builtin_prefetch(block + OUTPUTS * row);
            const vec scale = scale_of(layout, block), lowest = all(-8.0f) * scale;
            ints read[READ];
#pragma GCC unroll 8
            for (int v = 0; v < (ORDER == BYTES ? 0 : READ); ++v)
                read[v] = bits_of(block + layout.head + v * LANES);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                vec right;
                if (ORDER == BYTES)
                    right = whole(signed_of(block + layout.head + v * LANES)) * scale;
                else
                    right = fused(lowest, whole(half_of(read[v % READ], v / READ)), scale);
                registered(right = rounded_to(T{}, right));
#pragma GCC unroll 8
                for (int t = 0; t < ROWS; ++t)
                    sum[t][n] = fused(sum[t][n], load(x + t * p.x_row + v * LANES), right);
            }
        }
    }
    ended(sum, p.bias ? p.bias + o : nullptr, p.y + t * p.y_row + o, p.y_row);
}

// A piece's tokens [t, t + ROWS), COLUMNS of its COUNT outputs at a time; unrolled where most time
// goes.
template <class T, int ORDER, int COUNT, int ROWS, int COLUMNS>
inline __attribute__((always_inline)) void across(const Piece<T>& p, int64_t t,
                                                  const uint8_t* blocks, int64_t row,
                                                  const Layout& layout, int64_t groups) {
    constexpr int SOME = COLUMNS < COUNT ? COLUMNS : COUNT;
    constexpr bool TWO = ORDER == HALVES;
    const int64_t width = TWO ? layout.group / 2 : layout.group;
    for (int64_t o = 0; o < COUNT; o += SOME) {
        const uint8_t* own = blocks + o * row;
        if constexpr (COUNT > 1) {
            if (TWO && width == 16) {
                multiply_group<T, ORDER, 16, ROWS, SOME>(p, t, own, row, layout, groups, o);
                continue;
            }
            if (width == 32) {
                multiply_group<T, ORDER, 32, ROWS, SOME>(p, t, own, row, layout, groups, o);
                continue;
            }
        }
        constexpr int FIRST = ROWS < MORE ? ROWS : MORE;
        multiply_coded<T, ORDER, FIRST, SOME>(p, t, own, row, layout, groups, o);
        if constexpr (ROWS > FIRST)
            multiply_coded<T, ORDER, ROWS - FIRST, SOME>(p, t + FIRST, own, row, layout, groups, o);
    }
}

template <class T, int ORDER, int COUNT>
void few(const Piece<T>& p, const uint8_t* blocks, int64_t row, const Layout& layout,
         int64_t groups) {
    int64_t t = 0;
    for (; p.tokens - t > 6; t += MORE)
        across<T, ORDER, COUNT, MORE, FEWER>(p, t, blocks, row, layout, groups);
    switch (p.tokens - t) {
        case 6:
            return across<T, ORDER, COUNT, 6, FEWER>(p, t, blocks, row, layout, groups);
        case 5:
            return across<T, ORDER, COUNT, 5, FEWER>(p, t, blocks, row, layout, groups);
        case 4:
            return across<T, ORDER, COUNT, 4, FEWER>(p, t, blocks, row, layout, groups);
        case 3:
            return across<T, ORDER, COUNT, 3, OUTPUTS>(p, t, blocks, row, layout, groups);
        case 2:
            return across<T, ORDER, COUNT, 2, OUTPUTS>(p, t, blocks, row, layout, groups);
        case 1:
            return across<T, ORDER, COUNT, 1, OUTPUTS>(p, t, blocks, row, layout, groups);
    }
}

template <class T, int ORDER>
void in_registers(const T* x, const Matrix& w, const Layout& layout, T* y, int64_t tokens,
                  Team threads) {
    const uint8_t* blocks = static_cast<const uint8_t*>(w.data);
    const int64_t groups = w.inner / layout.group, row = groups * layout.block;
    product(x, static_cast<const T*>(w.bias), y, tokens, w.inner, w.outputs, threads, [&] {
        return [&](int64_t o, bool whole, const Piece<T>& p) {
            auto* call = whole ? few<T, ORDER, OUTPUTS> : few<T, ORDER, 1>;
            call(p, blocks + o * row, row, layout, groups);
        };
    });
}

// By codes: in registers, or a few rows at a time decoded for all tokens, rounded to what x is held
// in.
template <class T>
void coded(const T* x, const Matrix& w, T* y, int64_t tokens, Team threads) {
    const Layout layout = w.layout();
    const int64_t width = w.order == BYTES ? w.group : w.group / 2;
    if (tokens < LOTS && w.kind != APART && width % LANES == 0) {
        if (w.order == BYTES) return in_registers<T, BYTES>(x, w, layout, y, tokens, threads);
        if (w.order == HALVES && !w.table)
            return in_registers<T, HALVES>(x, w, layout, y, tokens, threads);
    }
    product(x, static_cast<const T*>(w.bias), y, tokens, w.inner, w.outputs, threads, [&] {
        return [&, held = buffer(OUTPUTS * w.inner)](int64_t o, bool whole, const Piece<T>& p) mutable {
            const int64_t groups = w.inner / layout.group, count = (whole ? OUTPUTS : 1) * groups;
            const uint8_t* blocks = static_cast<const uint8_t*>(w.data);
            for (int64_t g = 0; g < count; ++g)
                one(blocks, layout, o * groups + g, held.get() + g * layout.group);
            if (sizeof(T) != sizeof(float))
                for (int64_t i = 0; i < count * layout.group; ++i) held[i] = wide(narrow<T>(held[i]));
            some(static_cast<const float*>(held.get()), w.inner, whole, p);
        };
    });
}

template <class T>
void any(const void* x, const Matrix& w, void* y, int64_t tokens, Team threads) {
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    if (w.group) return coded(from, w, to, tokens, threads);
    stored(from, static_cast<const T*>(w.data), static_cast<const T*>(w.bias), to, tokens, w.inner,
           w.outputs, threads);
}

}  // namespace

extern "C" {

// y (tokens, outputs) = x (tokens, inner) w (outputs, inner)^T + bias (outputs) or null; all but
// codes are of type Number. index: the share of one of `threads`, or -1.
void outsize_rows_product(const void* x, const Matrix* w, void* y, int64_t tokens, int threads,
                          int index) {
    any<Number>(x, *w, y, tokens, Team(threads, index));
}

}  // extern "C"
