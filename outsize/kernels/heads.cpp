// Products of each head by a matrix of its own, each token alone.
//
// Every number is summed in an order that depends on the token alone, as those of rows.cpp: the same
// bits whatever the batch and the number of threads. Storage is float32 or bfloat16, as this is
// compiled, sums are float32.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codes.h"
#include "team.h"
#include "tiles.h"

extern "C" void outsize_rows_product(const void*, const outsize::Matrix*, void*, outsize::int64_t, int,
                                     int);

namespace {

using namespace outsize;

constexpr int TOKENS = 4, ACROSS = LANES == 16 ? 4 : 2;  // of a block in registers; vectors

// ROWS tokens by WIDE vectors of outputs: y[t][o] = sum over i, in its order, of x[t][i] w[i][o].
// row: numbers from w[i] to w[i + 1].
template <class T, int ROWS, int WIDE>
inline void block(const float* x, const T* w, int64_t row, T* y, int64_t inner, int64_t outputs,
                  int count) {
    vec sum[ROWS][WIDE];
#pragma GCC unroll 4
    for (int t = 0; t < ROWS; ++t)
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; ++n) sum[t][n] = vec{};
    for (int64_t i = 0; i < inner; ++i) {
        vec right[WIDE];
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; ++n) right[n] = read(w + i * row + n * LANES);
#pragma GCC unroll 4
        for (int t = 0; t < ROWS; ++t) {
            const vec left = all(x[t * inner + i]);
#pragma GCC unroll 4
            for (int n = 0; n < WIDE; ++n) sum[t][n] = fused(sum[t][n], left, right[n]);
        }
    }
    float whole[WIDE * LANES];
    for (int t = 0; t < ROWS; ++t) {
        for (int n = 0; n < WIDE; ++n) store(whole + n * LANES, sum[t][n]);
        for (int n = 0; n < count; ++n) y[t * outputs + n] = narrow<T>(whole[n]);
    }
}

template <class T, int WIDE>
void down(const float* x, const T* w, int64_t row, T* y, int64_t tokens, int64_t inner,
          int64_t outputs, int count) {
    int64_t t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS)
        block<T, TOKENS, WIDE>(x + t * inner, w, row, y + t * outputs, inner, outputs, count);
    for (; t < tokens; ++t)
        block<T, 1, WIDE>(x + t * inner, w, row, y + t * outputs, inner, outputs, count);
}

// Outputs by whole vectors; those that are left from a copy with zeros behind them.
template <class T>
void turned(const T* x, const T* w, T* y, int64_t tokens, int64_t inner, int64_t outputs) {
    std::vector<float> wide_x(tokens * inner);
    for (int64_t n = 0; n < tokens * inner; ++n) wide_x[n] = wide(x[n]);
    int64_t o = 0;
    for (; o + ACROSS * LANES <= outputs; o += ACROSS * LANES)
        down<T, ACROSS>(wide_x.data(), w + o, outputs, y + o, tokens, inner, outputs, ACROSS * LANES);
    for (; o < outputs; o += LANES) {
        const int count = int(std::min<int64_t>(LANES, outputs - o));
        std::vector<T> some(inner * LANES);
        for (int64_t i = 0; i < inner; ++i)
            std::copy_n(w + i * outputs + o, count, some.data() + i * LANES);
        down<T, 1>(wide_x.data(), some.data(), LANES, y + o, tokens, inner, outputs, count);
    }
}

template <class T>
void each(bool turns, const T* x, const T* w, int64_t apart, T* y, int64_t heads,
          int64_t tokens, int64_t inner, int64_t outputs, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && heads > 1)
    for (int64_t head = 0; head < heads; ++head) {
        const T *from = x + head * tokens * inner, *own = w + head * apart;
        T* to = y + head * tokens * outputs;
        if (turns) {
            turned(from, own, to, tokens, inner, outputs);
            continue;
        }
        Matrix matrix{};
        matrix.data = own;
        matrix.outputs = outputs;
        matrix.inner = inner;
        outsize_rows_product(from, &matrix, to, tokens, 1, 0);
    }
}

}  // namespace

extern "C" {

// y (heads, tokens, outputs) = x (heads, tokens, inner) by w (heads, outputs, inner), or where it
// turns by w (heads, inner, outputs); apart: numbers from a head's matrix to the next one's.
void outsize_heads_product(int turns, const void* x, const void* w, int64_t apart, void* y,
                           int64_t heads, int64_t tokens, int64_t inner, int64_t outputs,
                           int threads) {
    each(turns, static_cast<const Number*>(x), static_cast<const Number*>(w), apart,
         static_cast<Number*>(y), heads, tokens, inner, outputs, threads);
}

}  // extern "C"
