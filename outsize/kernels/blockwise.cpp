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

#if defined(__AVX2__) && defined(__FMA__)
#define BY_LANES
#include <immintrin.h>
#endif

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
constexpr int SIGNED_ZERO = 127;    // the code of 0 in the signed table; in the other it is 0
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

// What one block reads and writes. m, v: its new moments before they are rounded.
template <class W, class G>
struct Block {
    W* w;
    const G* g;
    uint8_t *c1, *c2;
    float old1, old2;  // scales
    float most1 = 0.0f, most2 = 0.0f;
    alignas(64) float m[MOST], v[MOST];  // as they come: zeros would cost more than the update

    Block(W* w, const G* g, uint8_t* c1, uint8_t* c2, float old1, float old2)
        : w(w), g(g), c1(c1), c2(c2), old1(old1), old2(old2) {}
};

#if defined(BY_LANES)

constexpr int LANES = 8, GROUPS = 4;

inline __m256 all(float x) { return _mm256_set1_ps(x); }
inline __m256i all(int32_t x) { return _mm256_set1_epi32(x); }
inline __m256i bits(__m256 x) { return _mm256_castps_si256(x); }

// Of eight numbers those that the lowest three bits of each index name.
inline __m256 pick(const float* from, __m256i at) {
    return _mm256_permutevar8x32_ps(_mm256_load_ps(from), at);
}

inline __m256 load(const float* x) { return _mm256_loadu_ps(x); }
inline __m256 load(const bfloat16* x) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

inline void store(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
inline void store(bfloat16* to, __m256 x) {  // as narrow<bfloat16>
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits(x), 16), all(1));
    const __m256i up = _mm256_add_epi32(bits(x), _mm256_add_epi32(odd, all(0x7fff)));
    const __m256i nan = bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i y = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), all(0x7fc0), nan);
    const __m128i low = _mm256_castsi256_si128(y), high = _mm256_extracti128_si256(y, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
}

// Eight loads: a gather takes longer on many processors.
inline __m256 look(const float* t, const uint8_t* c) {
    return _mm256_setr_ps(t[c[0]], t[c[1]], t[c[2]], t[c[3]], t[c[4]], t[c[5]], t[c[6]], t[c[7]]);
}

inline float largest(__m256 x) {
    float each[LANES], most = 0.0f;
    _mm256_storeu_ps(each, x);
    for (const float one : each) most = one > most ? one : most;
    return most;
}

// The update of a block's first numbers, eight at a time; gives how many. Operation by operation
// that of `update`. a: a copy, that no weight written could be part of.
template <class W, class G>
int64_t update_lanes(Block<W, G>& b, int64_t n, const Codes& first, const Codes& second,
                     Numbers a) {
    const __m256 old1 = all(b.old1), old2 = all(b.old2);
    __m256 most1 = all(0.0f), most2 = most1;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const __m256 x = load(b.g + i);
        __m256 mean = _mm256_mul_ps(look(first.values, b.c1 + i), old1);
        __m256 square = _mm256_mul_ps(look(second.values, b.c2 + i), old2);
        mean = _mm256_add_ps(_mm256_mul_ps(mean, all(a.beta1)), _mm256_mul_ps(x, all(a.rest1)));
        square = _mm256_add_ps(_mm256_mul_ps(square, all(a.beta2)),
                               _mm256_mul_ps(_mm256_mul_ps(x, x), all(a.rest2)));
        _mm256_store_ps(b.m + i, mean);
        _mm256_store_ps(b.v + i, square);
        most1 = _mm256_max_ps(_mm256_andnot_ps(all(-0.0f), mean), most1);  // a NaN leaves what was
        most2 = _mm256_max_ps(square, most2);
        const __m256 root = _mm256_mul_ps(_mm256_sqrt_ps(square), all(a.root));
        const __m256 step =
            _mm256_mul_ps(_mm256_div_ps(mean, _mm256_add_ps(root, all(a.eps))), all(a.rate));
        store(b.w + i, _mm256_sub_ps(_mm256_mul_ps(load(b.w + i), all(a.keep)), step));
    }
    b.most1 = largest(most1);
    b.most2 = largest(most2);
    return i;
}

// A table's decades. Within one the borders are a line: a number's code, less that of zero, is the
// integer below slope * x + offset. Eight entries each, by decade; the last is below the first one:
// numbers that have the code of zero. A decade begins above `from`, its codes end below `limit`.
//
// Offset and limit bring that number to 512..768: the digits of a float32 are then 9 bits of an
// integer and 14 of a fraction, in which what is within MARGIN of a border begins with ten zeros.
// The line and the borders, which are rounded, differ by less than half of MARGIN; which side such
// a number is on says Codes::of.
struct Decades {
    static constexpr int COUNT = 7, FRACTION = 14;
    static constexpr double MARGIN = 0x1p-12, BIAS = 512 + MARGIN;
    static constexpr int32_t NEAR = (1 << FRACTION) - (1 << (FRACTION - 11));
    static constexpr float LEAST = 0x1p-24f;  // below every border but the one at zero

    // Times the exponent of a float32, shifted by 16 and modulo 8: the decade that begins in
    // [2^e, 2^(e+1)), or where none does the one of these numbers or that above. About log10(2);
    // as it is, both tables need no constant beside it.
    static constexpr int32_t LOG = 20524;

    alignas(32) float from[8], slope[8], offset[8], limit[8];
    float one;  // what is above has the code of 1

    // zero: its code. parts: codes of the first decade.
    Decades(const Codes& codes, int zero, int parts) : one(codes.borders[254]) {
        double scale = 1e-6;
        int before = 1;  // codes from that of zero to this decade's first
        for (int i = 0; i < COUNT; ++i, parts *= 2, scale *= 10) {
            from[i] = codes.borders[zero + before - 1];
            slope[i] = float(parts / (0.9 * scale));
            offset[i] = float(BIAS + before - parts / 9.0);
            before += parts;
            limit[i] = float(BIAS + before - 0.5);
        }
        from[COUNT] = INFINITY;
        slope[COUNT] = 0.0f;
        offset[COUNT] = limit[COUNT] = float(BIAS + 0.5);
    }

    // Codes, less that of zero, of GROUPS vectors of numbers from -1 to 1. near: all bits of those
    // that Codes::of must say. A processor looks some sixty operations ahead: each step is done for
    // all vectors, so that they wait for one another less.
    template <bool SIGNED>
    inline void of(__m256* x, __m256i* c, __m256i* near) const {
        __m256i negative[GROUPS], y[GROUPS];
        if (SIGNED)  // ties go to the lower code: a negative number is as the next larger one
            for (int k = 0; k < GROUPS; ++k) {
                negative[k] = bits(_mm256_cmp_ps(x[k], all(-TINY), _CMP_LE_OQ));
                const __m256i size = bits(_mm256_andnot_ps(all(-0.0f), x[k]));
                x[k] = _mm256_castsi256_ps(_mm256_sub_epi32(size, negative[k]));
            }
        for (int k = 0; k < GROUPS; ++k) x[k] = _mm256_max_ps(all(LEAST), x[k]);  // a NaN stays
        for (int k = 0; k < GROUPS; ++k)
            y[k] = _mm256_mulhi_epu16(_mm256_srli_epi32(bits(x[k]), 23), all(LOG));
        for (int k = 0; k < GROUPS; ++k) {
            const __m256 below = _mm256_cmp_ps(x[k], pick(from, y[k]), _CMP_LE_OQ);
            y[k] = _mm256_add_epi32(y[k], bits(below));
        }
        for (int k = 0; k < GROUPS; ++k) {
            const __m256 line = _mm256_fmadd_ps(x[k], pick(slope, y[k]), pick(offset, y[k]));
            y[k] = bits(_mm256_min_ps(pick(limit, y[k]), line));
        }
        for (int k = 0; k < GROUPS; ++k) {
            near[k] = _mm256_cmpeq_epi32(_mm256_and_si256(y[k], all(NEAR)), all(0));
            c[k] = _mm256_and_si256(_mm256_srli_epi32(y[k], FRACTION), all(255));
            c[k] = _mm256_sub_epi32(c[k], bits(_mm256_cmp_ps(x[k], all(one), _CMP_GT_OQ)));
            if (!SIGNED) continue;
            c[k] = _mm256_max_epi32(c[k], _mm256_abs_epi32(negative[k]));  // and none is zero
            c[k] = _mm256_sub_epi32(_mm256_xor_si256(c[k], negative[k]), negative[k]);
        }
    }
};

// Rounds a block's first numbers, 32 at a time; gives how many.
template <bool SIGNED>
int64_t round_lanes(const float* x, float by, uint8_t* c, int64_t n, const Codes& codes,
                    const Decades& decades) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs join halves
    const __m256i zero = _mm256_set1_epi16(SIGNED ? SIGNED_ZERO : 0);
    int64_t i = 0;
    for (; i + GROUPS * LANES <= n; i += GROUPS * LANES) {
        __m256 y[GROUPS];
        __m256i found[GROUPS], near[GROUPS];
        for (int k = 0; k < GROUPS; ++k) y[k] = _mm256_mul_ps(load(x + i + k * LANES), all(by));
        decades.of<SIGNED>(y, found, near);
        const __m256i low = _mm256_add_epi16(_mm256_packs_epi32(found[0], found[1]), zero);
        const __m256i high = _mm256_add_epi16(_mm256_packs_epi32(found[2], found[3]), zero);
        const __m256i bytes = _mm256_packus_epi16(low, high);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(c + i),
                            _mm256_permutevar8x32_epi32(bytes, order));
        const __m256i any = _mm256_or_si256(_mm256_or_si256(near[0], near[1]),
                                            _mm256_or_si256(near[2], near[3]));
        if (_mm256_testz_si256(any, any)) continue;
        for (int k = 0; k < GROUPS; ++k) {
            int left = _mm256_movemask_ps(_mm256_castsi256_ps(near[k]));
            for (; left; left &= left - 1) {
                const int64_t at = i + k * LANES + __builtin_ctz(left);
                c[at] = codes.of(x[at] * by);
            }
        }
    }
    return i;
}

#else

// Nothing is done by lanes: what the compiler makes of plain loops has to do.
struct Decades {
    Decades(const Codes&, int, int) {}
};
template <class W, class G>
int64_t update_lanes(Block<W, G>&, int64_t, const Codes&, const Codes&, Numbers) {
    return 0;
}
template <bool SIGNED>
int64_t round_lanes(const float*, float, uint8_t*, int64_t, const Codes&, const Decades&) {
    return 0;
}

#endif

struct Table {
    Codes codes;
    Decades decades;
};

template <class W, class G>
void update(Block<W, G>& b, int64_t n, const Codes& first, const Codes& second, const Numbers& a) {
    const int64_t done = update_lanes(b, n, first, second, a);
    float most1 = b.most1, most2 = b.most2;
#pragma omp simd reduction(max : most1, most2)
    for (int64_t i = done; i < n; ++i) {
        const float x = wide(b.g[i]);
        const float mean = first.values[b.c1[i]] * b.old1 * a.beta1 + x * a.rest1;
        const float square = second.values[b.c2[i]] * b.old2 * a.beta2 + x * x * a.rest2;
        b.m[i] = mean;
        b.v[i] = square;
        const float size = std::fabs(mean);
        most1 = size > most1 ? size : most1;
        most2 = square > most2 ? square : most2;
        const float step = mean / (std::sqrt(square) * a.root + a.eps) * a.rate;
        b.w[i] = narrow<W>(wide(b.w[i]) * a.keep - step);
    }
    b.most1 = most1;
    b.most2 = most2;
}

// The codes of n numbers whose largest magnitude is `most`.
template <bool SIGNED>
void round(const float* x, float most, uint8_t* c, int64_t n, const Table& table) {
    const float by = 1.0f / (most > TINY ? most : TINY);
    const int64_t done = round_lanes<SIGNED>(x, by, c, n, table.codes, table.decades);
#pragma omp simd
    for (int64_t i = done; i < n; ++i) c[i] = table.codes.of(x[i] * by);
}

template <class W, class G>
void blocks(W* w, const G* g, uint8_t* c1, uint8_t* c2, float* s1, float* s2, int64_t count,
            int64_t size, const Table& first, const Table& second, const Numbers& a, int threads) {
    const int64_t all = (count + size - 1) / size, useful = (count + GRAIN - 1) / GRAIN;
    const int64_t parts = useful < threads ? useful : threads;
#pragma omp parallel for num_threads(int(parts < 1 ? 1 : parts)) if (parts > 1)
    for (int64_t b = 0; b < all; ++b) {
        const int64_t at = b * size, n = count - at < size ? count - at : size;
        Block<W, G> here(w + at, g + at, c1 + at, c2 + at, s1[b], s2[b]);
        update(here, n, first.codes, second.codes, a);
        round<true>(here.m, s1[b] = here.most1, here.c1, n, first);
        round<false>(here.v, s2[b] = here.most2, here.c2, n, second);
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
    const Codes signed_{values, borders, buckets, first_bucket, bucket_count};
    const Codes unsigned_{values + 256, borders + 256, buckets + 2 * bucket_count, first_bucket,
                          bucket_count};
    const Table first{signed_, Decades(signed_, SIGNED_ZERO, 1)};
    const Table second{unsigned_, Decades(unsigned_, 0, 2)};
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
