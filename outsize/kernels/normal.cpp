// Normal numbers from counters (outsize/models/random.py): Philox-4x64-10 (Salmon et al., 2011),
// then Box and Muller's transform, operation for operation as the twin in numpy does them, each
// rounded once: the same bits on every machine, whatever the threads and wherever a run begins.

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#include "storage.h"

namespace {

using std::int64_t;
using std::uint64_t;

using outsize::bfloat16;
using outsize::narrow;

constexpr int64_t BLOCK = 1024;     // elements at a time: they stay in the core's first cache
constexpr int64_t GRAIN = 1 << 14;  // elements below which a thread more costs more than it saves
constexpr int TERMS = 12;

struct Series {
    double terms[TERMS];
};

// x times the polynomial in x^2, constant first.
inline double odd(double x, const Series& series) {
    const double square = x * x;
    double total = series.terms[TERMS - 1];
    for (int k = TERMS - 2; k >= 0; --k) total = total * square + series.terms[k];
    return total * x;
}

// Four words of the stream: those of counter `block` + 1, as numpy counts.
inline void philox(uint64_t block, const uint64_t* key, uint64_t* out) {
    uint64_t a = block + 1, b = 0, c = 0, d = 0, k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; ++round) {
        const unsigned __int128 p = (unsigned __int128)0xD2E7470EE14C6C93ull * a;
        const unsigned __int128 q = (unsigned __int128)0xCA5A826395121157ull * c;
        a = uint64_t(q >> 64) ^ b ^ k0;
        c = uint64_t(p >> 64) ^ d ^ k1;
        b = uint64_t(q);
        d = uint64_t(p);
        k0 += 0x9E3779B97F4A7C15ull;
        k1 += 0xBB67AE8584CAA73Bull;
    }
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}

void normals(const uint64_t* words, int64_t n, const double* constants, const Series& logarithm,
             const Series& sine, double* out) {
    const double pi_step = constants[0], pi_shift = constants[1], log2 = constants[2];
    const uint64_t root = 0x3FE6A09E667F3BCDull;  // the bits of sqrt(1/2)
    for (int64_t i = 0; i < n; ++i) {
        const double u = double(int64_t(words[i] >> 32)) * 0x1p-32 + 0x1p-33;
        const int64_t bits = __builtin_bit_cast(int64_t, u);
        const int64_t k = (bits - int64_t(root)) >> 52;
        const double m = __builtin_bit_cast(double, bits - int64_t(uint64_t(k) << 52));
        const double log = odd((m - 1.0) / (m + 1.0), logarithm) + double(k) * log2;
        const double radius = std::sqrt(log * -2.0);
        const double angle = double(int64_t(words[i] & 0xFFFFFFFFull)) * pi_step + pi_shift;
        out[i] = radius * odd(angle, sine);
    }
}

template <class T>
inline T rounded(double x);
template <>
inline double rounded<double>(double x) { return x; }
template <>
inline float rounded<float>(double x) { return float(x); }
template <>
inline bfloat16 rounded<bfloat16>(double x) { return narrow<bfloat16>(float(x)); }

template <class T>
void fill(T* out, int64_t start, int64_t count, const uint64_t* key, double scale,
          const double* constants, int threads) {
    Series logarithm, sine;
    std::memcpy(logarithm.terms, constants + 3, sizeof logarithm.terms);
    std::memcpy(sine.terms, constants + 3 + TERMS, sizeof sine.terms);
    const int64_t blocks = (count + BLOCK - 1) / BLOCK, useful = (count + GRAIN - 1) / GRAIN;
    const int64_t parts = useful < threads ? useful : threads;
#pragma omp parallel for num_threads(int(parts < 1 ? 1 : parts)) schedule(static) if (parts > 1)
    for (int64_t block = 0; block < blocks; ++block) {
        uint64_t words[BLOCK + 8];
        double made[BLOCK];
        const int64_t first = start + block * BLOCK, left = count - block * BLOCK;
        const int64_t n = left < BLOCK ? left : BLOCK, skipped = first % 4;
        for (int64_t i = 0; i < n + skipped; i += 4) philox(uint64_t((first + i) / 4), key, words + i);
        normals(words + skipped, n, constants, logarithm, sine, made);
        T* to = out + block * BLOCK;
        for (int64_t i = 0; i < n; ++i) to[i] = rounded<T>(made[i] * scale);
    }
}

}  // namespace

extern "C" {

// dtype: 0 float32, 1 bfloat16, 2 float64. constants: pi / 2^32, the angle's shift, log 2, and the
// coefficients of both series.
void outsize_normal(int dtype, void* out, int64_t start, int64_t count, const uint64_t* key,
                    double scale, const double* constants, int threads) {
    if (dtype == 0)
        fill(static_cast<float*>(out), start, count, key, scale, constants, threads);
    else if (dtype == 1)
        fill(static_cast<bfloat16*>(out), start, count, key, scale, constants, threads);
    else
        fill(static_cast<double*>(out), start, count, key, scale, constants, threads);
}

}  // extern "C"
