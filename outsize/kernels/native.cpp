// The element-wise passes of a decoder, each over memory once, in float32 arithmetic.
//
// Every function here has a plain PyTorch twin beside its caller (outsize/kernels/*.py), which tests
// compare it to. A plain C interface and no headers of torch: it compiles in seconds and is loaded
// with ctypes. Storage is float32 or bfloat16 (dtype 0 or 1). Loops are written for the compiler to
// vectorise; nothing depends on the order in which threads finish, so that results are bitwise the
// same run after run with the same number of threads. -ffast-math would lose NaN and infinity:
// reductions say `omp simd` instead.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "storage.h"

namespace {

using std::int64_t;
using std::uint32_t;
using std::uint64_t;

using outsize::bfloat16;
using outsize::narrow;
using outsize::wide;

// e^x within 2 units in the last place of float32; 0 below -87, e^88 above 88, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite, 1980); the polynomial is fitted to
// (e^r - 1 - r) / r^2 at the Chebyshev points of that interval.
inline float exponential(float x) {
    const float low = -87.0f, high = 88.0f;
    const float held = x < low ? low : (x > high ? high : x);
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const float shifted = held * 1.44269504f + shift;
    const float n = shifted - shift;
    float r = held - n * 0.693359375f;  // ln 2 in two parts, the first exact in few bits
    r = r - n * -2.12194440e-4f;
    float p = 1.9890991e-4f;
    p = p * r + 1.393365e-3f;
    p = p * r + 8.3333105e-3f;
    p = p * r + 4.1666467e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    const uint32_t power = (__builtin_bit_cast(uint32_t, shifted) + 127u) << 23;
    const float y = p * __builtin_bit_cast(float, power);
    return x < low ? 0.0f : y;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

constexpr int64_t GRAIN = 1 << 14;  // elements below which one more thread costs more than it saves
constexpr int64_t LINE = 64;        // elements: parts of flat tensors start on whole cache lines
constexpr int64_t BLOCK = 1024;     // elements summed in float32 before they go to a double
constexpr int64_t ROWS = 32;        // likewise rows of a gradient

// f(part, first, last) over `count` things of `size` elements, in at most `threads` fixed parts.
template <class F>
int64_t in_parts(int64_t count, int64_t size, int threads, int64_t align, F f) {
    const int64_t useful = (count * size + GRAIN - 1) / GRAIN;
    const int64_t parts = useful < 1 ? 1 : (useful < threads ? useful : threads);
    const int64_t units = (count + align - 1) / align;
    // One body, not inlined: whoever calls it gets the same bits.
    const auto one = [&](int64_t part) __attribute__((noinline)) {
        const int64_t first = units * part / parts * align, last = units * (part + 1) / parts * align;
        f(part, first, last < count ? last : count);
    };
    if (parts == 1) {  // a region of one thread costs as much as a small pass
        one(0);
        return 1;
    }
#pragma omp parallel for num_threads(int(parts)) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) one(part);
    return parts;
}

void load_weight(int dtype, const void* weight, float offset, int64_t size, float* out) {
    if (dtype == 0) {
        const float* w = static_cast<const float*>(weight);
        for (int64_t d = 0; d < size; ++d) out[d] = w[d] + offset;
    } else {
        const bfloat16* w = static_cast<const bfloat16*>(weight);
        for (int64_t d = 0; d < size; ++d) out[d] = wide(w[d]) + offset;
    }
}

template <class T>
void rms_norm(const T* x, const float* __restrict__ scale, float eps, T* y, float* inverse,
              int64_t rows, int64_t size, int threads) {
    in_parts(rows, size, threads, 1, [=](int64_t, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const T* __restrict__ from = x + row * size;
            T* __restrict__ to = y + row * size;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < size; ++d) sum += wide(from[d]) * wide(from[d]);
            const float factor = 1.0f / std::sqrt(sum / float(size) + eps);
            inverse[row] = factor;
            for (int64_t d = 0; d < size; ++d)
                to[d] = narrow<T>(wide(from[d]) * factor * scale[d]);
        }
    });
}

// A row is a function of its own: what a lambda has captured may, to the compiler, lie anywhere.
template <class T>
inline void norm_row_backward(const T* __restrict__ g, const T* __restrict__ from,
                              const float* __restrict__ scale, float factor, T* __restrict__ to,
                              int64_t size) {
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t d = 0; d < size; ++d) dot += wide(g[d]) * scale[d] * (wide(from[d]) * factor);
    const float along = dot / float(size);
    for (int64_t d = 0; d < size; ++d)
        to[d] = narrow<T>((wide(g[d]) * scale[d] - wide(from[d]) * factor * along) * factor);
}

// gx and gweight may be null. gweight: (threads, size), a row of zeros or sums for each part.
template <class T>
void rms_norm_backward(const T* gy, const T* x, const float* __restrict__ scale,
                       const float* inverse, T* gx, double* gweight, int64_t rows, int64_t size,
                       int threads) {
    in_parts(rows, size, threads, 1, [=](int64_t part, int64_t first, int64_t last) {
        std::vector<float> held(gweight ? size : 0, 0.0f);
        float* __restrict__ block = held.data();
        double* __restrict__ total = gweight ? gweight + part * size : nullptr;
        for (int64_t row = first; row < last; ++row) {
            const T* __restrict__ g = gy + row * size;
            const T* __restrict__ from = x + row * size;
            const float factor = inverse[row];
            if (gweight) {
                for (int64_t d = 0; d < size; ++d) block[d] += wide(g[d]) * (wide(from[d]) * factor);
                if ((row - first) % ROWS == ROWS - 1 || row == last - 1)
                    for (int64_t d = 0; d < size; ++d) {
                        total[d] += double(block[d]);
                        block[d] = 0;
                    }
            }
            if (gx) norm_row_backward(g, from, scale, factor, gx + row * size, size);
        }
    });
}

// Pairs p and p + P of a head. A P that the compiler knows (else 0) makes whole vectors of small heads.
template <class T, int64_t P>
inline void turn_halves(const T* __restrict__ from, T* __restrict__ to, const float* __restrict__ c,
                        const float* __restrict__ s, int64_t pairs, float sign) {
    const int64_t count = P ? P : pairs;
    for (int64_t p = 0; p < count; ++p) {
        const float a = wide(from[p]), b = wide(from[p + count]), turn = s[p] * sign;
        to[p] = narrow<T>(a * c[p] - b * turn);
        to[p + count] = narrow<T>(b * c[p] + a * turn);
    }
}

template <class T>
void rope(const T* x, const int64_t* strides, const float* cos, const float* sin, int64_t table,
          T* y, const int64_t* shape, int64_t pairs, bool interleaved, float sign, int threads) {
    const int64_t tokens = shape[0], heads = shape[1], size = shape[2];
    const int64_t by_token = strides[0], by_head = strides[1];
    const auto halves = pairs == 8    ? turn_halves<T, 8>
                        : pairs == 16 ? turn_halves<T, 16>
                        : pairs == 32 ? turn_halves<T, 32>
                        : pairs == 64 ? turn_halves<T, 64>
                                      : turn_halves<T, 0>;
    in_parts(tokens, heads * size, threads, 1, [=](int64_t, int64_t first, int64_t last) {
        for (int64_t token = first; token < last; ++token) {
            const float* __restrict__ c = cos + token * table;
            const float* __restrict__ s = sin + token * table;
            for (int64_t head = 0; head < heads; ++head) {
                const T* __restrict__ from = x + token * by_token + head * by_head;
                T* __restrict__ to = y + (token * heads + head) * size;
                if (interleaved) {
                    for (int64_t p = 0; p < pairs; ++p) {
                        const float a = wide(from[2 * p]), b = wide(from[2 * p + 1]), turn = s[p] * sign;
                        to[2 * p] = narrow<T>(a * c[p] - b * turn);
                        to[2 * p + 1] = narrow<T>(b * c[p] + a * turn);
                    }
                } else {
                    halves(from, to, c, s, pairs, sign);
                }
                for (int64_t k = 2 * pairs; k < size; ++k) to[k] = from[k];
            }
        }
    });
}

template <class T>
void gate(const T* gate_, const T* up_, T* y_, int64_t count, int threads) {
    in_parts(count, 1, threads, LINE, [=](int64_t, int64_t first, int64_t last) {
        const T* __restrict__ gate = gate_;
        const T* __restrict__ up = up_;
        T* __restrict__ y = y_;
        for (int64_t i = first; i < last; ++i) {
            const float x = wide(gate[i]);
            y[i] = narrow<T>(x * sigmoid(x) * wide(up[i]));
        }
    });
}

template <class T>
void gate_backward(const T* g_, const T* gate_, const T* up_, T* ggate_, T* gup_, int64_t count,
                   int threads) {
    in_parts(count, 1, threads, LINE, [=](int64_t, int64_t first, int64_t last) {
        const T* __restrict__ g = g_;
        const T* __restrict__ gate = gate_;
        const T* __restrict__ up = up_;
        T* __restrict__ ggate = ggate_;
        T* __restrict__ gup = gup_;
        for (int64_t i = first; i < last; ++i) {
            const float x = wide(gate[i]), gy = wide(g[i]), s = sigmoid(x);
            ggate[i] = narrow<T>(gy * wide(up[i]) * (s * (1.0f + x * (1.0f - s))));
            gup[i] = narrow<T>(gy * (x * s));
        }
    });
}

// A row's logits to e^(logit - top), in `out` (the row itself, or another); gives their sum.
template <class T>
double exponentials(const T* row, int64_t size, float top, float* out) {
    double total = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t stop = start + BLOCK < size ? start + BLOCK : size;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t v = start; v < stop; ++v) {
            const float e = exponential(wide(row[v]) - top);
            out[v] = e;
            sum += e;
        }
        total += double(sum);
    }
    return total;
}

inline float* scratch(float* row, std::vector<float>&, int64_t) { return row; }
inline float* scratch(bfloat16*, std::vector<float>& held, int64_t size) {
    held.resize(size);
    return held.data();
}

template <class T>
double cross_entropy(T* logits, const int64_t* targets, int64_t ignore, float factor,
                     bool gradient, int64_t rows, int64_t size, int threads, const float* weights) {
    std::vector<double> losses(rows, 0.0);
    double* loss = losses.data();
    in_parts(rows, size, threads, 1, [=](int64_t, int64_t first, int64_t last) {
        std::vector<float> held;
        for (int64_t row = first; row < last; ++row) {
            T* here = logits + row * size;
            const double weight = weights ? double(weights[row]) : 1.0;
            if (targets[row] == ignore || weight == 0.0) {
                if (gradient) std::memset(static_cast<void*>(here), 0, size * sizeof(T));
                continue;
            }
            float top = -INFINITY;
#pragma omp simd reduction(max : top)
            for (int64_t v = 0; v < size; ++v) {
                const float x = wide(here[v]);
                top = x > top ? x : top;
            }
            const float picked = wide(here[targets[row]]) - top;
            float* e = scratch(here, held, size);
            const double total = exponentials(here, size, top, e);
            loss[row] = weight * (std::log(total) - double(picked));
            if (!gradient) continue;
            const double own = weight * double(factor);
            const float scale = float(own / total);
            const float target = e[targets[row]] * scale - float(own);
            for (int64_t v = 0; v < size; ++v) here[v] = narrow<T>(e[v] * scale);
            here[targets[row]] = narrow<T>(target);
        }
    });
    double sum = 0;
    for (int64_t row = 0; row < rows; ++row) sum += loss[row];
    return sum;
}

template <class T>
void add(float* to_, const T* from_, int64_t count, int threads) {
    in_parts(count, 1, threads, LINE, [=](int64_t, int64_t first, int64_t last) {
        float* __restrict__ to = to_;
        const T* __restrict__ from = from_;
        for (int64_t i = first; i < last; ++i) to[i] += wide(from[i]);
    });
}

// A checksum of bytes at rest, over 64-bit words dealt to LANES lanes in turn. For each word a lane
// becomes rotated((lane ^ word) * ODD): a bijection of the word and of the lane, so one altered word
// always changes the result, and words that change places do too. Rotating brings the highest bits
// down, where the next product spreads them: without it two flipped signs would cancel.
constexpr int LANES = 32;  // four vectors of 512 bits hide the product's latency
constexpr uint64_t ODD = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio
inline uint64_t stir(uint64_t lane, uint64_t word) {
    const uint64_t x = (lane ^ word) * ODD;
    return (x << 23) | (x >> 41);
}

uint64_t checksum(const uint64_t* words, int64_t count) {
    uint64_t lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = ODD * uint64_t(i + 1);
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) {
#pragma omp simd
        for (int i = 0; i < LANES; ++i) lanes[i] = stir(lanes[i], words[n + i]);
    }
    for (int i = 0; n + i < count; ++i) lanes[i] = stir(lanes[i], words[n + i]);
    uint64_t result = uint64_t(count);
    for (int i = 0; i < LANES; ++i) result = stir(result, lanes[i]);
    return result;
}

// A number's rank among all, as whole numbers: zeros are one, and what is no number is above all.
inline int32_t rank_of(float x) {
    const int32_t bits = __builtin_bit_cast(int32_t, x + 0.0f);
    return x == x ? bits ^ (bits >> 31 & 0x7fffffff) : INT32_MAX;
}

// The first of the largest. A compiler makes vectors of lanes, and none of a single maximum.
template <class T>
int64_t greatest(const T* x, int64_t count) {
    constexpr int64_t SOME = 1024, ACROSS = 64;
    int64_t where = 0;
    int32_t most = INT32_MIN;
    for (int64_t first = 0; first < count; first += SOME) {
        const int64_t last = std::min(count, first + SOME);
        int32_t lanes[ACROSS];
        std::fill(lanes, lanes + ACROSS, INT32_MIN);
        for (int64_t i = first; i < last; i += ACROSS)
            for (int64_t l = 0, own = std::min(ACROSS, last - i); l < own; ++l)
                lanes[l] = std::max(lanes[l], rank_of(wide(x[i + l])));
        const int32_t here = *std::max_element(lanes, lanes + ACROSS);
        if (here > most) most = here, where = first;
    }
    while (rank_of(wide(x[where])) != most) ++where;
    return where;
}

template <class T>
T* at(void* x) { return static_cast<T*>(x); }
template <class T>
const T* at(const void* x) { return static_cast<const T*>(x); }

}  // namespace

#define BOTH(dtype, call)                             \
    if ((dtype) == 0) {                               \
        using T = float;                              \
        call;                                         \
    } else {                                          \
        using T = bfloat16;                           \
        call;                                         \
    }

extern "C" {

void outsize_rms_norm(int dtype, int weight_dtype, const void* x, const void* weight, float eps,
                      float offset, void* y, float* inverse, int64_t rows, int64_t size,
                      int threads) {
    std::vector<float> scale(size);
    load_weight(weight_dtype, weight, offset, size, scale.data());
    BOTH(dtype, rms_norm(at<T>(x), scale.data(), eps, at<T>(y), inverse, rows, size, threads))
}

void outsize_rms_norm_backward(int dtype, int weight_dtype, const void* gy, const void* x,
                               const void* weight, const float* inverse, float offset, void* gx,
                               void* gweight, int64_t rows, int64_t size, int threads) {
    std::vector<float> scale(size);
    load_weight(weight_dtype, weight, offset, size, scale.data());
    std::vector<double> sums(gweight ? threads * size : 0, 0.0);
    double* parts = gweight ? sums.data() : nullptr;
    BOTH(dtype, rms_norm_backward(at<T>(gy), at<T>(x), scale.data(), inverse, at<T>(gx), parts,
                                  rows, size, threads))
    if (!gweight) return;
    for (int part = 1; part < threads; ++part)
        for (int64_t d = 0; d < size; ++d) sums[d] += sums[part * size + d];
    BOTH(weight_dtype,
         for (int64_t d = 0; d < size; ++d) at<T>(gweight)[d] = narrow<T>(float(sums[d])))
}

void outsize_rope(int dtype, const void* x, const int64_t* strides, const float* cos,
                  const float* sin, int64_t table, void* y, const int64_t* shape, int64_t pairs,
                  int interleaved, float sign, int threads) {
    BOTH(dtype, rope(at<T>(x), strides, cos, sin, table, at<T>(y), shape, pairs, interleaved != 0,
                     sign, threads))
}

void outsize_gate(int dtype, const void* gate_, const void* up, void* y, int64_t count,
                  int threads) {
    BOTH(dtype, gate(at<T>(gate_), at<T>(up), at<T>(y), count, threads))
}

void outsize_gate_backward(int dtype, const void* g, const void* gate_, const void* up,
                           void* ggate, void* gup, int64_t count, int threads) {
    BOTH(dtype, gate_backward(at<T>(g), at<T>(gate_), at<T>(up), at<T>(ggate), at<T>(gup), count,
                              threads))
}

// Sum of the losses, not yet times factor; negative, and nothing done, where a target is neither in
// 0..size - 1 nor `ignore`. weights: what each one's loss is times, null for 1.
double outsize_cross_entropy(int dtype, void* logits, const int64_t* targets, int64_t ignore,
                             float factor, int gradient, int64_t rows, int64_t size, int threads,
                             const float* weights) {
    for (int64_t row = 0; row < rows; ++row)
        if (targets[row] != ignore && (targets[row] < 0 || targets[row] >= size)) return -1.0;
    BOTH(dtype, return cross_entropy(at<T>(logits), targets, ignore, factor, gradient != 0, rows,
                                     size, threads, weights))
}

void outsize_add(int dtype, float* to, const void* from, int64_t count, int threads) {
    BOTH(dtype, add(to, at<T>(from), count, threads))
}

int64_t outsize_greatest(int dtype, const void* x, int64_t count) {
    BOTH(dtype, return greatest(at<T>(x), count))
}

void outsize_exponential(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = exponential(x[i]);
}

uint64_t outsize_checksum(const uint64_t* words, int64_t count) { return checksum(words, count); }

}  // extern "C"
