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

#include "blockwise.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "blockwise_avx2.h"
#define BY_LANES
#if defined(__AVX512BW__) && defined(__AVX512VBMI__) && defined(__AVX512BITALG__)
#include "blockwise_avx512.h"
#define BY_WIDE_LANES
#endif
#endif

namespace {

using namespace outsize;
using namespace outsize::blockwise;

constexpr int64_t GRAIN = 1 << 14;  // elements below which a thread more costs more than it saves

#if !defined(BY_LANES)  // what the compiler makes of plain loops has to do
template <class W, class G>
int64_t moments_lanes(Block<W, G>&, int64_t from, int64_t, const Codes&, const Codes&, Numbers) {
    return from;
}
template <class W, class G>
void finish_lanes(Block<W, G>&, int64_t, int64_t, float, float, const Table&, const Table&, Numbers) {}
#endif

#if !defined(BY_WIDE_LANES)
template <class W, class G>
void moments_wide(Block<W, G>*, int, const Table&, const Table&, Numbers) {}
template <class W, class G>
void finish_wide(Block<W, G>&, int64_t, float, float, const Table&, const Table&, Numbers) {}
#endif

// The new moments of what wide passes left of a block, before they are rounded.
template <class W, class G>
void begin(Block<W, G>& b, const Table& first, const Table& second, const Numbers& a) {
    const float *const values1 = first.codes.values, *const values2 = second.codes.values;
    b.done = moments_lanes(b, b.begun, b.n, first.codes, second.codes, a);
    float most1 = b.most1, most2 = b.most2;
#pragma omp simd reduction(max : most1, most2)
    for (int64_t i = b.done; i < b.n; ++i) {
        const float x = wide(b.g[i]);
        const float mean = values1[b.c1[i]] * b.old1 * a.beta1 + x * a.rest1;
        const float square = values2[b.c2[i]] * b.old2 * a.beta2 + x * x * a.rest2;
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

// Its weights, its codes and its scales.
template <class W, class G>
void end(Block<W, G>& b, const Table& first, const Table& second, const Numbers& a) {
    const float most1 = b.most1, most2 = b.most2;
    const float by1 = 1.0f / (most1 > TINY ? most1 : TINY);
    const float by2 = 1.0f / (most2 > TINY ? most2 : TINY);
    *b.scale1 = most1;
    *b.scale2 = most2;
    finish_wide(b, b.begun, by1, by2, first, second, a);
    finish_lanes(b, b.begun, b.done, by1, by2, first, second, a);
#pragma omp simd
    for (int64_t i = b.done; i < b.n; ++i) {
        b.c1[i] = first.codes.of(b.m[i] * by1);
        b.c2[i] = second.codes.of(b.v[i] * by2);
    }
}

template <class W, class G>
void blocks(W* w, const G* g, uint8_t* c1, uint8_t* c2, float* s1, float* s2, int64_t count,
            int64_t size, const Table& first, const Table& second, const Numbers& a, int threads) {
    const int64_t all = (count + size - 1) / size, useful = (count + GRAIN - 1) / GRAIN;
    const int64_t parts = useful < threads ? useful : threads;
    const auto block = [&](int64_t b) {
        const int64_t at = (b < all ? b : all - 1) * size, n = count - at < size ? count - at : size;
        return Block<W, G>(w + at, g + at, c1 + at, c2 + at, s1 + at / size, s2 + at / size, n);
    };
    // By fours: the end of a block waits for its largest numbers, and the others' begin does not.
#pragma omp parallel for num_threads(int(parts < 1 ? 1 : parts)) if (parts > 1)
    for (int64_t b = 0; b < all; b += 4) {
        Block<W, G> group[] = {block(b), block(b + 1), block(b + 2), block(b + 3)};
        const int held = int(all - b < 4 ? all - b : 4);
        moments_wide(group, held, first, second, a);
        for (int i = 0; i < held; ++i) begin(group[i], first, second, a);
        for (int i = 0; i < held; ++i) end(group[i], first, second, a);
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
    const Table first{signed_, Decades::of<true>(signed_), Planes(values), Lines::of<true>(signed_)};
    const Table second{unsigned_, Decades::of<false>(unsigned_), Planes(values + 256),
                       Lines::of<false>(unsigned_)};
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
