// What passes of blockwise.cpp read: tables of codes and what blocks hold.

#pragma once

#include <cmath>
#include <cstdint>

#include "storage.h"

namespace outsize::blockwise {

using std::int32_t;
using std::int64_t;
using std::uint32_t;
using std::uint8_t;

constexpr int64_t MOST = 4096;     // elements of a block
constexpr int SIGNED_ZERO = 127;    // the code of 0 in the signed table; in the other it is 0
constexpr float TINY = 0x1p-126f;   // the least normal number: its inverse is finite

// The code of the value next to x of those in a table. The high 16 bits of a float32 name a bucket
// of numbers in which at most one border between two codes lies. buckets: by bucket the code of its
// least number, of positive ones and then of negative ones; borders: 256, the last is infinity.
struct Codes {
    const float* values;
    const float* borders;
    const int32_t* buckets;
    int32_t first, count;

    inline uint8_t of(float x) const {
        const uint32_t bits = __builtin_bit_cast(uint32_t, x);
        int32_t bucket = int32_t((bits & 0x7fffffffu) >> 16) - first;
        bucket = bucket < 0 ? 0 : bucket;
        bucket = bucket >= count ? count - 1 : bucket;
        const int32_t least = buckets[bucket + int32_t(bits >> 31) * count];
        return uint8_t(least + (x > borders[least]));
    }
};

struct Numbers {
    float keep, rate, beta1, rest1, beta2, rest2, root, eps;
};

// What one block reads and writes. m, v: its new moments before they are rounded; d: what a mean is
// divided by. They do not begin at the same place of a page: a load that follows a store to that place
// of another waits for it.
template <class W, class G>
struct Block {
    W* w;
    const G* g;
    uint8_t *c1, *c2;
    float *scale1, *scale2;
    const int64_t n;
    int64_t begun = 0, done = 0;  // up to where wide passes go, and any by lanes
    const float old1 = *scale1, old2 = *scale2;
    float most1 = 0.0f, most2 = 0.0f;
    // As they come: zeros would cost more than the update.
    alignas(64) float m[MOST + 272], v[MOST + 272], d[MOST];

    Block(W* w, const G* g, uint8_t* c1, uint8_t* c2, float* scale1, float* scale2, int64_t n)
        : w(w), g(g), c1(c1), c2(c2), scale1(scale1), scale2(scale2), n(n) {}
};

// A table's decades. Brought to [1, 2), a number of a decade is what a float32 has before it is
// multiplied by 2^decade: each zero that leads a code leaves one bit less to cut a decade. So a code,
// less that of zero, is the integer below 2^d (slope y + 8/9), or, where numbers have no sign and two
// parts begin, 2^(d + 1) (slope y + 8/9) - 1. A decade begins above its border, `from`; what lies
// beyond its last code has that one.
//
// Sums have 16 digits below the point. Those of the line and of the borders, which are rounded, differ
// by less than `near` / 2, by which they are lifted: what has less than `near` says Codes::of.
struct Decades {
    static constexpr int COUNT = 7;
    static constexpr double LIFT = 0x1p-18;

    alignas(32) float from[8], slope[8];
    float rest, limit;
    float one;  // without signs: what is above has the code of 1

    // The upper half of a float32 is a logarithm, by parts of lines. Less `low`, times `log`, it is
    // 2^16 times the decade of a number, or the one above that.
    int32_t low, log, near;

    // slope[COUNT]: with signs, of numbers that have the code of 1; else of those with that of zero.
    template <bool SIGNED>
    static Decades of(const Codes& codes) {
        const double unit = SIGNED ? 1 << 16 : 2 << 16;
        Decades d;
        double scale = 1e-6;
        int parts = SIGNED ? 1 : 2, border = SIGNED ? SIGNED_ZERO : 0;
        for (int i = 0; i < COUNT; ++i, border += parts, parts *= 2, scale *= 10) {
            d.from[i] = codes.borders[border];
            d.slope[i] = float(unit / (0.9 * scale));
        }
        d.one = codes.borders[254];
        d.from[COUNT] = SIGNED ? d.one : INFINITY;
        d.slope[COUNT] = SIGNED ? float(unit * (1 + 0x1p-8 - 8 / 9.0)) : 0.0f;
        if (SIGNED) d.slope[0] = float(unit / 9 / d.from[0]);  // one code, and that of zero
        d.rest = float(unit * (8 / 9.0 + LIFT));
        d.limit = float(unit * (2 - 0x1p-8));
        d.low = SIGNED ? 13200 : 13180;
        d.log = SIGNED ? 154 : 149;
        d.near = SIGNED ? 32 : 64;
        return d;
    }
};

// The values of a table by bytes: the first of each, then the second of each.
struct Planes {
    alignas(64) uint8_t bytes[4][256];

    explicit Planes(const float* values) {
        for (int i = 0; i < 256; ++i) {
            const uint32_t bits = __builtin_bit_cast(uint32_t, values[i]);
            for (int k = 0; k < 4; ++k) bytes[k][i] = uint8_t(bits >> (8 * k));
        }
    }
};

// A table's decades once more, for sixteen numbers at a time: a line in each that says 2^16 times the code,
// less that of zero, and one more without signs. `low` and `log` as above, but which decade a number has
// is not corrected: where the one ends and the next begins both lines have the same whole part. That
// is a power of two from where the first border of a decade would be if parts were even; as it lies at a
// fifth of the step from there, what is a power of two and less than a fifth more is one code less
// (`FIFTH` is the upper half of those 16 digits). Lines are lifted by near / 2.
struct Lines {
    static constexpr int32_t NEAR = 8, FIFTH = 51;

    alignas(64) float slope[16], rest[16];
    int32_t low, log;
    float one;  // without signs: what is above has the code of 1

    // With signs a line begins at 2^7, so that a float32's digits are those of the sum.
    template <bool SIGNED>
    static Lines of(const Codes& codes) {
        const double unit = SIGNED ? 1.0 : 2.0 * (1 << 16), lift = NEAR / 2 * (SIGNED ? 0x1p-16 : 1.0);
        const double least = codes.borders[SIGNED ? SIGNED_ZERO : 0], more = SIGNED ? 128.0 : 0.0;
        Lines x;
        double parts = 1.0, begin = 1e-7;
        for (int i = 0; i < 7; ++i, parts *= 2, begin *= 10) {
            x.slope[i] = float(unit * parts / (9 * begin));
            x.rest[i] = float(unit * parts * 8 / 9 + more + lift);
        }
        // The border of zero is at a fifth too; then one code comes, or two.
        const double first = SIGNED ? 1e6 : 0.8 * (1 << 16) / (codes.borders[1] - least);
        x.slope[0] = float(first);
        x.rest[0] = float((SIGNED ? 1.2 + more : 2.2 * (1 << 16)) - least * first + lift);
        x.one = codes.borders[254];
        x.slope[7] = x.slope[6], x.rest[7] = x.rest[6];
        if (SIGNED) x.rest[7] = float(256.4 + 2 * lift - 64.0 * x.one), x.slope[7] = 64.0f;
        for (int i = 8; i < 16; ++i) x.slope[i] = x.slope[i - 8], x.rest[i] = x.rest[i - 8];
        x.low = SIGNED ? 13216 : 13266;
        x.log = SIGNED ? 151 : 154;
        return x;
    }
};

struct Table {
    Codes codes;
    Decades decades;
    Planes planes;
    Lines lines;
};

}  // namespace outsize::blockwise
