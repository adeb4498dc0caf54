// Products by codes that are whole numbers, of rows that are rounded to whole numbers of 8 bits too:
// as much of a row as one scale of the weight is for has a scale of its own, its largest magnitude over
// 127. Sums over a group are exact; then groups follow one another in float32, each number multiplied by
// the row's scale, then by the weight's, then added, each time rounded. Outliers of a row, where they
// are apart, are multiplied one after another and added at the end. So a row's bits depend on nothing
// but the row, and any processor gives them. The twin is `plain` in eights.py.

#include <tuple>

#include "eights.h"
#include "team.h"

#if defined(OUTSIZE_FOURS)
#include "eights_vnni.h"
#elif defined(__AVX2__)
#include "eights_avx2.h"
#endif

namespace {

using namespace outsize;

constexpr int64_t TASK = 64;  // outputs of a task

using Passes = void(const Rounded&, const Panel&, const float*, float*);

// One sum of a group, as codes lie.
inline int32_t summed(const int8_t* x, const uint8_t* codes, int64_t group, bool four) {
    int32_t sum = 0;
    const int64_t half = group / 2;
    if (four)
        for (int64_t i = 0; i < half; ++i)
            sum += x[i] * ((codes[i] & 15) - ZERO) + x[half + i] * ((codes[i] >> 4) - ZERO);
    else
        for (int64_t i = 0; i < group; ++i) sum += x[i] * int8_t(codes[i]);
    return sum;
}

void one_by_one(const Rounded& r, const Panel& panel, const float* scales, float* to) {
    for (int64_t g = 0; g < r.groups; ++g, scales += ACROSS)
        for (int64_t t = 0; t < r.rows; ++t)
            for (int64_t o = 0; o < ACROSS; ++o) {
                const int8_t* x = reinterpret_cast<const int8_t*>(r.at(g, t));
                const uint8_t* codes = panel.first[o] + g * r.w.block + r.w.head;
                const float sum = float(summed(x, codes, r.w.group, r.four));
                to[t * ACROSS + o] += held(held(sum * r.scale(g, t)) * scales[o]);
            }
}

// Of ACROSS outputs, by groups: the scales of 16 bits that blocks begin with.
inline void scales_of(const Panel& panel, const Layout& layout, int64_t groups, float* to) {
    const uint8_t* const* rows = panel.first;
#if defined(__AVX512F__)
    for (int64_t g = 0; g < (panel.packed ? groups : 0); ++g, to += ACROSS) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[0]) + g);
        const __m512i widened = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
        store(to, layout.scales == FLOAT16 ? vec(_mm512_cvtph_ps(bits)) : vec(widened));
    }
    if (panel.packed) return;
    for (int64_t g = 0; g < groups; ++g, to += ACROSS) {
        __m512i bits = _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int o = 0; o < ACROSS; ++o) {
            int32_t own;
            std::memcpy(&own, rows[o] + g * layout.block, sizeof own);
            bits = _mm512_mask_set1_epi32(bits, __mmask16(1 << o), own);
        }
        const __m512i widened = _mm512_slli_epi32(bits, 16);
        const __m512 halves = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
        store(to, layout.scales == FLOAT16 ? vec(halves) : vec(widened));
    }
#else
#if defined(__AVX2__) && defined(__F16C__)
    for (int64_t i = 0; i < (panel.packed ? groups * ACROSS : 0); i += LANES) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[0] + 2 * i));
        const __m256i widened = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
        store(to + i, layout.scales == FLOAT16 ? vec(_mm256_cvtph_ps(bits)) : vec(widened));
    }
    if (panel.packed) return;
#endif
    const int64_t next = panel.packed ? ACROSS * layout.head : layout.block;
    for (int64_t o = 0; o < ACROSS; ++o) {
        const uint8_t* own = panel.packed ? rows[0] + o * layout.head : rows[o];
        for (int64_t g = 0; g < groups; ++g) to[g * ACROSS + o] = layout.scale(own + g * next, 0);
    }
#endif
}

// The same of scales that lie apart.
inline void scales_apart(const Matrix& w, int64_t first, int64_t groups, float* to) {
    for (int64_t o = 0; o < ACROSS; ++o) {
        const int64_t row = std::min(first + o, w.outputs - 1) * groups;
        for (int64_t g = 0; g < groups; ++g) to[g * ACROSS + o] = w.scales[(row + g) / w.every];
    }
}

// What is apart of a row, by ACROSS outputs, onto their sums.
inline void add_outliers(const Rounded& r, int64_t t, const Panel& panel, const float* scales, float* sums) {
    vec sum[ACROSS / LANES] = {};
    const int64_t half = r.w.group / 2;
    for (const Outlier& x : r.outliers[t]) {
        const int64_t i = x.index, byte = r.four && i >= half ? i - half : i;
        alignas(64) float codes[ACROSS];
        for (int64_t o = 0; o < ACROSS; ++o) {
            const uint8_t code = panel.code(r.w, o, x.group, byte);
            codes[o] = !r.four ? int8_t(code) : (i < half ? code & 15 : code >> 4) - ZERO;
        }
        for (int64_t v = 0; v < ACROSS / LANES; ++v) {
            const vec weight = load(codes + v * LANES) * load(scales + x.group * ACROSS + v * LANES);
            sum[v] = sum[v] + held(all(x.value) * held(weight));
        }
    }
    for (int64_t v = 0; v < ACROSS / LANES; ++v) store(sums + v * LANES, load(sums + v * LANES) + sum[v]);
}

// Sums of COUNT outputs, or of `some`, with what is added. Each row by way of arrays of its own, as
// sums and y might be one for all that a compiler knows.
template <int64_t COUNT, class T>
inline void ended(const float* sums, int64_t rows, int64_t some, const T* bias, T* y, int64_t row) {
    const int64_t count = COUNT ? COUNT : some;
    float more[ACROSS] = {};
    for (int64_t o = 0; o < count; ++o) more[o] = bias ? wide(bias[o]) : 0.0f;
    for (int64_t t = 0; t < rows; ++t, sums += ACROSS, y += row) {
        float sum[ACROSS];
        T found[ACROSS];
        std::memcpy(sum, sums, sizeof sum);
        if (bias)
            for (int64_t o = 0; o < ACROSS; ++o) sum[o] += more[o];
        for (int64_t o = 0; o < ACROSS; ++o) found[o] = narrow<T>(sum[o]);
        std::memcpy(y, found, count * sizeof(T));
    }
}

#if !defined(OUTSIZE_FOURS) && defined(__AVX2__)
template <int ROWS>
Passes* packed_of(const Rounded& r) {
    if (r.four) return r.chunks == 1 ? by_packed<true, 1, ROWS> : by_packed<true, 0, ROWS>;
    return r.chunks == 1 ? by_packed<false, 1, ROWS> : by_packed<false, 0, ROWS>;
}
#endif

// What sums groups by the weight's rows and scales.
inline Passes* passes_of(const Rounded& r, bool packed) {
    if (r.w.group % CHUNK) return one_by_one;
#if defined(OUTSIZE_FOURS)
    if (packed && r.four) return r.chunks == 1 ? by_packed<true, 1> : by_packed<true, 0>;
    if (packed) return r.chunks == 1 ? by_packed<false, 1> : by_packed<false, 0>;
    if (r.four) return r.chunks == 1 ? by_fours<true, 1> : by_fours<true, 0>;
    return r.chunks == 1 ? by_fours<false, 1> : by_fours<false, 0>;
#elif defined(__AVX2__)
    if (packed && r.rows == 1) return packed_of<1>(r);
    if (packed && r.rows == FEW) return packed_of<FEW>(r);
    if (!r.turned) return by_few;
    if (r.four) return r.chunks == 1 ? by_vectors<true, 1> : by_vectors<true, 0>;
    return r.chunks == 1 ? by_vectors<false, 1> : by_vectors<false, 0>;
#else
    return one_by_one;
#endif
}

// Outputs [first, first + ACROSS) of w, those that there are, of all rows. work: scales and sums.
template <class T>
void panel(const Rounded& r, const Matrix& w, int64_t first, float* work, T* y) {
    const Layout layout = w.layout();
    const int64_t count = std::min(ACROSS, w.outputs - first), row = r.groups * layout.block;
    Panel own{{}, w.packed && count == ACROSS};
    const uint8_t** rows = own.first;
    for (int64_t o = 0; o < ACROSS; ++o)  // the last again where there are no more
        rows[o] = static_cast<const uint8_t*>(w.data) + (first + std::min(o, count - 1)) * row;
    const int64_t ahead = FOURS || own.packed ? 0 : ACROSS * row;  // those ask by themselves
    for (int64_t i = 0; i < ahead; i += 64) __builtin_prefetch(rows[0] + ahead + i);
    float *scales = work, *sums = work + r.groups * ACROSS;
    if (layout.scales == APART)
        scales_apart(w, first, r.groups, scales);
    else
        scales_of(own, layout, r.groups, scales);
    std::fill(sums, sums + r.rows * ACROSS, 0.0f);
    for (int64_t t = 0; t < r.rows; ++t) __builtin_prefetch(y + first + t * w.outputs, 1);
    auto* call = passes_of(r, own.packed);
    call(r, own, scales, sums);
    for (int64_t t = 0; t < int64_t(r.outliers.size()); ++t)
        if (!r.outliers[t].empty()) add_outliers(r, t, own, scales, sums + t * ACROSS);
    const T* bias = w.bias ? static_cast<const T*>(w.bias) + first : nullptr;
    auto* end = count == ACROSS ? ended<ACROSS, T> : ended<0, T>;
    end(sums, r.rows, count, bias, y + first, w.outputs);
}

// Outputs of a task. y: of the first row.
template <class T>
void task_of(const Rounded& rows, const Matrix& w, int64_t task, float* work, T* y) {
    const int64_t last = std::min(w.outputs, (task + 1) * TASK);
    for (int64_t o = task * TASK; o < last; o += ACROSS) panel(rows, w, o, work, y);
}

int64_t tasks_of(const Matrix& w) { return (w.outputs + TASK - 1) / TASK; }

template <class T>
void product(const T* x, const Matrix& w, T* y, int64_t tokens, Team team) {
    const int64_t begin = team.first(tasks_of(w)), end = team.last(tasks_of(w));
    for (int64_t some = 0; some < tokens; some += MOST_ROWS) {
        const int64_t count = std::min(MOST_ROWS, tokens - some);
        const Buffer room = buffer(Rounded::floats(w, count));
        Rounded rows(w, count, room.get());
#pragma omp parallel num_threads(team.count) if (team.starts())
        {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < count; ++t)
                rows.take(x + (some + t) * w.inner, t, w.most ? w.most + some + t : nullptr);
            const Buffer work = buffer((rows.groups + count) * ACROSS);
#pragma omp for schedule(static)
            for (int64_t task = begin; task < end; ++task)
                task_of(rows, w, task, work.get(), y + some * w.outputs);
        }
    }
}

// Whether rows that are rounded for one weight are so for another.
bool alike(const Matrix& a, const Matrix& b) {
    const auto facts = [](const Matrix& m) {
        return std::make_tuple(m.inner, m.group, m.block, m.head, m.order, m.kind, m.eights, m.every, m.most);
    };
    return facts(a) == facts(b);
}

// Rows of a step that a team rounds once for all weights of a format, in parts that stay in a cache.
struct RoundedRows {
    const Matrix format;
    std::vector<Rounded> parts;

    RoundedRows(const Matrix& w, int64_t tokens, float* room) : format(w) {
        for (int64_t some = 0; some < tokens; some += MOST_ROWS) {
            const int64_t count = std::min(MOST_ROWS, tokens - some);
            parts.emplace_back(format, count, room);
            room += Rounded::floats(format, count);
        }
    }
    static int64_t floats(const Matrix& w, int64_t tokens) {
        const int64_t left = tokens % MOST_ROWS;
        return tokens / MOST_ROWS * Rounded::floats(w, MOST_ROWS) + (left ? Rounded::floats(w, left) : 0);
    }
    template <class T>
    void take(const T* x, int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t)
            parts[t / MOST_ROWS].take(x + t * format.inner, t % MOST_ROWS, nullptr);
    }
    template <class T>
    void times(const Matrix& w, T* y, Team team) const {
        const Buffer work = buffer((parts[0].groups + parts[0].rows) * ACROSS);
        for (const Rounded& rows : parts) {
            for (int64_t task = team.first(tasks_of(w)); task < team.last(tasks_of(w)); ++task)
                task_of(rows, w, task, work.get(), y);
            y += rows.rows * w.outputs;
        }
    }
};

// A panel as it lies in files to one that is packed; from: a copy.
void pack(const Matrix& w, const uint8_t* from, uint8_t* to) {
    const int64_t groups = w.inner / w.group, row = groups * w.block;
    const uint32_t shift = w.order == HALVES ? 0 : 0x01010101u * MIDDLE;
    uint8_t* codes = to + ACROSS * groups * w.head;
    for (int64_t o = 0; o < ACROSS; ++o)
        for (int64_t g = 0; g < groups; ++g) {
            const uint8_t* block = from + o * row + g * w.block;
            std::memcpy(to + (g * ACROSS + o) * w.head, block, w.head);
            uint8_t* own = codes + Panel::place(w, o, g, 0);
            for (int64_t i = w.head; i < w.block; i += 4, own += 4 * ACROSS) {
                uint32_t four;
                std::memcpy(&four, block + i, sizeof four);
                four ^= shift;
                std::memcpy(own, &four, sizeof four);
            }
        }
}

}  // namespace

extern "C" {

// Whole panels of a weight's rows, packed in their place; 0 where products here read none that are.
int outsize_eights_pack(const Matrix* w, int threads) {
    if (!(FOURS || TWOS) || w->group % CHUNK || w->outputs < ACROSS) return 0;
    const int64_t bytes = ACROSS * w->inner / w->group * w->block;
    uint8_t* panels = static_cast<uint8_t*>(const_cast<void*>(w->data));
#pragma omp parallel num_threads(threads)
    {
        std::vector<uint8_t> copy(bytes);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < w->outputs / ACROSS; ++p) {
            std::memcpy(copy.data(), panels + p * bytes, bytes);
            pack(*w, copy.data(), panels + p * bytes);
        }
    }
    return 1;
}

// As outsize_rows_product, of a weight whose codes are bytes or halves that count from -8.
void outsize_eights_product(int dtype, const void* x, const Matrix* w, void* y, int64_t tokens,
                            int threads, int index) {
    const Team team(threads, index);
    if (dtype == 0)
        product(static_cast<const float*>(x), *w, static_cast<float*>(y), tokens, team);
    else
        product(static_cast<const bfloat16*>(x), *w, static_cast<bfloat16*>(y), tokens, team);
}

// Rows of a step of so many tokens, to be rounded for weights like one, in memory for so many floats;
// `drop` them.
int64_t outsize_eights_floats(const Matrix* w, int64_t tokens) { return RoundedRows::floats(*w, tokens); }
void* outsize_eights_rows(const Matrix* w, int64_t tokens, float* room) { return new RoundedRows(*w, tokens, room); }
void outsize_eights_drop(void* rows) { delete static_cast<RoundedRows*>(rows); }
int outsize_eights_alike(const Matrix* a, const Matrix* b) { return alike(*a, *b); }

// Tokens [first, last) of x, rounded: by each of a team its own, before any of it multiplies.
void outsize_eights_round(int dtype, const void* x, void* rows, int64_t first, int64_t last) {
    RoundedRows& to = *static_cast<RoundedRows*>(rows);
    if (dtype == 0)
        to.take(static_cast<const float*>(x), first, last);
    else
        to.take(static_cast<const bfloat16*>(x), first, last);
}

// As outsize_eights_product by one of a team, of rows that are rounded.
void outsize_eights_times(int dtype, const void* rows, const Matrix* w, void* y, int threads, int index) {
    const RoundedRows& from = *static_cast<const RoundedRows*>(rows);
    if (dtype == 0)
        from.times(*w, static_cast<float*>(y), Team(threads, index));
    else
        from.times(*w, static_cast<bfloat16*>(y), Team(threads, index));
}

}  // extern "C"
