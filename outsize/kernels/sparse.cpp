// Bitmap-sparse buffers (Joo et al., "Endor", 2024): where the non-zeros are, one bit an element,
// and the non-zeros in order. Elements are patterns of 1, 2, 4 or 8 bytes: nothing is rounded.
//
// A buffer is cut into groups of a multiple of 64 elements; starts[g] counts the non-zeros before
// group g, so that groups are packed and unpacked side by side. A processor with VPEXPAND and
// VPCOMPRESS moves 64 bytes an instruction; what follows is the same loop without it.

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VBMI2__)
#include <immintrin.h>
#define WIDE 1
#endif

namespace {

constexpr int64_t LARGE = 8 << 20;  // bytes written: more than a core's caches hold

#ifdef WIDE
// One vector of 64 bytes: which elements have a bit set, expand, compress.
template <class T> struct Vector;
#define VECTOR(TYPE, MASK, BITS)                                                                  \
    template <> struct Vector<TYPE> {                                                             \
        using Mask = MASK;                                                                        \
        static Mask set(__m512i v) { return _mm512_test_epi##BITS##_mask(v, v); }                 \
        static __m512i expand(Mask m, __m512i v) { return _mm512_maskz_expand_epi##BITS(m, v); }  \
        static __m512i compress(Mask m, __m512i v) {                                              \
            return _mm512_maskz_compress_epi##BITS(m, v);                                         \
        }                                                                                         \
        static void store(TYPE *at, Mask m, __m512i v) {                                          \
            _mm512_mask_storeu_epi##BITS(at, m, v);                                               \
        }                                                                                         \
    };
VECTOR(uint8_t, __mmask64, 8)
VECTOR(uint16_t, __mmask32, 16)
VECTOR(uint32_t, __mmask16, 32)
VECTOR(uint64_t, __mmask8, 64)
#endif

template <class T> uint64_t bits_of(const T *x, int64_t n) {  // of up to 64 elements
    uint64_t bits = 0;
#ifdef WIDE
    constexpr int lanes = 64 / sizeof(T);
    if (n == 64) {
        for (int i = 0; i < 64; i += lanes)
            bits |= uint64_t(Vector<T>::set(_mm512_loadu_si512(x + i))) << i;
        return bits;
    }
#endif
    for (int64_t i = 0; i < n; ++i) bits |= uint64_t(x[i] != 0) << i;
    return bits;
}

// The non-zeros of 64 elements to `to`, of which no byte after them is touched.
template <class T> void compress(const T *x, uint64_t bits, int64_t n, T *to) {
#ifdef WIDE
    constexpr int lanes = 64 / sizeof(T);
    if (n == 64) {
        for (int i = 0; i < 64; i += lanes) {
            using Mask = typename Vector<T>::Mask;
            const Mask mask = Mask(bits >> i);
            const int count = __builtin_popcountll(mask);
            const Mask head = Mask(count == 64 ? ~0ull : (1ull << count) - 1);
            Vector<T>::store(to, head, Vector<T>::compress(mask, _mm512_loadu_si512(x + i)));
            to += count;
        }
        return;
    }
#endif
    for (int64_t i = 0; i < n; ++i)
        if (bits >> i & 1) *to++ = x[i];
}

// The other way. May read, but not use, up to 63 bytes after the last non-zero. past: around the
// caches, x is at a multiple of 64 bytes.
template <class T, bool past> const T *expand(const T *from, uint64_t bits, int64_t n, T *x) {
#ifdef WIDE
    constexpr int lanes = 64 / sizeof(T);
    if (n == 64) {
        for (int i = 0; i < 64; i += lanes) {
            const auto mask = typename Vector<T>::Mask(bits >> i);
            const __m512i made = Vector<T>::expand(mask, _mm512_loadu_si512(from));
            if (past)
                _mm512_stream_si512(reinterpret_cast<__m512i *>(x + i), made);
            else
                _mm512_storeu_si512(x + i, made);
            from += __builtin_popcountll(mask);
        }
        return from;
    }
#endif
    for (int64_t i = 0; i < n; ++i) x[i] = bits >> i & 1 ? *from++ : T(0);
    return from;
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
void mark(const T *x, int64_t n, int64_t group, uint64_t *bitmap, int64_t *counts, int threads) {
    const int64_t groups = (n + group - 1) / group;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t g = 0; g < groups; ++g) {
        int64_t count = 0;
        for (int64_t i = g * group; i < least(n, (g + 1) * group); i += 64) {
            bitmap[i / 64] = bits_of(x + i, least(64, n - i));
            count += __builtin_popcountll(bitmap[i / 64]);
        }
        counts[g] = count;
    }
}

template <class T>
void pack(const T *x, int64_t n, int64_t group, const uint64_t *bitmap, const int64_t *starts,
          T *values, int threads) {
    const int64_t groups = (n + group - 1) / group;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t g = 0; g < groups; ++g) {
        T *to = values + starts[g];
        for (int64_t i = g * group; i < least(n, (g + 1) * group); i += 64) {
            compress(x + i, bitmap[i / 64], least(64, n - i), to);
            to += __builtin_popcountll(bitmap[i / 64]);
        }
    }
}

// How many groups have another number of bits than starts says, which no group is unpacked by.
template <class T, bool past>
int64_t unpack(const uint64_t *bitmap, const int64_t *starts, const T *values, int64_t n,
               int64_t group, int64_t nonzero, T *x, int threads) {
    const int64_t groups = (n + group - 1) / group;
    int64_t wrong = starts[0] != 0 || starts[groups] != nonzero;
    if (wrong) return wrong;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : wrong) if (threads > 1)
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t stop = least(n, (g + 1) * group);
        int64_t count = 0;
        for (int64_t i = g * group; i < stop; i += 64)
            count += __builtin_popcountll(bitmap[i / 64]);
        if (starts[g] < 0 || starts[g] + count > nonzero || starts[g + 1] != starts[g] + count) {
            ++wrong;
            continue;
        }
        const T *from = values + starts[g];
        for (int64_t i = g * group; i < stop; i += 64)
            from = expand<T, past>(from, bitmap[i / 64], least(64, n - i), x + i);
#ifdef WIDE
        if (past) _mm_sfence();  // before another thread is told that they are there
#endif
    }
    return wrong;
}

template <class Call> auto by_width(int width, Call call) {
    if (width == 1) return call(uint8_t());
    if (width == 2) return call(uint16_t());
    if (width == 4) return call(uint32_t());
    return call(uint64_t());
}

}  // namespace

extern "C" {

void outsize_sparse_mark(int width, const void *x, int64_t n, int64_t group, uint64_t *bitmap,
                         int64_t *counts, int threads) {
    by_width(width, [&](auto t) {
        mark(static_cast<const decltype(t) *>(x), n, group, bitmap, counts, threads);
    });
}

void outsize_sparse_pack(int width, const void *x, int64_t n, int64_t group,
                         const uint64_t *bitmap, const int64_t *starts, void *values,
                         int threads) {
    by_width(width, [&](auto t) {
        using T = decltype(t);
        pack(static_cast<const T *>(x), n, group, bitmap, starts, static_cast<T *>(values),
             threads);
    });
}

int64_t outsize_sparse_unpack(int width, const uint64_t *bitmap, const int64_t *starts,
                              const void *values, int64_t n, int64_t group, int64_t nonzero,
                              void *x, int threads) {
    return by_width(width, [&](auto t) {
        using T = decltype(t);
        const bool past = n * width >= LARGE && reinterpret_cast<uintptr_t>(x) % 64 == 0;
        const auto call = past ? unpack<T, true> : unpack<T, false>;
        return call(bitmap, starts, static_cast<const T *>(values), n, group, nonzero,
                    static_cast<T *>(x), threads);
    });
}
}
