// One draw from logits by chance, in float64: the twin of `probabilities` and of Sampling's draw in
// outsize/decode/samplers.py. A row is summed by one thread in the order of its tokens, so that what
// is drawn depends on nothing else. Nothing is sorted but the tokens about as likely as the last one
// that top_p keeps.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "storage.h"

namespace {

using std::int64_t;
using std::uint64_t;

using outsize::bfloat16;
using outsize::wide;

constexpr double ALIKE = 1e-9;    // as in samplers.py
constexpr int64_t BLOCK = 1024;   // tokens between two sums that are kept
constexpr int FINE = 5;           // bits of a probability's fraction that its bucket goes by
constexpr int64_t SMALLEST = 64;  // probabilities below 2^-64 share a bucket
constexpr int64_t BUCKETS = (SMALLEST << FINE) + 1;

// e^x of x <= 0 within 2 units in the last place, 0 below -708: x = n ln 2 + r with |r| <= ln 2 / 2
// (Cody and Waite, 1980), and Taylor's polynomial of r.
inline double exponential(double x) {
    const double low = -708.0;
    const double held = x < low ? low : x;
    const double shift = 6755399441055744.0;  // 1.5 * 2^52: as in native.cpp
    const double shifted = held * 1.4426950408889634 + shift;
    const double n = shifted - shift;
    double r = held - n * 6.93147180369123816490e-01;
    r = r - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * (r * r) + r + 1.0;
    const uint64_t power = (__builtin_bit_cast(uint64_t, shifted) + 1023u) << 52;
    const double y = p * __builtin_bit_cast(double, power);
    return x < low ? 0.0 : y;
}

// The k-th largest of more than k numbers.
double largest(const double* x, int64_t count, int64_t k) {
    std::vector<double> some;
    double least = -INFINITY;
    const auto prune = [&] {
        std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<double>());
        some.resize(k);
        least = some[k - 1];
    };
    for (int64_t i = 0; i < count; ++i) {
        if (x[i] <= least && int64_t(some.size()) >= k) continue;
        some.push_back(x[i]);
        if (int64_t(some.size()) == 2 * k) prune();
    }
    prune();
    return least;
}

inline int64_t bucket(double p) {
    const int64_t place = int64_t(__builtin_bit_cast(uint64_t, p) >> (52 - FINE));
    return std::clamp<int64_t>(place - ((1023 - SMALLEST) << FINE), 0, BUCKETS - 1);
}

// Of probabilities the least likely become 0 that have no more than `share` together.
void keep(double* p, int64_t count, double share) {
    std::vector<double> sums(BUCKETS, 0.0), near;
    std::vector<int64_t> counts(BUCKETS, 0);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t b = bucket(p[i]);
        sums[b] += p[i];
        ++counts[b];
    }
    double gone = 0.0, last = -1.0;
    int64_t few = 0;  // that go
    for (int64_t b = 0; b < BUCKETS && last < 0.0; ++b) {
        if (gone + sums[b] <= share) {
            gone += sums[b];
            few += counts[b];
            continue;
        }
        near.clear();
        for (int64_t i = 0; i < count; ++i)
            if (bucket(p[i]) == b) near.push_back(p[i]);
        std::sort(near.begin(), near.end());
        for (const double one : near) {
            if (gone + one > share) {
                last = one;
                break;
            }
            gone += one;
            ++few;
        }
    }
    if (last < 0.0 || few >= count) last = *std::max_element(p, p + count), few = count - 1;
    // Of those that are as likely as the last one the lowest ids stay.
    const double low = last * (1 - ALIKE), high = last * (1 + ALIKE);
    int64_t below = 0, alike = 0;
    for (int64_t i = 0; i < count; ++i) {
        below += p[i] < low;
        alike += p[i] >= low && p[i] <= high;
    }
    int64_t left = alike - std::max<int64_t>(0, few - below);
    for (int64_t i = 0; i < count; ++i) {
        if (p[i] < low || (p[i] <= high && left-- <= 0)) p[i] = 0.0;
    }
}

// The first token whose cumulated weight is above a part of the whole.
int64_t reached(const double* p, int64_t count, double part) {
    std::vector<double> before;  // each block
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        if (i % BLOCK == 0) before.push_back(total);
        total += p[i];
    }
    const double wanted = part * total;
    // A block that begins above is behind the token.
    const int64_t block = std::upper_bound(before.begin() + 1, before.end(), wanted) - before.begin();
    int64_t i = (block - 1) * BLOCK;
    for (double sum = before[block - 1] + p[i]; sum <= wanted && i < count - 1;) sum += p[++i];
    return i;
}

template <class T>
int64_t draw(const T* x, double* p, int64_t count, float top, double heat, int64_t k, double share,
             double part) {
    for (int64_t i = 0; i < count; ++i) p[i] = (double(wide(x[i])) - double(top)) / heat;
    if (k < count) {
        const double least = largest(p, count, k) - ALIKE;
        for (int64_t i = 0; i < count; ++i) p[i] = p[i] < least ? -INFINITY : p[i];
    }
    for (int64_t i = 0; i < count; ++i) p[i] = exponential(p[i]);
    if (share > 0.0) {
        double total = 0.0;
        for (int64_t i = 0; i < count; ++i) total += p[i];
        for (int64_t i = 0; i < count; ++i) p[i] /= total;
        keep(p, count, share);
    }
    return reached(p, count, part);
}

}  // namespace

extern "C" {

// p: room for as many numbers; top: the largest logit, which is finite; k: tokens; share: of the
// probability that top_p leaves out; part: of the whole, in [0, 1).
int64_t outsize_draw(int dtype, const void* x, double* p, int64_t count, float top, double heat,
                     int64_t k, double share, double part) {
    if (dtype == 1)
        return draw(static_cast<const bfloat16*>(x), p, count, top, heat, k, share, part);
    return draw(static_cast<const float*>(x), p, count, top, heat, k, share, part);
}

}  // extern "C"
