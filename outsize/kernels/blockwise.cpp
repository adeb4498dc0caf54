// AdamW whose two moments are kept in 8 bits, a scale for each block (outsize/kernels/blockwise.py).
//
// One pass over memory: a block is read, updated and rounded again while it is in the cache. What
// the twin in PyTorch rounds after every operation is rounded after every operation here too, so
// that both give the same bits, as do any number of threads and any way to cut the blocks.

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <cmath>
#include <cstdint>

#include "storage.h"

namespace {

using std::int32_t;
using std::int64_t;
using std::uint32_t;
using std::uint8_t;

using outsize::bfloat16;
using outsize::narrow;
using outsize::wide;

constexpr int64_t MOST = 4096;     // elements of a block
constexpr float TINY = 0x1p-126f;   // the least normal number: its inverse is finite
constexpr int64_t GRAIN = 1 << 14;  // elements below which a thread more costs more than it saves

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

template <class W, class G>
void block(W* w, const G* g, uint8_t* c1, uint8_t* c2, float* s1, float* s2, int64_t n,
           const Codes& first, const Codes& second, const Numbers& a) {
    float m[MOST], v[MOST];
    const float old1 = *s1, old2 = *s2;
    float most1 = 0.0f, most2 = 0.0f;
#pragma omp simd reduction(max : most1, most2)
    for (int64_t i = 0; i < n; ++i) {
        const float x = wide(g[i]);
        const float mean = first.values[c1[i]] * old1 * a.beta1 + x * a.rest1;
        const float square = second.values[c2[i]] * old2 * a.beta2 + x * x * a.rest2;
        m[i] = mean;
        v[i] = square;
        const float size = std::fabs(mean);
        most1 = size > most1 ? size : most1;
        most2 = square > most2 ? square : most2;
        const float step = mean / (std::sqrt(square) * a.root + a.eps) * a.rate;
        w[i] = narrow<W>(wide(w[i]) * a.keep - step);
    }
    *s1 = most1;
    *s2 = most2;
    const float by1 = 1.0f / (most1 > TINY ? most1 : TINY);
    const float by2 = 1.0f / (most2 > TINY ? most2 : TINY);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) c1[i] = first.of(m[i] * by1);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) c2[i] = second.of(v[i] * by2);
}

template <class W, class G>
void blocks(W* w, const G* g, uint8_t* c1, uint8_t* c2, float* s1, float* s2, int64_t count,
            int64_t size, const Codes& first, const Codes& second, const Numbers& a, int threads) {
    const int64_t all = (count + size - 1) / size, useful = (count + GRAIN - 1) / GRAIN;
    const int64_t parts = useful < threads ? useful : threads;
#pragma omp parallel for num_threads(int(parts < 1 ? 1 : parts)) if (parts > 1)
    for (int64_t b = 0; b < all; ++b) {
        const int64_t at = b * size, n = count - at < size ? count - at : size;
        block(w + at, g + at, c1 + at, c2 + at, s1 + b, s2 + b, n, first, second, a);
    }
}

}  // namespace

extern "C" {

// dtypes: of weights and of gradients, 0 float32, 1 bfloat16. numbers: as in Numbers. values,
// borders: of both tables; buckets: of both, 2 * count each. size: of a block, MOST at most.
void outsize_blockwise_adam(int weight_dtype, int gradient_dtype, void* w, const void* g,
                            uint8_t* c1, uint8_t* c2, float* s1, float* s2, int64_t count,
                            int64_t size, const float* values, const float* borders,
                            const int32_t* buckets, int first_bucket, int bucket_count,
                            const float* numbers, int threads) {
    const Codes first{values, borders, buckets, first_bucket, bucket_count};
    const Codes second{values + 256, borders + 256, buckets + 2 * bucket_count, first_bucket,
                       bucket_count};
    const Numbers a{numbers[0], numbers[1], numbers[2], numbers[3],
                    numbers[4], numbers[5], numbers[6], numbers[7]};
    const auto with = [&](auto* weights) {
        if (gradient_dtype == 0)
            blocks(weights, static_cast<const float*>(g), c1, c2, s1, s2, count, size, first,
                   second, a, threads);
        else
            blocks(weights, static_cast<const bfloat16*>(g), c1, c2, s1, s2, count, size, first,
                   second, a, threads);
    };
    if (weight_dtype == 0)
        with(static_cast<float*>(w));
    else
        with(static_cast<bfloat16*>(w));
}

}  // extern "C"
